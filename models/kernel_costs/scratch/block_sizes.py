"""The sizes in a block kernel's attributes, from which its scratch follows."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass, AttentionShape
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    base_format,
    experts_of,
    is_frozen,
    keys_seen,
    most_packed,
    ranks_of_experts,
    typed_attribute,
)
from twinstream.models.kernel_costs.scratch_sizes import INT32_BYTES, INT64_BYTES, float32_bytes
from twinstream.models.layout import aligned
from twinstream.models.options import Experts
from twinstream.models.recipes.adapter_layout import low_widths
from twinstream.models.recipes.lora import lora_of_attributes
from twinstream.models.recipes.quantized_base import BaseFormat


@dataclass(frozen=True)
class BlockSizes:
    """The sizes in a block kernel's attributes."""

    tokens: int
    d: int
    f: int
    qk_norm: bool
    qkv_bias: bool
    attention: str
    attention_shape: AttentionShape
    frozen: bool
    low_widths: Mapping[str, int]
    base: BaseFormat
    experts_base: BaseFormat
    experts: Experts | None
    expert_rank: int  # of adapters of experts; 0 without any
    qk_norm_rows: bool
    ep: int  # ranks that share the experts

    @property
    def room(self) -> int:
        """Bytes of the largest matrix, where it is made anew from codes."""
        widest = 0 if self.base == "model" else max(2 * self.f, self.q + 2 * self.k, self.q)
        if self.experts is not None and self.experts_base != "model" and self.ep == 1:
            widest = max(widest, self.experts.count * 2 * self.experts.d_ff)
        return aligned(widest * self.d * self.itemsize)

    def low(self, site: str) -> int:
        """Bytes of the gradient of x A^T of a site's adapters."""
        return aligned(self.tokens * self.low_widths.get(site, 0) * self.itemsize)

    @property
    def q(self) -> int:
        """Width of Q."""
        return self.attention_shape.num_heads * self.attention_shape.head_dim

    @property
    def k(self) -> int:
        """Width of K, and of V."""
        return self.attention_shape.num_kv_heads * self.attention_shape.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.attention_shape.itemsize_bytes

    @property
    def normed(self) -> int:
        """Bytes of normed rows."""
        return aligned(self.tokens * self.d * self.itemsize)

    @property
    def routed_rows(self) -> int:
        """Bytes of where rows go: three orders of them and where each expert's end; a gate of every
        token."""
        experts = self.experts
        if experts is None:
            return 0
        orders = 3 * aligned(self.tokens * experts.per_token * INT64_BYTES)
        gate = float32_bytes(self.tokens) if experts.shared_gate else 0
        return orders + aligned(experts.count * INT32_BYTES) + gate

    def rows(self, width: int) -> int:
        """Bytes of so many columns of every row that goes to an expert."""
        assert self.experts is not None
        return aligned(self.tokens * self.experts.per_token * width * self.itemsize)

    @property
    def projections(self) -> int:
        """Bytes of normed rows, and beside them those gathered for experts and what their adapters
        take."""
        if self.experts is None or self.ep > 1:
            return self.normed
        return self.normed + self.rows(self.d) + self.rows(self.expert_rank)

    @property
    def expert_outputs(self) -> int:
        """Bytes of experts' products, and of their outputs."""
        assert self.experts is not None
        return sum(map(self.rows, (self.experts.d_ff, self.d, self.expert_rank)))

    @property
    def through_experts(self) -> int:
        """Bytes of the gradients of gate and up, of rows and of the product, on their way back."""
        assert self.experts is not None
        return self.rows(2 * self.experts.d_ff) + self.expert_outputs

    @property
    def rotated_and_attention(self) -> int:
        """Bytes of Q as attention takes it, and attention's own."""
        q = aligned(self.tokens * self.q * self.itemsize)
        return q + self.attention_scratch("forward")

    def attention_scratch(self, of_pass: AttentionPass) -> int:
        """Bytes that attention takes."""
        return attention_limits(self.attention).scratch(of_pass, self.attention_shape)


def block_sizes(attributes: Attributes) -> BlockSizes:
    """Of a block kernel that is called with these attributes, or one of a part of it."""
    experts, lora = experts_of(attributes), lora_of_attributes(attributes)
    d_ff = typed_attribute(attributes, "d_ff", int) if experts is None else experts.shared_d_ff
    adapts_experts = lora is not None and experts is not None and "experts" in lora.targets
    return BlockSizes(
        tokens=typed_attribute(attributes, "num_tokens", int),
        d=typed_attribute(attributes, "d_model", int),
        f=d_ff,
        qk_norm=typed_attribute(attributes, "qk_norm", bool),
        qkv_bias=typed_attribute(attributes, "qkv_bias", bool),
        attention=typed_attribute(attributes, "attention", str),
        attention_shape=attention_shape(attributes),
        frozen=is_frozen(attributes),
        low_widths={} if lora is None else low_widths(lora, d_ff),
        base=base_format(attributes),
        experts_base=base_format(attributes, "experts_base"),
        experts=experts,
        expert_rank=lora.rank if lora is not None and adapts_experts else 0,
        qk_norm_rows=bool(attributes.get("qk_norm_rows", False)),
        ep=ranks_of_experts(attributes),
    )


def attention_shape(attributes: Attributes) -> AttentionShape:
    """The attention inside a block kernel that is called with these attributes.

    Raises:
        TwinstreamError: an attribute is missing or of another type.
    """
    tokens, seq_len, start = (
        typed_attribute(attributes, name, int) for name in ("num_tokens", "seq_len", "chunk_start")
    )
    most = most_packed(attributes)
    queries = tokens if most else min(tokens, seq_len)
    return AttentionShape(
        num_sequences=tokens // queries,
        num_queries=queries,
        num_keys=max(queries, keys_seen(attributes, start + queries)),
        num_heads=typed_attribute(attributes, "num_heads", int),
        num_kv_heads=typed_attribute(attributes, "num_kv_heads", int),
        head_dim=typed_attribute(attributes, "head_dim", int),
        dtype=typed_attribute(attributes, "dtype", str),
        sliced=tokens < seq_len,
        most_packed=most,
        longest_tokens=seq_len if most else 0,
    )
