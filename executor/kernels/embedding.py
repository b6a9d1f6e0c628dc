"""Embedding lookup and its backward. Legend: T tokens of the chunk, D d_model, V vocabulary."""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.gradients import gradient_views, weight_views
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.vocabulary import embedding_layout_of
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.workspace import Attributes, embed_block_columns, typed_attribute


def embed_forward(operands: Operands, attributes: Attributes) -> None:
    """Write the rows of the tokens' ids."""
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    layout, num_tokens = (
        embedding_layout_of(attributes),
        typed_attribute(attributes, "num_tokens", int),
    )
    weight_VD = weight_views(operands["parameters"], layout, dtype)["embedding"]
    ids_T = operands["tokens"].view(torch.int32, (2, num_tokens))[0]
    output_TD = operands["output"].view(dtype, (num_tokens, weight_VD.shape[1]))
    torch.index_select(weight_VD, 0, ids_T, out=output_TD)


def embed_backward(operands: Operands, attributes: Attributes) -> None:
    """Add the gradients of a chunk to the rows of its ids, each row's sum rounded once.

    No atomics: tokens are sorted by id and summed by a segmented scan in float32, whose order
    depends on the ids alone. All tokens of an id then write the same row.
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_tokens = typed_attribute(attributes, "num_tokens", int)
    gradients = operands["gradients"]
    gradient_VD = gradient_views(gradients, embedding_layout_of(attributes), dtype)["embedding"]
    if gradients.mode == "write":
        gradient_VD.zero_()
    d_model = gradient_VD.shape[1]
    d_hidden_TD = operands["d_hidden"].view(dtype, (num_tokens, d_model))
    ids_T = operands["tokens"].view(torch.int32, (2, num_tokens))[0]
    width = embed_block_columns(num_tokens, d_model)
    buffers = _Buffers.take(ids_T, width, dtype, Workspace(operands["scratch"].bytes))
    for start in range(0, d_model, width):
        columns = slice(start, start + width)
        _add_columns(d_hidden_TD[:, columns], gradient_VD[:, columns], buffers)


@dataclass(frozen=True)
class _Buffers:
    """`order` sorts tokens by id, `last` is where the run of a sorted token's id ends."""

    ids: torch.Tensor  # [T], sorted
    order: torch.Tensor  # [T]
    last: torch.Tensor  # [T]
    sums: torch.Tensor  # [T * columns], float32
    next_sums: torch.Tensor  # [T * columns], float32
    rows: torch.Tensor  # [T * columns]

    @classmethod
    def take(
        cls, ids_T: torch.Tensor, width: int, dtype: torch.dtype, workspace: Workspace
    ) -> "_Buffers":
        num_tokens = ids_T.shape[0]
        ids, order, last = (workspace.take((num_tokens,), torch.int64) for _ in range(3))
        torch.sort(last.copy_(ids_T), stable=True, out=(ids, order))
        torch.searchsorted(ids, ids, right=True, out=last).sub_(1)
        sums, next_sums = (workspace.take((num_tokens * width,), torch.float32) for _ in range(2))
        return cls(ids, order, last, sums, next_sums, workspace.take((num_tokens * width,), dtype))


def _add_columns(d_hidden: torch.Tensor, gradient: torch.Tensor, buffers: _Buffers) -> None:
    """Some columns of both, [T, columns] and [V, columns]."""
    shape, elements = d_hidden.shape, d_hidden.numel()
    rows = buffers.rows[:elements].view(shape)
    sums = buffers.sums[:elements].view(shape)
    spare = buffers.next_sums[:elements].view(shape)
    sums.copy_(torch.index_select(d_hidden, 0, buffers.order, out=rows))
    sums, spare = _sum_runs(buffers.ids, sums, spare)
    totals = torch.index_select(sums, 0, buffers.last, out=spare)
    totals.add_(torch.index_select(gradient, 0, buffers.ids, out=rows))
    gradient.index_copy_(0, buffers.ids, rows.copy_(totals))


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
