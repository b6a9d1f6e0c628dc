"""The tiles that eager attention works on: some queries times some keys, all heads at once.

A tile of queries is [K, S * G, D]: rows of one key head, token by token, G = H / K query heads a
token, so that K and V are never repeated. Legend: S queries, C keys, H query heads, K key heads,
D head_dim, R = S * G rows of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from twinstream.executor.kernels.attention.implementation import AttentionInputs
from twinstream.models.kernel_costs.attention_libraries import KEY_TILE, QUERY_TILE


@dataclass(frozen=True)
class Sequence:
    """One sequence of the batch."""

    q: torch.Tensor  # [S, H, D]
    k: torch.Tensor  # [C, K, D]
    v: torch.Tensor  # [C, K, D]
    scale: float
    causal: bool

    @classmethod
    def of(cls, inputs: AttentionInputs, index: int) -> "Sequence":
        q, k, v = (x[index] for x in (inputs.q, inputs.k, inputs.v))
        return cls(q, k, v, inputs.scale, inputs.causal)

    @property
    def offset(self) -> int:
        """Position of the first query, behind all keys where it sees them."""
        return self.k.shape[0] - (self.q.shape[0] if self.causal else 0)

    def query_tiles(self) -> Iterator[slice]:
        num_queries = self.q.shape[0]
        for start in range(0, num_queries, QUERY_TILE):
            yield slice(start, min(start + QUERY_TILE, num_queries))

    def key_tiles(self, queries: slice) -> Iterator[slice]:
        """The keys that at least one of the queries sees."""
        num_visible = min(self.offset + queries.stop, self.k.shape[0])
        for start in range(0, num_visible, KEY_TILE):
            yield slice(start, min(start + KEY_TILE, num_visible))

    def scaled_queries(self, queries: slice, buffer: torch.Tensor) -> torch.Tensor:
        return self.grouped(self.q[queries], buffer).mul_(self.scale)

    def grouped(self, x_SHD: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Rows of queries (or their outputs or gradients) as a float32 tile [K, R, D]."""
        by_group = self.by_group(x_SHD)
        tile = shaped(buffer, *by_group.shape).copy_(by_group)
        return tile.flatten(1, 2)

    def by_group(self, x_SHD: torch.Tensor) -> torch.Tensor:
        """A view [K, S, G, D] of [S, H, D]."""
        return torch.unflatten(x_SHD, 1, (self.k.shape[1], -1)).transpose(0, 1)

    def rows_by_group(self, x_HS: torch.Tensor) -> torch.Tensor:
        """A view [K, S, G] of [H, S]."""
        return torch.unflatten(x_HS, 0, (self.k.shape[1], -1)).transpose(1, 2)

    def scores(
        self, q_KRD: torch.Tensor, k_KCD: torch.Tensor, queries: slice, keys: slice,
        buffer: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Scaled scores [K, R, C], minus infinity where a query must not look."""
        scores = shaped(buffer, *q_KRD.shape[:2], keys.stop - keys.start)
        torch.bmm(q_KRD, k_KCD.transpose(1, 2), out=scores)
        first_position = self.offset + queries.start
        if keys.stop - 1 > first_position:
            key = torch.arange(keys.start, keys.stop, device=scores.device)
            query = torch.arange(first_position, self.offset + queries.stop, device=scores.device)
            hidden_SC = key > query[:, None]
            by_query = torch.unflatten(scores, 1, (hidden_SC.shape[0], -1))
            by_query.masked_fill_(hidden_SC[:, None], float("-inf"))
        return scores


def key_tile(x_CKD: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Keys or values of a tile in float32, [K, C, D]."""
    by_head = x_CKD.transpose(0, 1)
    return shaped(buffer, *by_head.shape).copy_(by_head)


def rounded(x: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """Round to the dtype of the buffer `low`, in place: what the second matmul is to see."""
    return x if low is None else x.copy_(shaped(low, *x.shape).copy_(x))


def shaped(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """The start of a flat buffer as a dense tensor."""
    return buffer[: prod(shape)].view(shape)
