"""Final norm, LM head and cross entropy, forward and backward in one go.

Rows are taken in slices, so that no tensor of tokens times vocabulary exists. Legend: T tokens of
the chunk, R rows of a slice, D d_model, V vocabulary.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.embedding import embedding_layout_of, head_layout_of
from twinstream.executor.kernels.operand import DTYPES, Operands
from twinstream.executor.kernels.step_state import StepState
from twinstream.executor.kernels.vector.gradients import (
    add_matmul,
    add_vector,
    gradient_views,
    weight_views,
)
from twinstream.executor.kernels.vector.vector_ops import (
    LogitRows,
    NormGradients,
    RmsNorm,
    VectorGradient,
    VectorOps,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.demand.workspace import Attributes, is_frozen, typed_attribute
from twinstream.schedule.ops import Mode


def head_loss(operands: Operands, attributes: Attributes, vector: VectorOps) -> None:
    """Write d_hidden; write or add the loss and the gradients of the norm and of the head.

    What is frozen has no gradient.

    The loss is the sum over tokens with a label >= 0 of cross entropy, times what `step_state`
    says: one over the number of such tokens in the step.
    """
    dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
    num_tokens = typed_attribute(attributes, "num_tokens", int)
    head = _Head.of(operands, attributes)
    vocab_size, d_model = head.weight.shape
    hidden_TD = operands["hidden"].view(dtype, (num_tokens, d_model))
    d_hidden_TD = operands["d_hidden"].view(dtype, (num_tokens, d_model))
    labels_T = operands["tokens"].view(torch.int32, (2, num_tokens))[1]
    row_slice = min(typed_attribute(attributes, "row_slice", int), num_tokens)
    workspace = Workspace(operands["scratch"].bytes)
    normed = workspace.take((row_slice, d_model), dtype)
    logits = workspace.take((row_slice, vocab_size), dtype)
    rstd = workspace.take((row_slice,), torch.float32)
    losses_T = workspace.take((num_tokens,), torch.float32)
    d_weight = None  # of the norm, summed over slices
    if head.d_norm is not None:
        d_norm_D = workspace.take((d_model,), torch.float32).zero_()
        d_weight = VectorGradient(d_norm_D, "update")
    mode = head.weight_mode
    for start in range(0, num_tokens, row_slice):
        rows = slice(start, start + row_slice)
        count = hidden_TD[rows].shape[0]
        norm = RmsNorm(hidden_TD[rows], rstd[:count], head.norm)
        labelled = LogitRows(logits[:count], labels_T[rows], losses_T[rows], head.loss_scale)
        vector.write_normed(norm, normed[:count], eps=head.eps)
        torch.mm(normed[:count], head.weight.t(), out=labelled.logits)
        vector.cross_entropy(labelled, workspace)
        d_logits_RV, d_hidden_RD = labelled.logits, d_hidden_TD[rows]
        torch.mm(d_logits_RV, head.weight, out=d_hidden_RD)
        if head.d_weight is not None:
            add_matmul(head.d_weight, d_logits_RV.t(), normed[:count], mode)
        gradients = NormGradients(d_hidden_RD, d_hidden_RD, d_weight, accumulate=False)
        vector.rms_norm_backward(norm, gradients, workspace)
        mode = "update"
    if head.d_norm is not None:
        add_vector(head.d_norm, d_norm_D, head.norm_mode)
    loss = operands["loss"]
    add_vector(loss.view(torch.float32, (1,)), losses_T.sum(0, keepdim=True), loss.mode)


@dataclass(frozen=True)
class _Head:
    """Weights and their gradients; `weight` is the embedding if the two are tied.

    Norm and head are one group of parameters: frozen, neither has a gradient. A tied embedding is
    frozen or not by itself.
    """

    norm: torch.Tensor  # [D]
    d_norm: torch.Tensor | None  # [D]
    norm_mode: Mode
    weight: torch.Tensor  # [V, D]
    d_weight: torch.Tensor | None  # [V, D]
    weight_mode: Mode
    eps: float
    loss_scale: torch.Tensor  # [1], float32, on the device

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes) -> "_Head":
        dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
        layout = head_layout_of(attributes)
        weights = weight_views(operands["parameters"], layout, dtype)
        gradients: dict[str, torch.Tensor] = {}
        norm_mode = weight_mode = cls._mode(operands, "gradients")
        if not is_frozen(attributes):
            gradients = gradient_views(operands["gradients"], layout, attributes)
        if typed_attribute(attributes, "tied", bool):
            tied = embedding_layout_of(attributes)
            weights["head"] = weight_views(operands["embedding"], tied, dtype)["embedding"]
            weight_mode = cls._mode(operands, "embedding_gradients")
            if (flat := operands.get("embedding_gradients")) is not None:
                gradients["head"] = gradient_views(flat, tied, attributes)["embedding"]
        return cls(
            norm=weights["final_norm"],
            d_norm=gradients.get("final_norm"),
            norm_mode=norm_mode,
            weight=weights["head"],
            d_weight=gradients.get("head"),
            weight_mode=weight_mode,
            eps=typed_attribute(attributes, "norm_eps", float),
            loss_scale=StepState(operands["step_state"].bytes).loss_scale,
        )

    @staticmethod
    def _mode(operands: Operands, name: str) -> Mode:
        """Of an operand; `update` where there is none."""
        return operands[name].mode if name in operands else "update"
