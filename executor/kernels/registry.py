"""Kernels by key: name and implementation."""

from collections.abc import Callable

from twinstream.executor.kernels.block.block_backward import block_backward
from twinstream.executor.kernels.block.block_forward import (
    block_combine_forward,
    block_forward,
    block_recompute_attention,
    block_recompute_experts,
    block_recompute_input,
)
from twinstream.executor.kernels.block.shared_experts import (
    block_dispatch_backward,
    experts_backward,
    experts_forward,
)
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.embedding import embed_backward, embed_forward
from twinstream.executor.kernels.gradient_norm import (
    add_gradients,
    gradient_norm,
    gradient_squares,
    no_squares,
    shard_squares,
    sum_pieces,
    sum_squares,
)
from twinstream.executor.kernels.head_dpo import head_dpo, head_dpo_evaluate
from twinstream.executor.kernels.head_forward import head_evaluate
from twinstream.executor.kernels.head_loss import head_loss
from twinstream.executor.kernels.operand import Kernel, Operands
from twinstream.executor.kernels.parts.block_parts import (
    attention_part_backward,
    attention_part_forward,
    attention_part_recompute,
    context_part_backward,
    experts_part_recompute,
    kv_part_forward,
    mlp_part_backward,
    mlp_part_combine_forward,
    mlp_part_dispatch_forward,
    mlp_part_forward,
    mlp_part_recompute,
    output_part_backward,
    output_part_forward,
    q_part_recompute,
    qkv_part_backward,
    ring_part_backward,
    ring_part_forward,
)
from twinstream.executor.kernels.parts.end_parts import (
    embed_part_backward,
    embed_part_forward,
    head_part_backward,
    head_part_sums,
    parts_dpo,
    parts_loss,
)
from twinstream.executor.kernels.parts.sums import add_parts, norm_parts_backward
from twinstream.executor.kernels.updates.adamw_step import adamw_step
from twinstream.executor.kernels.updates.element_step import element_step
from twinstream.executor.kernels.updates.muon_step import muon_step
from twinstream.executor.kernels.vector.eager_vector import EagerVector
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.models.kernel_costs.attributes import Attributes
from twinstream.schedule.errors import TwinstreamError

_COMPOSITIONS: dict[str, Callable[..., None]] = {
    "embed_forward": embed_forward,
    "block_forward": block_forward,
    "block_recompute_experts": block_recompute_experts,
    "block_recompute_attention": block_recompute_attention,
    "block_recompute_input": block_recompute_input,
    "block_backward": block_backward,
    "block_combine_forward": block_combine_forward,
    "block_dispatch_backward": block_dispatch_backward,
    "experts_forward": experts_forward,
    "experts_backward": experts_backward,
    "head_loss": head_loss,
    "head_evaluate": head_evaluate,
    "head_dpo": head_dpo,
    "head_dpo_evaluate": head_dpo_evaluate,
    "embed_backward": embed_backward,
    "gradient_squares": gradient_squares,
    "gradient_norm": gradient_norm,
    "add_gradients": add_gradients,
    "no_squares": no_squares,
    "shard_squares": shard_squares,
    "sum_squares": sum_squares,
    "sum_pieces": sum_pieces,
    "adamw_step": adamw_step,
    "element_step": element_step,
    "muon_step": muon_step,
    "embed_part_forward": embed_part_forward,
    "embed_part_backward": embed_part_backward,
    "attention_part_forward": attention_part_forward,
    "attention_part_recompute": attention_part_recompute,
    "attention_part_backward": attention_part_backward,
    "kv_part_forward": kv_part_forward,
    "context_part_forward": attention_part_forward,
    "context_part_recompute": attention_part_recompute,
    "context_part_backward": context_part_backward,
    "q_part_recompute": q_part_recompute,
    "ring_part_forward": ring_part_forward,
    "ring_part_backward": ring_part_backward,
    "output_part_forward": output_part_forward,
    "output_part_backward": output_part_backward,
    "qkv_part_backward": qkv_part_backward,
    "mlp_part_forward": mlp_part_forward,
    "mlp_part_recompute": mlp_part_recompute,
    "experts_part_recompute": experts_part_recompute,
    "mlp_part_dispatch_forward": mlp_part_dispatch_forward,
    "mlp_part_combine_forward": mlp_part_combine_forward,
    "mlp_part_dispatch_backward": block_dispatch_backward,
    "mlp_part_backward": mlp_part_backward,
    "add_parts": add_parts,
    "norm_parts_backward": norm_parts_backward,
    "head_part_sums": head_part_sums,
    "head_part_backward": head_part_backward,
    "parts_loss": parts_loss,
    "parts_dpo": parts_dpo,
}
_VECTOR = ("eager", "triton")
_OF_HOST: dict[str, Callable[..., None]] = {
    "adamw_step": adamw_step,
    "element_step": element_step,
    "accumulate": add_gradients,
}
"""What the host's cores compute beside the device: the eager kernels, on the host's memory."""


def kernel_keys() -> tuple[str, ...]:
    on_device = (f"{name}/{vector}" for vector in _VECTOR for name in _COMPOSITIONS)
    return (*on_device, *(f"{name}/host" for name in _OF_HOST))


def registered_kernel(key: str) -> Kernel:
    """Return the kernel that a Compute op names.

    It gives the same bits from run to run, provided its attention implementation does.

    Raises:
        TwinstreamError: there is none of that key; the message lists those there are.
    """
    if key not in kernel_keys():
        known = ", ".join(kernel_keys())
        raise TwinstreamError(f"kernel '{key}' is unknown; known kernels: {known}")
    name, vector = key.split("/")
    composition = (_OF_HOST if vector == "host" else _COMPOSITIONS)[name]
    operations = vector_ops(vector)

    def bind(operands: Operands, attributes: Attributes) -> Calls:
        calls = Calls()
        composition(operands, attributes, operations, calls)
        return calls

    return bind


def vector_ops(name: str) -> VectorOps:
    """The vector operations of that name; Triton is imported only here, when asked for."""
    if name in ("eager", "host"):
        return EagerVector()
    from twinstream.executor.kernels.triton_kernels.vector import TritonVector

    return TritonVector()
