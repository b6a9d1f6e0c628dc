"""Bounds of the numbers in documents: beyond them a file is damaged, and arithmetic would be too.

Times fit 64 bits with room to add up, and are exact as floats.
"""

from typing import Annotated

from pydantic import Field

MOST_NS = 2**53  # 104 days

TimeNs = Annotated[int, Field(ge=0, le=MOST_NS)]
Size = Annotated[int, Field(ge=0, le=2**60)]  # bytes, or elements of a tensor
PositiveSize = Annotated[int, Field(gt=0, le=2**60)]
Count = Annotated[int, Field(ge=0, le=2**31)]
PositiveCount = Annotated[int, Field(gt=0, le=2**31)]
Index = Annotated[int, Field(ge=0, le=2**20)]  # of a device, a layer, a chunk, a round
Flops = Annotated[int, Field(ge=0, le=10**30)]
PositiveFlops = Annotated[int, Field(gt=0, le=10**30)]
MeanNs = Annotated[float, Field(ge=0, le=MOST_NS, allow_inf_nan=False)]
PositiveMeanNs = Annotated[float, Field(gt=0, le=MOST_NS, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
