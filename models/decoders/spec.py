"""The architecture of a decoder-only transformer."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from twinstream.models.decoders.config import (
    Dtype,
    HfConfigError,
    describe_problems,
    hf_config_file,
    read_hf_config,
    read_json_object,
)
from twinstream.models.layout import (
    EXPERTS,
    ROUTER_BIAS,
    FlatLayout,
    bias_layout,
    block_layout,
    embedding_layout,
    experts_layout,
    head_layout,
    layer_of,
    padded_vocab,
    rank_heads,
)
from twinstream.models.options import (
    Depth,
    Experts,
    LatentAttention,
    PositionLimit,
    PositiveFinite,
    RopeScaling,
    Width,
    Window,
)
from twinstream.schedule.node import Node
from twinstream.schedule.workload import ModelRef

ITEMSIZE_BYTES = {"bfloat16": 2, "float32": 4}
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

ParameterPart = Literal[
    "attention", "mlp", "router", "experts", "embedding", "positions", "final_norm", "head"
]


class ModelSpec(Node):
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

    name: Annotated[str, Field(min_length=1)]
    num_layers: Depth
    d_model: Width
    num_heads: Width
    num_kv_heads: Width
    head_dim: Width
    d_ff: Width
    vocab_size: Annotated[int, Field(gt=0, le=2**26)]
    norm_eps: PositiveFinite = 1e-5
    rope_theta: PositiveFinite = 500_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qk_norm_rows: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = False
    dtype: Dtype = "bfloat16"
    mlp: Literal["swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rope", "learned"] = "rope"
    max_positions: Annotated[int, Field(ge=0, le=2**26)] = 0
    biases: bool = False
    dropout: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: Window | None = None
    sinks: bool = False

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

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise PydanticCustomError(
                "heads_not_divisible",
                "num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}",
                {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads},
            )
        if self.d_q > 2**22:
            raise PydanticCustomError(
                "too_wide", "num_heads * head_dim is {d_q}, more than 2**22", {"d_q": self.d_q}
            )
        if self.head_dim % 2 and self.positions == "rope":
            raise PydanticCustomError(
                "odd_head_dim", "head_dim {head_dim} is odd, RoPE rotates pairs of elements",
                {"head_dim": self.head_dim},
            )  # fmt: skip
        if (self.positions == "learned") != bool(self.max_positions):
            raise PydanticCustomError(
                "positions_without_rows",
                "learned positions need max_positions, and only they have them",
            )
        dense = self.experts.dense_layers if self.experts else ()
        if dense and dense[-1] >= self.num_layers:
            raise PydanticCustomError(
                "dense_layers", "layer {layer} is to be dense, of {count} layers",
                {"layer": dense[-1], "count": self.num_layers},
            )  # fmt: skip
        if self.latent is not None and (
            self.num_kv_heads != self.num_heads or self.latent.rope_dim >= self.head_dim
        ):
            raise PydanticCustomError(
                "latent_heads",
                "latent attention has as many heads of keys as of queries, {heads}, and rotates "
                "less than head_dim {head_dim}",
                {"heads": self.num_heads, "head_dim": self.head_dim},
            )
        if self.qk_norm_rows and not self.qk_norm:
            raise PydanticCustomError("norms_of_rows", "qk_norm_rows says how qk_norm is taken")
        return self

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
    def d_q(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of all key heads together; the values are as wide, but with latent attention."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of a head's values, and of what it makes of them."""
        return self.head_dim if self.latent is None else self.latent.v_dim

    @property
    def d_o(self) -> int:
        """Input width of the output projection."""
        return self.num_heads * self.v_dim

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices around attention, through which each token goes."""
        d, latent = self.d_model, self.latent
        if latent is None:
            return d * (2 * self.d_q + 2 * self.d_kv)
        queries = latent.q_rank * (d + self.d_q) if latent.q_rank else d * self.d_q
        made = self.num_heads * (self.head_dim - latent.rope_dim + latent.v_dim)
        keys = d * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * made
        return queries + keys + d * self.d_o

    def doubled_pairs(self, queries: int, filled: int = 0) -> int:
        """Twice the pairs of a query and a key that it sees, behind so many tokens; half of those
        on the diagonal count, and none of the window of another layer than this is built as."""
        last = filled + queries
        if self.window is None:
            return last * last - filled * filled
        return self.window.doubled_pairs(last) - self.window.doubled_pairs(filled)

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters and activations."""
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def gated(self) -> bool:
        """Whether the feed-forward network has a gate."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one block, its two norms included; of one with experts, if some have."""
        return layer_parameters(self).total

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model: tied embeddings once, the vocabulary not padded."""
        layers = sum(layer_parameters(kind).total * count for kind, count in self.layer_kinds)
        return layers + _outside_layers(self)

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


class LayerParameters(NamedTuple):
    """Parameters of one layer, each part with the norm before it.

    A layer has an `mlp`, or a `router`, `num_experts` of `expert` each, and a `shared_expert`.
    """

    attention: int
    mlp: int
    router: int
    expert: int
    num_experts: int
    shared_expert: int

    @property
    def total(self) -> int:
        """All of the layer's."""
        return self._with_experts(self.num_experts)

    def active(self, experts_per_token: int) -> int:
        """Those that one token passes through."""
        return self._with_experts(experts_per_token)

    def _with_experts(self, num_experts: int) -> int:
        dense = self.attention + self.mlp + self.router + self.shared_expert
        return dense + num_experts * self.expert


def layer_parameters(shape: ModelSpec) -> LayerParameters:
    """Parameters of one layer of a model."""
    whole = _Split(shape, tp=1, ep=1, etp=1)
    experts = shape.experts
    return LayerParameters(
        attention=whole.attention(),
        mlp=0 if experts else norm_parameters(shape) + whole.mlp(shape.d_ff, 1),
        router=whole.router(),
        expert=whole.mlp(experts.d_ff, 1) if experts else 0,
        num_experts=experts.count if experts else 0,
        shared_expert=whole.mlp(experts.shared_d_ff, 1) if experts else 0,
    )


def norm_parameters(shape: ModelSpec) -> int:
    """Of one norm over the width of the model: a weight and, of a LayerNorm with biases, a bias."""
    return shape.d_model * (2 if shape.norm == "layer" and shape.biases else 1)


def rank_parameters(
    shape: ModelSpec, tp: int, ep: int, part: ParameterPart, etp: int | None = None
) -> int:
    """Parameters of a part of one layer, or of one outside the layers, that one rank holds.

    Over `tp` matrices are split by heads, by FFN width and by rows of the padded vocabulary. Norms,
    the router, learned positions and the biases of row-parallel layers (output and down projection)
    are held by each rank; so are key and value heads of which there are fewer than ranks. Over `ep`
    whole experts are split, each of them over `etp`, which is `tp` unless given; a shared expert is
    split over `tp` alone and counted among `experts`. A tied head has none of its own; where it
    does not lie with the embedding, as on a last pipeline stage, it is a copy as large as that.
    What does not divide is rounded up.
    """
    split = _Split(shape, tp, ep, tp if etp is None else etp)
    experts = shape.experts
    match part:
        case "attention":
            return split.attention()
        case "mlp":
            return 0 if experts else norm_parameters(shape) + split.mlp(shape.d_ff, tp)
        case "router":
            return split.router()
        case "experts":
            return split.experts()
        case "embedding":
            return split.vocab_matrix()
        case "positions":
            return shape.max_positions * shape.d_model
        case "final_norm":
            return norm_parameters(shape)
        case "head":
            return 0 if shape.tied_embeddings else split.vocab_matrix()


def _outside_layers(shape: ModelSpec) -> int:
    vocab_matrices = 1 if shape.tied_embeddings else 2
    rows = vocab_matrices * shape.vocab_size + shape.max_positions
    return rows * shape.d_model + norm_parameters(shape)


class _Split(NamedTuple):
    """Counts of what one rank holds of the parts of a layer."""

    shape: ModelSpec
    tp: int
    ep: int
    etp: int

    def attention(self) -> int:
        shape = self.shape
        if shape.latent is not None:
            return self._latent_attention(shape.latent)
        d_q = rank_heads(shape.num_heads, self.tp) * shape.head_dim
        d_qkv = d_q + 2 * rank_heads(shape.num_kv_heads, self.tp) * shape.head_dim
        matrices = (d_qkv + d_q) * shape.d_model
        qkv_bias = d_qkv if shape.biases or shape.qkv_bias else 0
        output_bias = shape.d_model if shape.biases else 0
        rows = rank_heads(shape.num_heads, self.tp) + rank_heads(shape.num_kv_heads, self.tp)
        head_norms = (rows if shape.qk_norm_rows else 2) * shape.head_dim if shape.qk_norm else 0
        sinks = rank_heads(shape.num_heads, self.tp) if shape.sinks else 0
        return norm_parameters(shape) + matrices + qkv_bias + output_bias + head_norms + sinks

    def _latent_attention(self, latent: LatentAttention) -> int:
        """Projections to few columns, and their norms, are held by each rank."""
        shape, heads = self.shape, rank_heads(self.shape.num_heads, self.tp)
        few = [rank for rank in (latent.q_rank, latent.kv_rank) if rank]
        shared = shape.d_model * (sum(few) + latent.rope_dim) + sum(few)
        made = heads * (shape.head_dim - latent.rope_dim + latent.v_dim)
        queries = (latent.q_rank or shape.d_model) * heads * shape.head_dim
        keys, output = latent.kv_rank * made, shape.d_model * heads * latent.v_dim
        return norm_parameters(shape) + shared + queries + keys + output

    def mlp(self, d_ff: int, ranks: int) -> int:
        """Matrices and biases of a feed-forward network split over so many ranks; 0 of none."""
        if not d_ff:
            return 0
        shape, width = self.shape, -(-d_ff // ranks)
        d_up = (2 if shape.gated else 1) * width
        return (d_up + width) * shape.d_model + (d_up + shape.d_model if shape.biases else 0)

    def router(self) -> int:
        if self.shape.experts is None:
            return 0
        rows = self.shape.experts.count + self.shape.experts.shared_gate
        biases = self.shape.experts.count if self.shape.biases else 0
        return norm_parameters(self.shape) + rows * self.shape.d_model + biases

    def experts(self) -> int:
        experts = self.shape.experts
        if experts is None:
            return 0
        routed = -(-experts.count // self.ep) * self.mlp(experts.d_ff, self.etp)
        return routed + self.mlp(experts.shared_d_ff, self.tp)

    def vocab_matrix(self) -> int:
        return padded_vocab(self.shape.vocab_size, self.tp) // self.tp * self.shape.d_model
