"""Rotary position embedding stretched to longer sequences than a model was first trained on."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node

ROPE_SCALING = "rope_scaling."  # prefix of its fields among the attributes of a kernel call

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RopeScaling(Node):
    """Llama 3.1's: frequencies that seldom turn within the original context are divided.

    A frequency that turns at most `low_freq_factor` times within
    `original_max_position_embeddings` tokens is divided by `factor`, one that turns at least
    `high_freq_factor` times stays, and those between are interpolated. Names and meaning are those
    of rope type "llama3" of Hugging Face's config.json.
    """

    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    low_freq_factor: PositiveFinite
    high_freq_factor: PositiveFinite
    original_max_position_embeddings: Annotated[int, Field(gt=0, le=2**53)]

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise PydanticCustomError(
                "rope_factors",
                "low_freq_factor {low} is not below high_freq_factor {high}",
                {"low": self.low_freq_factor, "high": self.high_freq_factor},
            )
        return self
