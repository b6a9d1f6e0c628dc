"""Sums of the rows that belong to the same id, without atomics.

A segmented scan in float32 over tokens sorted by id, whose order of additions depends on the ids
alone. All tokens of an id then write the same row. Legend: T tokens, D d_model, V vocabulary.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.vector.vector_ops import SortedTokens
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.demand.workspace import embed_block_columns


def add_token_gradients(
    d_hidden_TD: torch.Tensor,
    tokens: SortedTokens,
    gradient_VD: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Add the rows of d_hidden to the rows of their ids, a block of columns at a time."""
    num_tokens, d_model = d_hidden_TD.shape
    width = embed_block_columns(num_tokens, d_model)
    buffers = _Buffers.take(num_tokens * width, d_hidden_TD.dtype, gradient_VD.dtype, workspace)
    for start in range(0, d_model, width):
        columns = slice(start, start + width)
        _add_columns(d_hidden_TD[:, columns], gradient_VD[:, columns], tokens, buffers)


@dataclass(frozen=True)
class _Buffers:
    """Of [T * columns] elements each; `rows` and `old` are one where dtypes are the same."""

    sums: torch.Tensor  # float32
    next_sums: torch.Tensor  # float32
    rows: torch.Tensor
    old: torch.Tensor

    @classmethod
    def take(
        cls, elements: int, dtype: torch.dtype, gradient_dtype: torch.dtype, workspace: Workspace
    ) -> "_Buffers":
        sums, next_sums = (workspace.take((elements,), torch.float32) for _ in range(2))
        rows = workspace.take((elements,), dtype)
        old = rows if gradient_dtype == dtype else workspace.take((elements,), gradient_dtype)
        return cls(sums, next_sums, rows, old)


def _add_columns(
    d_hidden: torch.Tensor, gradient: torch.Tensor, tokens: SortedTokens, buffers: _Buffers
) -> None:
    """Some columns of both, [T, columns] and [V, columns]."""
    shape, elements = d_hidden.shape, d_hidden.numel()
    rows, old = buffers.rows[:elements].view(shape), buffers.old[:elements].view(shape)
    sums = buffers.sums[:elements].view(shape)
    spare = buffers.next_sums[:elements].view(shape)
    sums.copy_(torch.index_select(d_hidden, 0, tokens.order, out=rows))
    sums, spare = _sum_runs(tokens.ids, sums, spare)
    totals = torch.index_select(sums, 0, tokens.last, out=spare)
    totals.add_(torch.index_select(gradient, 0, tokens.ids, out=old))
    gradient.index_copy_(0, tokens.ids, old.copy_(totals))


def _sum_runs(
    ids_T: torch.Tensor, sums: torch.Tensor, spare: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sums within each run of equal ids; returns them and the other buffer."""
    zero = torch.zeros((), device=sums.device)
    shift = 1
    while shift < ids_T.shape[0]:
        same_run = (ids_T[shift:] == ids_T[:-shift])[:, None]
        spare[:shift].copy_(sums[:shift])
        torch.where(same_run, sums[:-shift], zero, out=spare[shift:])
        spare[shift:].add_(sums[shift:])
        sums, spare = spare, sums
        shift *= 2
    return sums, spare
