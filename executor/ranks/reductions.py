"""What a reduction adds up, in which type and how, and the scratch memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.ranks.rank_order import Sum, summed_dtype
from twinstream.schedule.ops import Communicate

_LEAST_SHARD = 256  # elements; of fewer every rank adds up all itself, in one exchange and not two


@dataclass(frozen=True)
class Reduction:
    """Of one operand of so many elements, over all ranks.

    In rank order each rank adds up its shard for all, and of an all_reduce that cannot be cut into
    equal shards all ranks add up the rest themselves.
    """

    dtype: torch.dtype
    in_rank_order: bool
    shard: Sum
    rest: Sum

    @property
    def scratch_bytes(self) -> int:
        """Beside the operand."""
        most = max(self.shard.scratch_bytes, self.rest.scratch_bytes)
        return most if self.in_rank_order else 0

    @property
    def sharded_bytes(self) -> int:
        """What is added up in shards; the rest follows it."""
        return self.shard.num_ranks * self.shard.num_elements * self.dtype.itemsize


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
    found = []
    for operand, size, told in zip(op.operands, sizes, dtypes, strict=True):
        if operand.mode == "write":
            continue
        dtype = summed_dtype(op.op_id, operand.tensor, told)
        count = size // dtype.itemsize
        each = count // num_ranks
        if op.collective == "all_reduce" and each < _LEAST_SHARD:
            each = 0
        found.append(
            Reduction(
                dtype=dtype,
                in_rank_order=op.reduction == "rank_order",
                shard=Sum(each, num_ranks, dtype),
                rest=Sum(count - each * num_ranks, num_ranks, dtype),
            )
        )
    return found
