"""Final norm, LM head and cross entropy, forward and backward in one go.

Rows are taken in slices, so that no tensor of tokens times vocabulary exists. Legend: T tokens of
the chunk, R rows of a slice, D d_model, V vocabulary.
"""

from dataclasses import dataclass

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.embedding import embedding_layout_of, head_layout_of
from twinstream.executor.kernels.experts.routing import add_balance_loss, balance_sums
from twinstream.executor.kernels.head_forward import HeadForward
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.gradients import add_matmul, add_vector, gradient_views
from twinstream.executor.kernels.vector.vector_ops import NormGradients, VectorGradient, VectorOps
from twinstream.models.kernel_costs.attributes import (
    FROZEN_NORM,
    Attributes,
    experts_of,
    is_frozen,
    typed_attribute,
)
from twinstream.schedule.ops import Mode


def head_loss(operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls) -> None:
    """Write d_hidden; write or add the loss and the gradients of the norm and of the head.

    What is frozen has no gradient.

    The loss is the sum over tokens with a label >= 0 of cross entropy, times what `step_state`
    says: one over the number of such tokens in the step. With `balance`, the sums of a round's
    load-balancing loss, that is added, too.
    """
    head = HeadForward.of(operands, attributes)
    add_gradients(head, operands, attributes, vector, calls)
    head.add_loss(operands["loss"], calls)
    add_balance(operands, attributes, calls)


def add_gradients(
    head: HeadForward, operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write d_hidden; write or add the gradients of what is not frozen."""
    gradients = _Gradients.of(operands, attributes, calls)
    d_hidden_TD = operands["d_hidden"].view(head.hidden.dtype, tuple(head.hidden.shape))
    d_weight = None  # of the norm, summed over slices
    if gradients.norm is not None:
        d_norm_D = head.workspace.take(tuple(head.norm.shape), torch.float32)
        calls.add(d_norm_D.zero_)
        d_weight = VectorGradient(d_norm_D, "update")
    mode = gradients.weight_mode
    for part in head.slices(vector, calls):
        d_hidden_RD = d_hidden_TD[part.rows]
        calls.add(torch.mm, part.d_logits, head.weight, out=d_hidden_RD)
        if gradients.weight is not None:
            calls.add(add_matmul, gradients.weight, part.d_logits.t(), part.normed, mode)
        of_norm = NormGradients(d_hidden_RD, d_hidden_RD, d_weight, accumulate=False)
        calls.add(vector.rms_norm_backward, part.norm, of_norm, head.workspace.remaining())
        mode = "update"
    if gradients.norm is not None:
        calls.add(add_vector, gradients.norm, d_norm_D, gradients.norm_mode)
    if gradients.zero is not None:
        calls.add(gradients.zero.zero_)


def add_balance(operands: Operands, attributes: Attributes, calls: Calls) -> None:
    """Add the load-balancing loss of a round, where there is one."""
    if "balance" in operands:
        experts = experts_of(attributes)
        assert experts is not None
        loss = operands["loss"].view(torch.float32, (1,))
        balance = balance_sums(operands["balance"], experts)
        calls.add(add_balance_loss, balance, loss)


@dataclass(frozen=True)
class _Gradients:
    """Of the weights; `weight` is the embedding's if the two are tied.

    Norm and head are one group of parameters: frozen, neither has a gradient. A tied embedding is
    frozen or not by itself. Beside adapters the head is trained without the norm, whose gradient
    is zero.
    """

    norm: torch.Tensor | None  # [D]
    norm_mode: Mode
    weight: torch.Tensor | None  # [V, D]
    weight_mode: Mode
    zero: torch.Tensor | None  # [D], of a norm that is frozen beside its head

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes, calls: Calls) -> "_Gradients":
        layout = head_layout_of(attributes)
        gradients: dict[str, torch.Tensor] = {}
        norm_mode = weight_mode = cls._mode(operands, "gradients")
        if not is_frozen(attributes):
            gradients = gradient_views(operands["gradients"], layout, attributes, calls)
        if typed_attribute(attributes, "tied", bool):
            tied = embedding_layout_of(attributes)
            weight_mode = cls._mode(operands, "embedding_gradients")
            if (flat := operands.get("embedding_gradients")) is not None:
                gradients["head"] = gradient_views(flat, tied, attributes, calls)["embedding"]
        norm, zero = gradients.get("final_norm"), None
        if is_frozen(attributes, FROZEN_NORM):
            norm, zero = None, norm
        return cls(norm, norm_mode, gradients.get("head"), weight_mode, zero)

    @staticmethod
    def _mode(operands: Operands, name: str) -> Mode:
        """Of an operand; `update` where there is none."""
        return operands[name].mode if name in operands else "update"
