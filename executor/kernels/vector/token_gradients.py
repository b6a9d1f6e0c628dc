"""Sums of the rows that belong to the same id, without atomics.

A segmented scan in float32 over tokens sorted by id, whose order of additions depends on the ids
alone. All tokens of an id then write the same row. Legend: T tokens, D d_model, V vocabulary.
"""

import torch

from twinstream.executor.kernels.vector.vector_ops import SortedTokens
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import embed_block_columns


def add_token_gradients(
    d_hidden_TD: torch.Tensor,
    tokens: SortedTokens,
    gradient_VD: torch.Tensor,
    workspace: Workspace,
) -> None:
    """A block of columns at a time."""
    num_tokens, d_model = d_hidden_TD.shape
    dtype, gradient_dtype = d_hidden_TD.dtype, gradient_VD.dtype
    width = embed_block_columns(num_tokens, d_model)
    size = (num_tokens * width,)
    with workspace.frame():
        sums_flat, spare_flat = (workspace.take(size, torch.float32) for _ in range(2))
        rows_flat = workspace.take(size, dtype)
        old_flat = rows_flat if gradient_dtype == dtype else workspace.take(size, gradient_dtype)
    for start in range(0, d_model, width):
        columns = slice(start, start + width)
        d_hidden, gradient = d_hidden_TD[:, columns], gradient_VD[:, columns]
        sums, spare, rows, old = (
            flat[: d_hidden.numel()].view(d_hidden.shape)
            for flat in (sums_flat, spare_flat, rows_flat, old_flat)
        )
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
