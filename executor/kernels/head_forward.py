"""Final norm, LM head and cross entropy, a slice of rows at a time; alone, for an evaluation.

Legend: T tokens of the chunk, R rows of a slice, D d_model, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.embedding import embedding_layout_of, head_layout_of
from twinstream.executor.kernels.operand import DTYPES, KernelOperand, Operands
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import add_vector, weight_views
from twinstream.executor.kernels.vector.vector_ops import LogitRows, RmsNorm, VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import Attributes, typed_attribute
from twinstream.schedule.ops import Mode


def head_evaluate(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write or add the loss that `head_loss` has of the same operands, to the bit.

    Where they are asked for: the logits of all rows, [T, V] float32, or the log-probability of
    each row's label, [T] float32, times the loss's scale; 0 where a row has no label.
    """
    head = HeadForward.of(operands, attributes)
    logits = None
    if "logits" in operands:
        logits = operands["logits"].view(torch.float32, (len(head.labels), len(head.weight)))
    for _ in head.slices(vector, calls, logits):
        pass
    head.add_loss(operands["loss"], calls)
    if "log_probs" in operands:
        log_probs_T = operands["log_probs"].view(torch.float32, (len(head.labels),))
        calls.add(torch.neg, head.losses, out=log_probs_T)


@dataclass(frozen=True)
class HeadSlice:
    """Some rows of a chunk, worked on; the logits have become their gradients."""

    rows: slice
    norm: RmsNorm
    normed: torch.Tensor  # [R, D]
    d_logits: torch.Tensor  # [R, V]


@dataclass(frozen=True)
class HeadForward:
    """What a call reads, and its temporaries; `weight` is the embedding if the two are tied."""

    hidden: torch.Tensor  # [T, D]
    labels: torch.Tensor  # [T], int32
    norm: torch.Tensor  # [D]
    weight: torch.Tensor  # [V, D]
    loss_scale: torch.Tensor  # [1], or [T] of each row, float32, on the device
    eps: float
    workspace: Workspace
    normed: torch.Tensor  # [R, D]
    logits: torch.Tensor  # [R, V]
    rstd: torch.Tensor  # [R], float32
    losses: torch.Tensor  # [T], float32

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes) -> "HeadForward":
        dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
        num_tokens = typed_attribute(attributes, "num_tokens", int)
        weights = weight_views(operands["parameters"], head_layout_of(attributes), dtype)
        if typed_attribute(attributes, "tied", bool):
            tied = weight_views(operands["embedding"], embedding_layout_of(attributes), dtype)
            weights["head"] = tied["embedding"]
        vocab_size, d_model = weights["head"].shape
        row_slice = min(typed_attribute(attributes, "row_slice", int), num_tokens)
        workspace = Workspace(operands["scratch"].bytes)
        return cls(
            hidden=operands["hidden"].view(dtype, (num_tokens, d_model)),
            labels=operands["tokens"].view(torch.int32, (2, num_tokens))[1],
            norm=weights["final_norm"],
            weight=weights["head"],
            loss_scale=StepState(operands["step_state"].bytes).loss_scale,
            eps=typed_attribute(attributes, "norm_eps", float),
            workspace=workspace,
            normed=workspace.take((row_slice, d_model), dtype),
            logits=workspace.take((row_slice, vocab_size), dtype),
            rstd=workspace.take((row_slice,), torch.float32),
            losses=workspace.take((num_tokens,), torch.float32),
        )

    def slices(
        self, vector: VectorOps, calls: Calls, logits_TV: torch.Tensor | None = None
    ) -> Iterator[HeadSlice]:
        """Work on a slice of rows after the other, which are in the same temporaries.

        Args:
            logits_TV: [T, V], where the logits of all rows are kept.
        """
        row_slice = self.normed.shape[0]
        for start in range(0, self.hidden.shape[0], row_slice):
            rows = slice(start, start + row_slice)
            count = self.hidden[rows].shape[0]
            norm = RmsNorm(self.hidden[rows], self.rstd[:count], self.norm)
            normed, logits = self.normed[:count], self.logits[:count]
            scale = self.loss_scale if self.loss_scale.numel() == 1 else self.loss_scale[rows]
            labelled = LogitRows(logits, self.labels[rows], self.losses[rows], scale)
            calls.add(vector.write_normed, norm, normed, eps=self.eps)
            calls.add(torch.mm, normed, self.weight.t(), out=logits)
            if logits_TV is not None:
                calls.add(logits_TV[rows].copy_, logits)
            calls.add(vector.cross_entropy, labelled, self.workspace.remaining())
            yield HeadSlice(rows, norm, normed, logits)

    def add_loss(self, loss: KernelOperand, calls: Calls) -> None:
        """Write or add the sum of all rows' losses."""
        calls.add(_add_sum, loss.view(torch.float32, (1,)), self.losses, loss.mode)


def _add_sum(loss: torch.Tensor, losses_T: torch.Tensor, mode: Mode) -> None:
    add_vector(loss, losses_T.sum(0, keepdim=True), mode)
