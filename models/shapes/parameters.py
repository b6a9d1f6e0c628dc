"""How many parameters a model of a shape has, part by part, and how many of them one rank holds."""

from typing import Literal, NamedTuple

from twinstream.models.shapes.shape import ModelShape

_VOCAB_MULTIPLE = 128  # of the rows of the embedding that a rank holds; Megatron-LM's default

ParameterPart = Literal[
    "attention", "mlp", "router", "experts", "embedding", "positions", "final_norm", "head"
]


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


def layer_parameters(shape: ModelShape) -> LayerParameters:
    """Parameters of one layer of a model.

    >>> from twinstream.models.presets import load_preset
    >>> spec = load_preset("8b")
    >>> layer_parameters(ModelShape.of(spec)).total == spec.num_block_parameters
    True
    """
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


def num_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model: tied embeddings once, the vocabulary not padded.

    >>> from twinstream.models.presets import load_preset
    >>> num_parameters(ModelShape.of(load_preset("8b")))
    8030261248
    """
    return shape.num_layers * layer_parameters(shape).total + _outside_layers(shape)


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes through: of the routed experts only its own.

    Embedding and head count whole, as the published numbers of active parameters do.
    """
    per_token = shape.experts.per_token if shape.experts else 0
    return shape.num_layers * layer_parameters(shape).active(per_token) + _outside_layers(shape)


def norm_parameters(shape: ModelShape) -> int:
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
    shape: ModelShape, tp: int, ep: int, part: ParameterPart, etp: int | None = None
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


def _outside_layers(shape: ModelShape) -> int:
    vocab_matrices = 1 if shape.tied_embeddings else 2
    rows = vocab_matrices * shape.vocab_size + shape.max_positions
    return rows * shape.d_model + norm_parameters(shape)


class _Split(NamedTuple):
    """Counts of what one rank holds of the parts of a layer."""

    shape: ModelShape
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
