"""Cross entropy and its gradient, in float32. Legend: R rows of a slice, V vocabulary."""

import torch

from twinstream.executor.kernels.vector.vector_ops import LogitRows
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.scratch_sizes import head_block_rows


def cross_entropy(rows: LogitRows, workspace: Workspace) -> None:
    """Turn logits into their gradients, in place, and write the scaled loss of each row."""
    num_rows, vocab_size = rows.logits.shape
    block_rows = head_block_rows(vocab_size, num_rows)
    with workspace.frame():
        buffer = workspace.take((block_rows, vocab_size), torch.float32)
        for start in range(0, num_rows, block_rows):
            block = slice(start, min(start + block_rows, num_rows))
            logits, labels, losses = rows.logits[block], rows.labels[block], rows.losses[block]
            is_one = rows.loss_scale.numel() == 1
            scale = rows.loss_scale if is_one else rows.loss_scale[block]
            _block(logits, labels, losses, scale, buffer)


def _block(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    losses_R: torch.Tensor,
    loss_scale: torch.Tensor,
    buffer: torch.Tensor,
) -> None:
    x_RV = buffer[: logits_RV.shape[0]].copy_(logits_RV)
    scale_R1 = (labels_R[:, None] >= 0).float().mul_(loss_scale[:, None])
    labels_R1 = labels_R[:, None].long().clamp_(min=0)
    x_RV.sub_(x_RV.amax(1, keepdim=True))
    at_label_R1 = x_RV.gather(1, labels_R1)
    total_R1 = x_RV.exp_().sum(1, keepdim=True)
    torch.mul(total_R1.log().sub_(at_label_R1), scale_R1, out=losses_R[:, None])
    x_RV.mul_(scale_R1 / total_R1)
    x_RV.scatter_(1, labels_R1, x_RV.gather(1, labels_R1) - scale_R1)
    logits_RV.copy_(x_RV)
