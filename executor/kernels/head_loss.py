"""Final norm, LM head and cross entropy, forward and backward in one go.

Rows are taken in slices, so that no tensor of tokens times vocabulary exists. Legend: T tokens of
the chunk, R rows of a slice, D d_model, V vocabulary.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.gradients import (
    add_matmul,
    add_vector,
    gradient_views,
    weight_views,
)
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.rms_norm import (
    RmsNorm,
    rms_norm_backward,
    write_normed,
    write_rstd,
)
from twinstream.executor.kernels.vocabulary import embedding_layout_of, head_layout_of
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.workspace import Attributes, head_block_rows, typed_attribute
from twinstream.schedule.ops import Mode


def head_loss(operands: Operands, attributes: Attributes) -> None:
    """Write d_hidden; write or add the loss and the gradients of the norm and of the head.

    The loss is the sum over tokens with a label >= 0 of cross entropy times loss_scale.
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_tokens = typed_attribute(attributes, "num_tokens", int)
    by_width = (num_tokens, typed_attribute(attributes, "d_model", int))
    head = _Head.of(operands, attributes)
    rows = _Rows(
        hidden=operands["hidden"].view(dtype, by_width),
        d_hidden=operands["d_hidden"].view(dtype, by_width),
        labels=operands["tokens"].view(torch.int32, (2, num_tokens))[1],
    )
    row_slice = min(typed_attribute(attributes, "row_slice", int), num_tokens)
    buffers = _Buffers.take(head, rows, row_slice, Workspace(operands["scratch"].bytes))
    d_norm = torch.zeros_like(head.norm, dtype=torch.float32)
    mode = head.weight_mode
    for start in range(0, num_tokens, row_slice):
        d_norm += _slice(head, rows, slice(start, start + row_slice), buffers, mode)
        mode = "update"
    add_vector(head.d_norm, d_norm, head.norm_mode)
    loss = operands["loss"]
    add_vector(loss.view(torch.float32, (1,)), buffers.losses.sum(0, keepdim=True), loss.mode)


@dataclass(frozen=True)
class _Head:
    """Weights and their gradients; `weight` is the embedding if the two are tied."""

    norm: torch.Tensor  # [D]
    d_norm: torch.Tensor  # [D]
    norm_mode: Mode
    weight: torch.Tensor  # [V, D]
    d_weight: torch.Tensor  # [V, D]
    weight_mode: Mode
    eps: float
    loss_scale: float

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes) -> "_Head":
        dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
        layout = head_layout_of(attributes)
        weights = weight_views(operands["parameters"], layout, dtype)
        gradients = gradient_views(operands["gradients"], layout, dtype)
        weight_mode = operands["gradients"].mode
        if typed_attribute(attributes, "tied", bool):
            tied, tied_gradients = embedding_layout_of(attributes), operands["embedding_gradients"]
            weights["head"] = weight_views(operands["embedding"], tied, dtype)["embedding"]
            gradients["head"] = gradient_views(tied_gradients, tied, dtype)["embedding"]
            weight_mode = tied_gradients.mode
        return cls(
            norm=weights["final_norm"],
            d_norm=gradients["final_norm"],
            norm_mode=operands["gradients"].mode,
            weight=weights["head"],
            d_weight=gradients["head"],
            weight_mode=weight_mode,
            eps=typed_attribute(attributes, "norm_eps", float),
            loss_scale=typed_attribute(attributes, "loss_scale", float),
        )


@dataclass(frozen=True)
class _Rows:
    hidden: torch.Tensor  # [T, D]
    d_hidden: torch.Tensor  # [T, D]
    labels: torch.Tensor  # [T]


@dataclass(frozen=True)
class _Buffers:
    normed: torch.Tensor  # [R, D]
    logits: torch.Tensor  # [R, V]
    block: torch.Tensor  # [rows of a block, V], float32
    losses: torch.Tensor  # [T], float32

    @classmethod
    def take(cls, head: _Head, rows: _Rows, row_slice: int, workspace: Workspace) -> "_Buffers":
        (vocab_size, d_model), dtype = head.weight.shape, head.weight.dtype
        block_rows = head_block_rows(vocab_size, row_slice)
        return cls(
            normed=workspace.take((row_slice, d_model), dtype),
            logits=workspace.take((row_slice, vocab_size), dtype),
            block=workspace.take((block_rows, vocab_size), torch.float32),
            losses=workspace.take(tuple(rows.labels.shape), torch.float32),
        )


def _slice(
    head: _Head, all_rows: _Rows, rows: slice, buffers: _Buffers, mode: Mode
) -> torch.Tensor:
    """Loss and gradients of some rows; returns the float32 gradient of the norm's weight."""
    hidden_RD, d_hidden_RD = all_rows.hidden[rows], all_rows.d_hidden[rows]
    num_rows = hidden_RD.shape[0]
    rstd_R = torch.empty(num_rows, dtype=torch.float32, device=hidden_RD.device)
    write_rstd(hidden_RD, head.eps, rstd_R)
    norm = RmsNorm(hidden_RD, rstd_R, head.norm)
    normed_RD, logits_RV = buffers.normed[:num_rows], buffers.logits[:num_rows]
    write_normed(norm, normed_RD)
    torch.mm(normed_RD, head.weight.t(), out=logits_RV)
    block_rows = buffers.block.shape[0]
    for start in range(0, num_rows, block_rows):
        block = slice(start, start + block_rows)
        logits, labels = logits_RV[block], all_rows.labels[rows][block]
        losses = buffers.losses[rows][block]
        _cross_entropy(logits, labels, losses, head.loss_scale, buffers.block)
    d_logits_RV = logits_RV
    torch.mm(d_logits_RV, head.weight, out=d_hidden_RD)
    add_matmul(head.d_weight, d_logits_RV.t(), normed_RD, mode)
    return rms_norm_backward(norm, d_hidden_RD, d_hidden_RD, accumulate=False)


def _cross_entropy(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    losses_R: torch.Tensor,
    loss_scale: float,
    buffer: torch.Tensor,
) -> None:
    """Turn logits into their gradients, in place, and write the scaled loss of each row."""
    x_RV = buffer[: logits_RV.shape[0]].copy_(logits_RV)
    scale_R1 = (labels_R[:, None] >= 0).float().mul_(loss_scale)
    labels_R1 = labels_R[:, None].long().clamp_(min=0)
    x_RV.sub_(x_RV.amax(1, keepdim=True))
    at_label_R1 = x_RV.gather(1, labels_R1)
    total_R1 = x_RV.exp_().sum(1, keepdim=True)
    torch.mul(total_R1.log().sub_(at_label_R1), scale_R1, out=losses_R[:, None])
    x_RV.mul_(scale_R1 / total_R1)
    x_RV.scatter_(1, labels_R1, x_RV.gather(1, labels_R1) - scale_R1)
    logits_RV.copy_(x_RV)
