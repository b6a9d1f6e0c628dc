"""The sizes of one attention call."""

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from twinstream.models.decoders.sizes import ITEMSIZE_BYTES

AttentionPass = Literal["forward", "backward"]

# No formula is for a device with more multiprocessors: FlashAttention-2's deterministic backward
# keeps a sum of dQ for as many blocks of keys as it takes to occupy all of them.
MOST_MULTIPROCESSORS = 192
ROW_BLOCK = 128
"""The largest block of queries, and of keys, of all attention kernels."""

_MOST_PROBABILITIES_BYTES = 512 * 2**20
_MOST_SLICES, _SLICE_QUERIES, _MOST_SLICED_KEYS = 8, 1024, 4
_MOST_RUNS_TOLD = 8
_LEAST_ROOM = 256


@dataclass(frozen=True)
class AttentionShape:
    """Equally long sequences; the queries are the last positions of `num_keys`.

    `sliced`: the call is of a slice of one sequence, whose gradients of K and V are added, in
    float32, to those of its context. `most_packed`: so many sequences at most, of any lengths up
    to `longest_tokens`, lie one behind the other in what is otherwise one, and see only themselves.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    sliced: bool
    most_packed: int = 0
    longest_tokens: int = 0

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

    def slices(self) -> "list[AttentionShape]":
        """Calls for slices of the queries (`query_slices`), which add to gradients of K and V."""
        found = query_slices(self.num_queries, self.num_keys)
        return [
            replace(
                self, num_queries=one.stop - one.start, num_keys=self.num_past + one.stop,
                sliced=True,
            )
            for one in found
        ]  # fmt: skip

    @property
    def longest(self) -> "AttentionShape":
        """The shape of the longest sequence alone, where lengths may be any; else this shape."""
        return self._alone(self.longest_tokens) if self.most_packed else self

    @property
    def of_one_token(self) -> "AttentionShape":
        """A sequence of a single token by itself."""
        return self._alone(1)

    def _alone(self, tokens: int) -> "AttentionShape":
        return replace(self, num_queries=tokens, num_keys=tokens, most_packed=0, longest_tokens=0)

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {self.dtype}"
        if self.most_packed:
            return (
                f"{self.num_queries} tokens of at most {self.most_packed} sequences, the longest "
                f"of {self.longest_tokens}, {heads}"
            )
        return f"{self.num_sequences} x {self.num_queries} queries of {self.num_keys} keys, {heads}"


def cudnn_key_heads(
    num_sequences: int, num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int
) -> int:
    """Key heads of one call of cuDNN's deterministic backward, which may keep all probabilities.

    As many, and a divisor of all, as have at most 512 MiB of them; at least one.

    >>> cudnn_key_heads(1, 8192, 8192, 32, 8), cudnn_key_heads(16, 1024, 1024, 32, 8)
    (1, 4)
    """
    of_one = 2 * num_sequences * num_heads // num_kv_heads * num_queries * num_keys
    divisors = (n for n in range(num_kv_heads, 0, -1) if num_kv_heads % n == 0)
    return next((n for n in divisors if n * of_one <= _MOST_PROBABILITIES_BYTES), 1)


def query_slices(num_queries: int, num_keys: int) -> tuple[slice, ...]:
    """The slices of queries of `cudnn_sliced`: its bits are those of this rule.

    n slices leave (n + 1) / 2n of the square of the queries to be computed. Eight at most, of 1,024
    queries at least where there are so many, two of shorter sequences from 1,024 on. With more than
    four times as many keys as queries nearly all that is computed is seen, and each slice would add
    to nearly all of dK and dV, so there is one.

    Source: an H200's samples of cuDNN 9.18 (docs/benchmarks/nvidia-h200.json): by the rectangle its
    rate is 458 to 468 TFLOP/s for 16 thousand queries and 1 to 4 times as many keys.

    >>> [len(query_slices(n, n)) for n in (512, 1024, 4096, 8192, 16384)]
    [1, 2, 4, 8, 8]
    >>> len(query_slices(4096, 8192)), len(query_slices(4096, 32768))
    (4, 1)
    """
    count = min(_MOST_SLICES, max(num_queries // _SLICE_QUERIES, 2))
    if num_queries < _SLICE_QUERIES or num_keys > _MOST_SLICED_KEYS * num_queries:
        count = 1
    ends = [num_queries * i // count for i in range(count + 1)]
    return tuple(slice(start, end) for start, end in pairwise(ends))


def room_for_longest(longest: int, limit: int) -> int:
    """Tokens of the longest sequence that a library is told: a power of two, 256 at least.

    >>> room_for_longest(300, 8192), room_for_longest(7, 8192), room_for_longest(300, 500)
    (512, 256, 500)
    """
    return min(limit, max(_LEAST_ROOM, _power_of_two(longest)))


def room_for_sequences(count: int, most: int, num_heads: int) -> int:
    """Packed sequences that FlashAttention-2 is told: a power of two that fills the device.

    Of fewer its deterministic backward would split each sum of dQ over more blocks: other bits.

    >>> room_for_sequences(28, 144, 32), room_for_sequences(3, 144, 32), room_for_sequences(9, 9, 4)
    (32, 8, 9)
    """
    least = -(-MOST_MULTIPROCESSORS // num_heads)
    return min(most, _power_of_two(max(count, least)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


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
