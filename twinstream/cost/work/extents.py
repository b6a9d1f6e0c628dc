"""How many values an array has, by the letters of its indices.

B sequences of a batch      L layers                  E experts
T tokens at an expert       D width between layers    F inner width of the feed-forward network
H heads                     K width of a head         J heads, then feed-forward: one sum for both
S tokens attended to        R experts at which they are
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from twinstream.cost.refusal import CostError, parts_of
from twinstream.cost.work.decoder import Batches, Decoder
from twinstream.cost.work.mesh import Axis, Mesh
from twinstream.cost.work.steps import Multiply, Spread, Sum

AXIS_OF = {
    "B": Axis.DATA,
    "L": Axis.PIPE,
    "E": Axis.EXPERT,
    "T": Axis.SEQUENCE,
    "S": Axis.TENSOR_EXTERNAL,
    "D": Axis.TENSOR_EXTERNAL,
    "F": Axis.TENSOR_INTERNAL,
    "H": Axis.TENSOR_INTERNAL,
    "J": Axis.TENSOR_INTERNAL,
}
_ONE_AT_A_TIME = "BL"  # a device works on one sequence and one layer at a time
_NAMES = {
    "B": "sequences of a batch",
    "L": "layers",
    "E": "experts",
    "T": "tokens at an expert",
    "S": "tokens at an expert",
    "D": "channels of --d-model",
    "F": "channels of --d-ffn",
    "H": "heads",
    "J": "heads and channels of --d-ffn together",
}


@dataclass(frozen=True)
class Extents:
    """Sizes of all indices, in all and on one device."""

    mesh: Mesh
    size: Mapping[str, int]
    local: Mapping[str, int]

    def count(self, indices: str) -> int:
        """Values of an array, each counted once."""
        return prod(self.size[index] for index in indices)

    def copies(self, indices: str) -> int:
        """Devices that hold the same values of an array: along the axes none of its indices has."""
        return prod(self.mesh.degree(axis) for axis in Axis if axis not in _axes(indices))

    def products_of(self, indices: str) -> Multiply:
        """Multiply two arrays that have these indices between them, on every device with both."""
        return Multiply(self.count(indices) * self.copies(indices))

    def sum_of(self, indices: str, summed: str) -> Sum:
        """Sum an index out."""
        rest = indices.replace(summed, "")
        axis = AXIS_OF.get(summed)
        degree = 1 if axis is None else self.mesh.degree(axis)
        return Sum(self.count(rest) * self.copies(indices), self.size[summed], axis, degree)

    def spread(
        self,
        indices: str,
        over: frozenset[Axis],
        crossings: tuple[tuple[Axis, float], ...] = (),
    ) -> Spread:
        """Give all devices along some axes all values of an array that lies in parts along them.

        Raises:
            CostError: the array does not come apart evenly.
        """
        axes = tuple(axis for axis in Axis if axis in over)
        degrees = tuple(self.mesh.degree(axis) for axis in axes)
        here = prod(self.local[index] for index in indices)
        if here % prod(degrees):
            flags = " x ".join(axis.flag for axis in axes if self.mesh.degree(axis) > 1)
            raise CostError(
                f"{here:,} values that a device has of an array of a layer do not come apart in "
                f"{prod(degrees):,} equal parts ({flags}): lower these, or choose other divisors"
            )
        held_along = _axes(indices) | over
        copies = prod(self.mesh.degree(axis) for axis in Axis if axis not in held_along)
        pairs = tuple(zip(axes, degrees, strict=True))
        return Spread(self.count(indices), copies, pairs, crossings)


def extents_of(decoder: Decoder, batches: Batches, mesh: Mesh) -> Extents:
    """The sizes of a model's batch on a mesh.

    Raises:
        CostError: an index does not come apart evenly along its axis.
    """
    tokens = parts_of(batches.seq_len, decoder.num_experts, what="tokens", by="--num-experts")
    size = {
        "B": batches.batch_size,
        "L": decoder.num_layers,
        "E": decoder.num_experts,
        "R": decoder.num_experts,
        "T": tokens,
        "S": tokens,
        "D": decoder.d_model,
        "F": decoder.d_ffn,
        "H": decoder.num_heads,
        "J": decoder.num_heads + decoder.d_ffn,
        "K": decoder.d_head,
    }
    local = dict(size)
    for index, axis in AXIS_OF.items():
        parts = mesh.degree(axis)
        part = parts_of(size[index], parts, what=_NAMES[index], by=axis.flag)
        local[index] = 1 if index in _ONE_AT_A_TIME else part
    return Extents(mesh, size, local)


def _axes(indices: str) -> frozenset[Axis]:
    return frozenset(AXIS_OF[index] for index in indices if index in AXIS_OF)
