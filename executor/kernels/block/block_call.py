"""The attributes of a block kernel."""

from dataclasses import dataclass
from functools import cached_property

import torch

from twinstream.executor.kernels.operand import DTYPES
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attributes import (
    IN_PARTS,
    NOT_CAUSAL,
    Attributes,
    base_format,
    experts_of,
    is_frozen,
    keys_seen,
    most_packed,
    ranks_of_experts,
    required_attributes,
    typed_attribute,
)
from twinstream.models.layout import (
    FlatLayout,
    block_layout,
    dense_width,
    experts_layout,
    part_layout,
)
from twinstream.models.options import ROPE_SCALING, RopeScaling
from twinstream.models.recipes.lora import Lora, lora_of_attributes
from twinstream.models.recipes.quantized_base import BaseFormat, quantized_layout
from twinstream.schedule.ops import Attribute

_SPEC_FIELDS = (
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "d_ff",
    "qk_norm",
    "qkv_bias",
    "norm_eps",
    "rope_theta",
    "dtype",
)


@dataclass(frozen=True)
class BlockCall:
    """Which block it is and where the chunk of `num_tokens` lies in sequences of `seq_len`.

    It packs at most `most_packed` sequences of any lengths up to `seq_len`, if that is not 0.
    `frozen` weights have no gradient, nor have `frozen_experts`; adapters, if there are any, do.
    With `in_parts` it is a part of a block, and the spec has the sizes of that. Of `ep` ranks each
    has some of its experts: rows are sent to them by others than this call. It sees `num_seen`
    keys: those up to its own or, where it is not `causal`, others' alone.
    """

    spec: ModelSpec
    num_tokens: int
    seq_len: int
    chunk_start: int
    attention: str
    most_packed: int
    frozen: bool = False
    frozen_experts: bool = False
    lora: Lora | None = None
    base: BaseFormat = "model"
    experts_base: BaseFormat = "model"
    in_parts: bool = False
    ep: int = 1
    num_seen: int = 0
    causal: bool = True

    @classmethod
    def from_attributes(cls, attributes: Attributes) -> "BlockCall":
        fields = required_attributes(attributes, *_SPEC_FIELDS)
        tokens, start = (typed_attribute(attributes, n, int) for n in ("num_tokens", "chunk_start"))
        # A block depends neither on the depth nor on the vocabulary of its model.
        spec = ModelSpec.model_validate(
            {
                "name": "block", "num_layers": 1, "vocab_size": 1, **fields,
                "rope_scaling": _rope_scaling(attributes), "experts": experts_of(attributes),
                "qk_norm_rows": attributes.get("qk_norm_rows", False),
            }
        )  # fmt: skip
        return cls(
            spec=spec,
            num_tokens=tokens,
            seq_len=typed_attribute(attributes, "seq_len", int),
            chunk_start=start,
            attention=typed_attribute(attributes, "attention", str),
            most_packed=most_packed(attributes),
            frozen=is_frozen(attributes),
            frozen_experts=is_frozen(attributes, "frozen_experts"),
            lora=lora_of_attributes(attributes),
            base=base_format(attributes),
            experts_base=base_format(attributes, "experts_base"),
            in_parts=IN_PARTS in attributes,
            ep=ranks_of_experts(attributes),
            num_seen=keys_seen(attributes, start + tokens),
            causal=NOT_CAUSAL not in attributes,
        )

    @property
    def sliced(self) -> bool:
        """Whether the chunk is a slice of one sequence, and not a pack of whole ones."""
        return self.num_tokens < self.seq_len

    @property
    def num_sequences(self) -> int:
        """Of the batch: sequences of any lengths lie one behind the other in a batch of one."""
        return 1 if self.sliced or self.most_packed else self.num_tokens // self.seq_len

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.spec.dtype]

    @cached_property
    def layout(self) -> FlatLayout:
        lies = part_layout if self.in_parts else block_layout
        return quantized_layout(lies(self.spec), self.base)

    @property
    def eps_again(self) -> float | None:
        """Of a norm that is computed again; None where the reciprocals of its rows' are saved."""
        return self.spec.norm_eps if self.in_parts else None

    @cached_property
    def experts_layout(self) -> FlatLayout | None:
        """None where the call has none of the experts' weights."""
        if self.spec.experts is None or self.ep > 1:
            return None
        return quantized_layout(experts_layout(self.spec), self.experts_base)

    @property
    def few_bits(self) -> BaseFormat:
        """How matrices lie that are made anew, of the block or of its experts; `model`: none."""
        if self.ep > 1:
            return self.base
        return self.experts_base if self.base == "model" else self.base

    @property
    def dense_width(self) -> int:
        """Of the network that all tokens go through; 0 without one."""
        return dense_width(self.spec)


def _rope_scaling(attributes: Attributes) -> dict[str, Attribute] | None:
    """The fields of the model's, if it has one."""
    if not any(name.startswith(ROPE_SCALING) for name in attributes):
        return None
    names = [f"{ROPE_SCALING}{name}" for name in RopeScaling.model_fields]
    fields = required_attributes(attributes, *names)
    return {name.removeprefix(ROPE_SCALING): value for name, value in fields.items()}
