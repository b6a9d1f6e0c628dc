"""The mesh that a run is split over: six axes, and how many devices each has."""

from enum import StrEnum
from math import prod
from typing import Annotated

from pydantic import Field

from twinstream.schedule.node import Node

_Degree = Annotated[int, Field(gt=0, le=2**40)]


class Axis(StrEnum):
    """An axis of the mesh, outermost (over the slowest links) first."""

    PIPE = "pipe"
    EXPERT = "exp"
    DATA = "data"
    SEQUENCE = "seq"
    TENSOR_EXTERNAL = "tensor_ext"
    TENSOR_INTERNAL = "tensor_int"

    @property
    def flag(self) -> str:
        """The option that sets its degree."""
        return f"--p-{self.value.replace('_', '-')}"


class Mesh(Node):
    """Devices along each axis.

    A device is whatever has the flop rate that a run is timed by: one GPU, or a cluster of them
    within which communication is free.

    Fields:
        pipe: stages, among which layers are dealt.
        exp: groups of experts.
        data: replicas, among which the sequences of a batch are dealt; weights are kept in parts
            and gathered for each batch (ZeRO-3).
        seq: slices of a sequence.
        tensor_ext: parts of the width between layers.
        tensor_int: parts of the inner widths: heads, feed-forward.
    """

    pipe: _Degree = 1
    exp: _Degree = 1
    data: _Degree = 1
    seq: _Degree = 1
    tensor_ext: _Degree = 1
    tensor_int: _Degree = 1

    def degree(self, axis: Axis) -> int:
        """Devices along an axis."""
        degree: int = getattr(self, axis.value)
        return degree

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return prod(self.degree(axis) for axis in Axis)
