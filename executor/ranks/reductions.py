"""Reductions: what is added up, in which type and order, and the scratch memory that takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.ranks.rank_order import Sum, summed_dtype
from twinstream.schedule.ops import Communicate

_STRETCH_BYTES = 32 * 2**20  # exchanged at a time, so that scratch memory stays small
_LEAST_SHARD = 256  # elements; of fewer every rank adds up all itself, in one exchange and not two


@dataclass(frozen=True)
class Reduction:
    """The reduction of one operand over all ranks.

    In rank order each rank adds up its shard for all, a stretch after the other, and of an
    all_reduce that cannot be cut into equal shards all ranks add up the rest themselves. Of a
    reduce_scatter each rank may have several `pieces`, which are added one after the other.
    """

    dtype: torch.dtype
    in_rank_order: bool
    num_ranks: int
    shard_elements: int
    rest: Sum
    pieces: int = 1
    last_first: bool = False

    @property
    def scratch_bytes(self) -> int:
        """The scratch memory that is needed beside the operand."""
        if not self.in_rank_order:
            return 0
        stretches = list(self.stretches())
        most = max((part.scratch_bytes for _, part in stretches), default=0)
        moves = len(stretches) > 1 or self.is_sorted_first
        sent = stretches[0][1].pieces_bytes if stretches and moves else 0
        return max(most + sent, self.rest.scratch_bytes)

    @property
    def is_sorted_first(self) -> bool:
        """Whether what goes to a rank does not lie together, in rank order, in what is given."""
        return self.pieces > 1 or self.last_first

    @property
    def sharded_bytes(self) -> int:
        """The bytes that are added up in shards; the rest follows them."""
        return self.num_ranks * self.shard_elements * self.dtype.itemsize

    def stretches(self) -> Iterator[tuple[int, Sum]]:
        """Cut a shard into stretches: where each begins, in elements, and the sum that it takes."""
        count = self.num_ranks * self.pieces
        most = max(1, _STRETCH_BYTES // (count * self.dtype.itemsize))
        for begin in range(0, self.shard_elements, most):
            size = min(most, self.shard_elements - begin)
            yield begin, Sum(size, count, self.dtype, self.rest.pairwise)


def reductions_of(
    op: Communicate, sizes: Sequence[int], dtypes: Sequence[str], num_ranks: int
) -> list[Reduction]:
    """One for each operand of an all_reduce, one of a reduce_scatter, none of other collectives.

    Args:
        sizes: of the operands, in bytes.

    Raises:
        ReductionError: an operand is of a type that is not added up.
    """
    if op.collective not in ("all_reduce", "reduce_scatter"):
        return []
    pieces = 1
    if op.collective == "reduce_scatter" and len(sizes) == 2:
        pieces = max(sizes) // (num_ranks * min(sizes))
    found = []
    for operand, size, dtype_name in zip(op.operands, sizes, dtypes, strict=True):
        if operand.mode == "write":
            continue
        dtype = summed_dtype(op.op_id, operand.tensor, dtype_name)
        count = size // dtype.itemsize // pieces
        each = count // num_ranks
        if op.collective == "all_reduce" and each < _LEAST_SHARD:
            each = 0
        found.append(
            Reduction(
                dtype=dtype,
                in_rank_order=op.reduction != "library",
                num_ranks=num_ranks,
                shard_elements=each,
                rest=Sum(count - each * num_ranks, num_ranks, dtype, op.reduction == "pairwise"),
                pieces=pieces,
                last_first=op.last_first is True,
            )
        )
    return found
