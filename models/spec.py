"""The architecture of a decoder-only transformer."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from twinstream.models.hf.config import (
    Dtype,
    HfConfigError,
    describe_problems,
    hf_config_file,
    read_hf_config,
    read_json_object,
)
from twinstream.models.hf.experts import EXPERT_MODEL_TYPES, read_expert_config
from twinstream.models.layout import (
    FlatLayout,
    block_layout,
    embedding_layout,
    head_layout,
    layer_of,
)
from twinstream.models.rope import PositiveFinite, RopeScaling
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount
from twinstream.schedule.workload import ModelRef

Width = Annotated[int, Field(gt=0, le=2**22)]

ITEMSIZE_BYTES = {"bfloat16": 2, "float32": 4}
# What our kernels run, of the fields that are also priced with other values; and why not those.
RUN_HERE: dict[str, tuple[object, str]] = {
    "mlp": ("swiglu", "only SwiGLU feed-forward networks have kernels"),
    "norm": ("rms", "only RMSNorm has kernels"),
    "positions": ("rope", "only RoPE has kernels"),
    "max_positions": (0, "learned positions have no kernels"),
    "biases": (False, "only Q, K and V may have biases"),
    "dropout": (False, "dropout has no kernels"),
    "experts": (None, "experts have no kernels"),
}

_VOCAB_MULTIPLE = 128  # of the rows of the embedding that a rank holds; Megatron-LM's default

ParameterPart = Literal[
    "attention", "mlp", "router", "experts", "embedding", "positions", "final_norm", "head"
]


class Experts(Node):
    """The routed experts of every layer's feed-forward network.

    `d_ff` is one expert's width, `per_token` how many a token goes to; `shared_d_ff` the width of
    one that all tokens go to, 0 without one.
    """

    count: PositiveCount
    per_token: PositiveCount
    d_ff: Width
    shared_d_ff: Annotated[int, Field(ge=0, le=2**22)] = 0


class ModelSpec(Node):
    """Sizes and options of one model; everything else is derived.

    `qk_norm` is Qwen3's: an RMSNorm with a weight of [head_dim] over each Q and K head before
    RoPE. `qkv_bias` is Qwen2's: a bias on the Q, K and V projections and nowhere else.
    `rope_scaling` is that of Llama 3.1 and later, None plain RoPE. The
    product num_heads * head_dim may differ from d_model.

    Priced with any value, run as by default (`executor_refusal`): `mlp`, of which gated ones
    (swiglu, geglu) have three matrices, gelu and squared_relu two; `positions`, of which learned
    ones are `max_positions` rows of width d_model; `biases` of all linear layers and norms, as
    GPT-3 has; `dropout`, whose masks of one byte an element are kept for the backward pass;
    `experts`, with which their widths count and `d_ff` does not.

    >>> from twinstream.models.presets import load_preset
    >>> load_preset("8b").num_parameters
    8030261248
    """

    name: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(gt=0, le=2**20)]
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
                "too_wide",
                "num_heads * head_dim is {d_q}, more than 2**22",
                {"d_q": self.d_q},
            )
        if self.head_dim % 2 and self.positions == "rope":
            raise PydanticCustomError(
                "odd_head_dim",
                "head_dim {head_dim} is odd, RoPE rotates pairs of elements",
                {"head_dim": self.head_dim},
            )
        if (self.positions == "learned") != bool(self.max_positions):
            raise PydanticCustomError(
                "positions_without_rows",
                "learned positions need max_positions, and only they have them",
            )
        if self.experts and self.experts.per_token > self.experts.count:
            raise PydanticCustomError(
                "too_few_experts",
                "a token goes to {per_token} of {count} experts",
                {"per_token": self.experts.per_token, "count": self.experts.count},
            )
        return self

    @classmethod
    def from_hf_config(
        cls, path: str | Path, *, dtype: Dtype | None = None, longest: int | None = None
    ) -> Self:
        """Read a Hugging Face config.json, or the one in a folder.

        Covers llama, mistral, qwen2, qwen3, and the sizes of mixtral and qwen3_moe. Absent keys
        mean what they mean to transformers, so an absent dtype is float32.

        Args:
            dtype: of parameters, whatever the file says: float16, say.
            longest: tokens of the longest sequence, which a sliding window may be no shorter than;
                without it every window is refused.

        Raises:
            HfConfigError: the file is missing, broken or incomplete.
            UnsupportedConfigError: it asks for a computation that is not supported, or holds an
                unknown key.
        """
        file = hf_config_file(path)
        raw = read_json_object(file)
        if "prelude" in raw:
            raise HfConfigError(
                path=path,
                problem="is a traced module, and this asks for a model of twinstream's own kernels",
            )
        if raw.get("model_type") in EXPERT_MODEL_TYPES:
            fields = read_expert_config(file, raw, longest)
        else:
            fields = read_hf_config(path, dtype, longest)
        try:
            return cls(**fields)
        except ValidationError as error:
            raise HfConfigError(path=path, problem=describe_problems(error)) from None

    @property
    def d_q(self) -> int:
        """Width of all query heads together, also the input width of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of all key heads together; the values are as wide."""
        return self.num_kv_heads * self.head_dim

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
        """Parameters of one block, its two norms included."""
        return layer_parameters(self).total

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model: tied embeddings once, the vocabulary not padded."""
        return self.num_layers * self.num_block_parameters + _outside_layers(self)

    @property
    def parameter_groups(self) -> tuple[str, ...]:
        """Groups of parameters, each one flat tensor, in the order of the forward pass.

        >>> from twinstream.models.presets import load_preset
        >>> load_preset("tiny").parameter_groups[:2]
        ('embedding', '0')
        """
        return ("embedding", *map(str, range(self.num_layers)), "head")

    @property
    def untrained_groups(self) -> tuple[str, ...]:
        """Those of them that are never trained: none."""
        return ()

    def group_layout(self, group: str) -> FlatLayout:
        """How the parameters of a group lie: `embedding`, a layer by its number, or `head`."""
        if group == "embedding":
            return embedding_layout(self)
        return head_layout(self) if group == "head" else block_layout(self)

    @property
    def slices_sequences(self) -> bool:
        """Whether a chunk may be a slice of a sequence."""
        return True

    @property
    def layer_bytes(self) -> int:
        """Of the flat parameters of a layer."""
        return block_layout(self).size_bytes

    def layer_of(self, group: str) -> int | None:
        """The layer whose parameters or adapters a group has; None of embedding and head."""
        return layer_of(group)

    @property
    def usual_fields(self) -> set[str]:
        """Fields of which a document need not tell: they are as all that runs here has them."""
        return {name for name, (usual, _) in RUN_HERE.items() if getattr(self, name) == usual}

    def ref(self) -> ModelRef:
        """What documents say of the model, from which `model_of` makes it again."""
        usual = self.usual_fields
        written = self.model_dump_json(exclude_none=True, exclude=usual)
        digest = hashlib.sha256(written.encode()).hexdigest()[:16]
        fields = self.model_dump(mode="json", exclude_none=True, exclude=usual)
        return ModelRef(name=self.name, content_hash=digest, spec=fields)


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


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding when each of `tp` ranks holds equally many, a multiple of 128.

    Source: Megatron-LM, `_vocab_size_with_padding`, with make_vocab_size_divisible_by 128.

    >>> padded_vocab(50257, 8)
    51200
    """
    multiple = _VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


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


def rank_heads(num_heads: int, tp: int) -> int:
    """Heads of one of `tp` ranks, at least one: key heads fewer than ranks are replicated.

    >>> [rank_heads(8, tp) for tp in (1, 4, 16)]
    [8, 2, 1]
    """
    return -(-num_heads // tp)


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
        d_q = rank_heads(shape.num_heads, self.tp) * shape.head_dim
        d_qkv = d_q + 2 * rank_heads(shape.num_kv_heads, self.tp) * shape.head_dim
        matrices = (d_qkv + d_q) * shape.d_model
        qkv_bias = d_qkv if shape.biases or shape.qkv_bias else 0
        output_bias = shape.d_model if shape.biases else 0
        head_norms = 2 * shape.head_dim if shape.qk_norm else 0
        return norm_parameters(shape) + matrices + qkv_bias + output_bias + head_norms

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
        return norm_parameters(self.shape) + self.shape.experts.count * self.shape.d_model

    def experts(self) -> int:
        experts = self.shape.experts
        if experts is None:
            return 0
        routed = -(-experts.count // self.ep) * self.mlp(experts.d_ff, self.etp)
        return routed + self.mlp(experts.shared_d_ff, self.tp)

    def vocab_matrix(self) -> int:
        return padded_vocab(self.shape.vocab_size, self.tp) // self.tp * self.shape.d_model
