"""The sizes of one attention call."""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from twinstream.models.spec import ITEMSIZE_BYTES

AttentionPass = Literal["forward", "backward"]

_MOST_RUNS_TOLD = 8


@dataclass(frozen=True)
class AttentionShape:
    """Equally long sequences; the queries are the last positions of `num_keys`.

    `sliced`: the call is of a slice of one sequence, whose gradients of K and V are added, in
    float32, to those of its context. `lengths`: packed sequences of unequal lengths lie one
    behind the other in what is otherwise one sequence, and see only themselves.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    sliced: bool
    lengths: tuple[int, ...] = ()

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Queries times heads, of all sequences: so many log-sum-exps."""
        return self.num_sequences * self.num_queries * self.num_heads

    @property
    def num_past(self) -> int:
        """Keys before the first query."""
        return self.num_keys - self.num_queries

    @property
    def num_kv_elements(self) -> int:
        """Elements of K and V together."""
        return self.num_sequences * self.num_keys * 2 * self.num_kv_heads * self.head_dim

    @property
    def longest(self) -> "AttentionShape":
        """Of sequences of unequal lengths the longest by itself; otherwise the shape as it is."""
        return self._alone(max(self.lengths)) if self.lengths else self

    @property
    def of_one_token(self) -> "AttentionShape":
        """A sequence of a single token by itself."""
        return self._alone(1)

    def _alone(self, tokens: int) -> "AttentionShape":
        return replace(self, num_queries=tokens, num_keys=tokens, lengths=())

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {self.dtype}"
        if self.lengths:
            return f"sequences of {lengths_text(self.lengths)}, {heads}"
        return f"{self.num_sequences} x {self.num_queries} queries of {self.num_keys} keys, {heads}"


def equal_runs(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(length, how many) of each run of equal lengths.

    >>> equal_runs((5, 5, 1, 5))
    ((5, 2), (1, 1), (5, 1))
    """
    return tuple((length, len(tuple(run))) for length, run in groupby(lengths))


def lengths_text(lengths: tuple[int, ...]) -> str:
    """
    >>> lengths_text((5, 5, 1, 5))
    '2 x 5, 1, 5'
    >>> lengths_text(100 * (5, 1))
    '1 to 5, 200 of them'
    """
    runs = equal_runs(lengths)
    if len(runs) > _MOST_RUNS_TOLD:
        return f"{min(lengths)} to {max(lengths)}, {len(lengths)} of them"
    return ", ".join(f"{count} x {n}" if count > 1 else f"{n}" for n, count in runs)
