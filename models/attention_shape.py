"""The sizes of one attention call."""

from dataclasses import dataclass
from typing import Literal

from twinstream.models.spec import ITEMSIZE_BYTES

AttentionPass = Literal["forward", "backward"]


@dataclass(frozen=True)
class AttentionShape:
    """Equally long sequences; the queries are the last positions of `num_keys`.

    `sliced`: the call is of a slice of one sequence, whose gradients of K and V are added, in
    float32, to those of its context.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    sliced: bool

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

    def __str__(self) -> str:
        return (
            f"{self.num_sequences} x {self.num_queries} queries of {self.num_keys} keys, "
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {self.dtype}"
        )
