"""The sizes of a decoder, and the parameters that a layer and a rank have of it."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.models.decoders.config import Dtype
from twinstream.models.layout import padded_vocab, rank_heads
from twinstream.models.options import (
    Depth,
    Experts,
    LatentAttention,
    PositiveFinite,
    RopeScaling,
    SlidingWindow,
    Width,
)
from twinstream.schedule.node import Node

ITEMSIZE_BYTES = {"bfloat16": 2, "float32": 4}

ParameterPart = Literal[
    "attention", "mlp", "router", "experts", "embedding", "positions", "final_norm", "head"
]


class DecoderFields(Node):
    """The fields of a `ModelSpec`, which says what they mean, and widths that follow from them."""

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
    window: SlidingWindow | None = None
    sinks: bool = False

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


def layer_parameters(shape: DecoderFields) -> LayerParameters:
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


def norm_parameters(shape: DecoderFields) -> int:
    """Of one norm over the width of the model: a weight and, of a LayerNorm with biases, a bias."""
    return shape.d_model * (2 if shape.norm == "layer" and shape.biases else 1)


def rank_parameters(
    shape: DecoderFields, tp: int, ep: int, part: ParameterPart, etp: int | None = None
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


def outside_parameters(shape: DecoderFields) -> int:
    """Of the whole model outside its layers: embedding, head, positions and the final norm."""
    vocab_matrices = 1 if shape.tied_embeddings else 2
    rows = vocab_matrices * shape.vocab_size + shape.max_positions
    return rows * shape.d_model + norm_parameters(shape)


class _Split(NamedTuple):
    """Counts of what one rank holds of the parts of a layer."""

    shape: DecoderFields
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
