"""Llama as one writes it in plain PyTorch, to compare with: same sizes, same names as Hugging Face.

Legend: B sequences, S tokens of each, D d_model, H query heads, K key heads, E head_dim.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twinstream.executor.kernels.vector.rope import rope_frequencies
from twinstream.models.decoders.spec import ModelSpec


class Attention(nn.Module):
    """Causal attention with grouped keys and rotary positions."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(spec.d_model, spec.d_q, bias=False)
        self.k_proj = nn.Linear(spec.d_model, spec.d_kv, bias=False)
        self.v_proj = nn.Linear(spec.d_model, spec.d_kv, bias=False)
        self.o_proj = nn.Linear(spec.d_q, spec.d_model, bias=False)

    def forward(self, x_BSD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(
            rotated(q, rope), rotated(k, rope), v, is_causal=True, enable_gqa=True
        )
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.up_proj = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.down_proj = nn.Linear(spec.d_ff, spec.d_model, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(
            functional.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        )
        return result


class Block(nn.Module):
    """One layer: attention and FFN, each normed before and added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x_BSD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rope)
        result: torch.Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return result


class Decoder(nn.Module):
    """Embedding, blocks under activation checkpointing, final norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed_tokens(ids_BS)
        rope = rotations(self.spec, ids_BS.shape[1], x_BSD)
        for layer in self.layers:
            x_BSD = checkpoint(layer, x_BSD, rope, use_reentrant=False)
        result: torch.Tensor = self.norm(x_BSD)
        return result


class Llama(nn.Module):
    """The model with its head; called with ids and labels it returns the mean loss."""

    def __init__(self, spec: ModelSpec, row_slice: int = 2048) -> None:
        if spec.qk_norm or spec.qkv_bias or spec.tied_embeddings:
            raise ValueError(
                f"'{spec.name}' is no Llama: it has QK norms, biases or tied embeddings"
            )
        super().__init__()
        self.row_slice = row_slice
        self.model = Decoder(spec)
        self.lm_head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)

    def forward(self, ids_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        rows = torch.split(self.model(ids_BS).flatten(0, 1), self.row_slice)
        labels = torch.split(labels_BS.flatten(), self.row_slice)
        # slices are checkpointed, or the float32 logits alone would take 4 GiB per 8,192 tokens
        losses = [
            checkpoint(self._loss_sum, x, y, use_reentrant=False)
            for x, y in zip(rows, labels, strict=True)
        ]
        return torch.stack(losses).sum() / labels_BS.numel()

    def _loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.lm_head(x).float(), y, reduction="sum")


def rotations(spec: ModelSpec, num_positions: int, like: torch.Tensor) -> torch.Tensor:
    """cos and sin of every position, [2, S, E], in the dtype of the activations."""
    device = like.device
    frequencies = rope_frequencies(spec.rope_theta, spec.head_dim, spec.rope_scaling, device)
    positions = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.float()).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def rotated(x_BHSE: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Queries or keys turned by their positions; the two halves of a head are the pairs."""
    cos, sin = rope[0], rope[1]
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos + torch.cat([-second, first], dim=-1) * sin
