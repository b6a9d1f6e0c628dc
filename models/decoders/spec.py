"""The architecture of a decoder-only transformer."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ValidationError

from twinstream.models.decoders.config import (
    Dtype,
    HfConfigError,
    describe_problems,
    hf_config_file,
    read_hf_config,
    read_json_object,
)
from twinstream.models.decoders.sizes import DecoderFields, layer_parameters, outside_parameters
from twinstream.models.layout import (
    EXPERTS,
    ROUTER_BIAS,
    AdapterHalf,
    FlatLayout,
    bias_layout,
    block_layout,
    embedding_layout,
    experts_layout,
    head_layout,
    layer_of,
)
from twinstream.models.options import PositionLimit
from twinstream.schedule.node import Node
from twinstream.schedule.workload import ModelRef

# What our kernels run, of the fields that are also priced with other values; and why not those.
RUN_HERE: dict[str, tuple[object, str]] = {
    "mlp": ("swiglu", "only SwiGLU feed-forward networks have kernels"),
    "norm": ("rms", "only RMSNorm has kernels"),
    "positions": ("rope", "only RoPE has kernels"),
    "max_positions": (0, "learned positions have no kernels"),
    "biases": (False, "only Q, K and V may have biases"),
    "dropout": (False, "dropout has no kernels"),
    "latent": (None, "latent attention has no kernels"),
    "window": (None, "sliding windows have no kernels"),
    "sinks": (False, "attention sinks have no kernels"),
}


class ModelSpec(DecoderFields):
    """Sizes and options of one model; everything else is derived.

    `qk_norm` is Qwen3's: an RMSNorm with a weight of [head_dim] over each Q and K head before
    RoPE; with `qk_norm_rows`, as OLMoE has it, one over all heads of Q, and one over those of K.
    `qkv_bias` is Qwen2's: a bias on the Q, K and V projections and nowhere else.
    `rope_scaling` is that of Llama 3.1 and later, None plain RoPE. The
    product num_heads * head_dim may differ from d_model.

    Priced with any value, run as by default (`executor_refusal`): `mlp`, of which gated ones
    (swiglu, geglu) have three matrices, gelu and squared_relu two; `positions`, of which learned
    ones are `max_positions` rows of width d_model; `biases` of all linear layers and norms, as
    GPT-3 has; `dropout`, whose masks of one byte an element are kept for the backward pass;
    `experts`, with which their widths count and `d_ff` does not; `latent` attention, whose queries
    and keys have heads of `head_dim`; a `window` of some layers' attention; `sinks`, a logit of
    each head that takes part in its softmax.

    >>> from twinstream.models.presets import load_preset
    >>> load_preset("8b").num_parameters
    8030261248
    """

    MARKS: ClassVar[frozenset[str]] = frozenset({"num_layers", "d_ff"})
    provider: ClassVar[str] = "decoder"
    slices_sequences: ClassVar[bool] = True
    is_packed: ClassVar[bool] = True
    own_code: ClassVar[None] = None
    attention: ClassVar[None] = None
    own_lora: ClassVar[None] = None
    inputs: ClassVar[tuple[()]] = ()
    python_files: ClassVar[tuple[()]] = ()
    unread_told: ClassVar[None] = None
    is_tried_in_peft: ClassVar[bool] = True

    @classmethod
    def from_hf_config(
        cls, path: str | Path, *, dtype: Dtype | None = None, longest: int | None = None
    ) -> Self:
        """Read a Hugging Face config.json, or the one in a folder.

        Covers llama, mistral, qwen2, qwen3 and, with experts, mixtral, olmoe, qwen2_moe,
        qwen3_moe, dots1, and glm4_moe that rotates whole heads. Absent keys mean what they mean to
        transformers, so an absent dtype is float32.

        Args:
            dtype: of parameters, whatever the file says: float16, say.
            longest: tokens of the longest sequence, which a sliding window may be no shorter than;
                without it every window is refused.

        Raises:
            HfConfigError: the file is missing, broken or incomplete.
            UnsupportedConfigError: it asks for a computation that is not supported, or holds an
                unknown key.
        """
        if "prelude" in read_json_object(hf_config_file(path)):
            problem = "is a traced module, and this asks for a model of twinstream's own kernels"
            raise HfConfigError(path=path, problem=problem)
        fields = read_hf_config(path, dtype, longest)
        try:
            return cls(**fields)
        except ValidationError as error:
            raise HfConfigError(path=path, problem=describe_problems(error)) from None

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one block, its two norms included; of one with experts, if some have."""
        return layer_parameters(self).total

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model: tied embeddings once, the vocabulary not padded."""
        layers = sum(layer_parameters(kind).total * count for kind, count in self.layer_kinds)
        return layers + outside_parameters(self)

    def layer(self, number: int) -> "ModelSpec":
        """This model as a layer is built: some may have no experts, some no window."""
        return self.of_kind(self.kind_of(number))

    def kind_of(self, number: int) -> int:
        """The number of the kind of a layer: 1 if it has no experts where others have, and 2 more
        if it has no window where others have; 0 is the model itself."""
        is_dense = self.experts is not None and number in self.experts.dense_layers
        return is_dense + 2 * (self.window is not None and number in self.window.full_layers)

    def of_kind(self, kind: int) -> "ModelSpec":
        """This model as if all layers were of a kind."""
        return self if not kind else self._kinds[kind]

    @cached_property
    def _kinds(self) -> Mapping[int, "ModelSpec"]:
        lacking = {1: ("experts",), 2: ("window",), 3: ("experts", "window")}
        return {
            kind: self.model_copy(update=dict.fromkeys(names)) for kind, names in lacking.items()
        }

    def __copy__(self) -> Self:
        """What layers are built as is another thing of a copy with other fields."""
        copied = super().__copy__()
        copied.__dict__.pop("_kinds", None)
        return copied

    @property
    def layer_kinds(self) -> tuple[tuple["ModelSpec", int], ...]:
        """How layers are built, and how many are built so; by number of their kind."""
        counts = Counter(map(self.kind_of, range(self.num_layers)))
        return tuple((self.of_kind(kind), counts[kind]) for kind in sorted(counts))

    @property
    def ffn_widths(self) -> dict[str, int]:
        """Widths of the networks that layers have, by what they are called."""
        kinds, experts = [kind for kind, _ in self.layer_kinds], self.experts
        has_dense = any(kind.experts is None for kind in kinds)
        found = {"the feed-forward network": self.d_ff} if has_dense else {}
        if experts is not None:
            found |= {"an expert": experts.d_ff}
            found |= {"a shared expert": experts.shared_d_ff} if experts.shared_d_ff else {}
        return found

    @property
    def parameter_groups(self) -> tuple[str, ...]:
        """Groups of parameters, each one flat tensor, in the order of the forward pass.

        >>> from twinstream.models.presets import load_preset
        >>> load_preset("tiny").parameter_groups[:2]
        ('embedding', '0')
        """
        layers = (group for layer in range(self.num_layers) for group in self.layer_groups(layer))
        return ("embedding", *layers, "head")

    def layer_groups(self, layer: int) -> tuple[str, ...]:
        """Those of a layer: its number; with experts theirs, and a router's bias if it has one."""
        experts = self.layer(layer).experts
        if experts is None:
            return (str(layer),)
        bias = (f"{layer}{ROUTER_BIAS}",) if experts.correction_bias else ()
        return (str(layer), f"{layer}{EXPERTS}", *bias)

    @property
    def untrained_groups(self) -> tuple[str, ...]:
        """Those of them that are never trained: the biases of routers."""
        return tuple(group for group in self.parameter_groups if group.endswith(ROUTER_BIAS))

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group lie: `embedding`, one of a layer's, or `head`."""
        if group == "embedding":
            return embedding_layout(self)
        if group == "head":
            return head_layout(self)
        layer = self.layer_of(group)
        assert layer is not None, f"there is no group {group}"
        if group.endswith(EXPERTS):
            return experts_layout(self)
        return bias_layout(self) if group.endswith(ROUTER_BIAS) else block_layout(self.layer(layer))

    def adapter_sizes(self, layer: int) -> "ModelSpec":
        """The sizes that a layer's adapters follow from."""
        return self.layer(layer)

    def adapter_parts(self, group: str) -> tuple[str, ...]:
        """Groups of adapters that a rank has of a layer's: that itself, and parts of it."""
        return (group,)

    def adapter_half(self, group: str) -> AdapterHalf | None:
        """Which of a layer's adapters are in a group; None if all are."""
        return None

    def updated_apart(self, group: str) -> bool:
        """Whether each matrix of a group is updated by itself, wherever the others lie."""
        return False

    @property
    def decoder(self) -> Self:
        """Itself: its blocks are those of our decoders."""
        return self

    @property
    def position_limit(self) -> PositionLimit | None:
        """Of positions that are learned, as many as there are rows."""
        if not self.max_positions:
            return None
        why = f"its table of learned positions has {self.max_positions:,} rows"
        return PositionLimit(tokens=self.max_positions, why=why)

    def size_refusal(self, seq_len: int, chunk_tokens: int) -> None:
        """Kernels and costs are those of chunks of any size."""

    @property
    def executor_refusal(self) -> str | None:
        """Fields that no kernels here compute; None if they compute all.

        >>> from twinstream.models.presets import load_model
        >>> load_model("gpt-1.7b").executor_refusal.partition(";")[0]
        'mlp = gelu (only SwiGLU feed-forward networks have kernels)'
        >>> load_model("8b").executor_refusal
        """
        usual = self.usual_fields
        found = [
            f"{_told(field, getattr(self, field))} ({reason})"
            for field, (_, reason) in RUN_HERE.items()
            if field not in usual
        ]
        return "; ".join(found) or None

    @property
    def ranks_refusal(self) -> str | None:
        """A load-balancing loss, which is of one device."""
        if self.experts is None or not self.experts.aux_loss:
            return None
        return "a load-balancing loss on several GPUs (leave it out with --aux-loss 0)"

    @property
    def identity(self) -> Mapping[str, object]:
        """All fields but the name."""
        return {name: value for name, value in self if name != "name"}

    @property
    def layer_bytes(self) -> int:
        """Of the largest flat tensor of parameters that a layer has."""
        own = max(block_layout(kind).size_bytes for kind, _ in self.layer_kinds)
        return max(own, experts_layout(self).size_bytes) if self.experts else own

    def layer_of(self, group: str) -> int | None:
        """The layer whose parameters or adapters a group has; None of embedding and head."""
        return layer_of(group)

    @property
    def usual_fields(self) -> set[str]:
        """Fields of which a document need not tell: they are as all that runs here has them."""
        return {name for name, (usual, _) in RUN_HERE.items() if getattr(self, name) == usual}

    def ref(self) -> ModelRef:
        """What documents say of the model, from which `model_of` makes it again."""
        usual = self.usual_fields | (set() if self.qk_norm_rows else {"qk_norm_rows"})
        written = self.model_dump_json(exclude_none=True, exclude=usual)
        digest = hashlib.sha256(written.encode()).hexdigest()[:16]
        fields = self.model_dump(mode="json", exclude_none=True, exclude=usual)
        return ModelRef(name=self.name, content_hash=digest, spec=fields)


def _told(field: str, value: object) -> str:
    return field if isinstance(value, Node) else f"{field} = {value}"
