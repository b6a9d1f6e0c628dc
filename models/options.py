"""Options of a model with numbers of their own: RoPE, latent attention, windows, experts."""

from typing import Annotated, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount, Size

ROPE_SCALING = "rope_scaling."  # prefix of its fields among the attributes of a kernel call

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MOST_LAYERS = 10_000  # a slip beyond: the deepest that are published have some hundred
Depth = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Width = Annotated[int, Field(gt=0, le=2**22)]


class PositionLimit(Node):
    """Tokens of the longest sequence that a model takes, and why: its positions end there."""

    tokens: Size
    why: str


class RopeScaling(Node):
    """Llama 3.1's: frequencies that seldom turn within the original context are divided.

    A frequency that turns at most `low_freq_factor` times within
    `original_max_position_embeddings` tokens is divided by `factor`, one that turns at least
    `high_freq_factor` times stays, and those between are interpolated. Names and meaning are those
    of rope type "llama3" of Hugging Face's config.json.
    """

    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    low_freq_factor: PositiveFinite
    high_freq_factor: PositiveFinite
    original_max_position_embeddings: Annotated[int, Field(gt=0, le=2**53)]

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise PydanticCustomError(
                "rope_factors",
                "low_freq_factor {low} is not below high_freq_factor {high}",
                {"low": self.low_freq_factor, "high": self.high_freq_factor},
            )
        return self


class LatentAttention(Node):
    """Multi-head latent attention: queries, keys and values come from a few columns of each token.

    A token's hidden state is projected to `kv_rank` columns, which have a norm and make the keys
    and values of all heads, and `rope_dim` that are rotated and belong to the keys of all heads;
    to `q_rank` columns, which have a norm and make the queries (0: queries are made directly).
    Heads of queries and keys are `head_dim` of the model wide, `rope_dim` of it rotated; those of
    values `v_dim`. In a config.json: kv_lora_rank, qk_rope_head_dim, q_lora_rank, v_head_dim.

    Source: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    kv_rank: Width
    rope_dim: Width
    v_dim: Width
    q_rank: Annotated[int, Field(ge=0, le=2**22)] = 0


class SlidingWindow(Node):
    """Attention to the last `tokens` tokens only, in all layers but `full_layers`."""

    tokens: PositiveCount
    full_layers: Annotated[tuple[int, ...], Field(strict=False)] = ()

    def doubled_pairs(self, keys: int) -> int:
        """Twice the pairs of a query and a key that it sees, among the first so many tokens.

        >>> SlidingWindow(tokens=4).doubled_pairs(3), SlidingWindow(tokens=4).doubled_pairs(10)
        (9, 64)
        """
        return keys * keys if keys <= self.tokens else self.tokens * (2 * keys - self.tokens)


class Experts(Node):
    """The routed experts of every layer's feed-forward network, and how a router chooses them.

    `d_ff` is one expert's width, `per_token` how many a token goes to; `shared_d_ff` the width of
    one that all tokens go to, 0 without one, whose output `shared_gate` weighs by a sigmoid.

    A router's `scores` are the softmax or the sigmoid of its logits. Those that are highest are
    chosen: with `correction_bias` highest after an untrained bias is added, and only among the
    `groups_per_token` of `num_groups` groups whose two best add up to most. A token's experts count
    by their scores, which `normalized` divides by their sum, times `scale`. (A softmax over the
    chosen logits alone, as gpt-oss has, is the normalized softmax.)

    `dense_layers` have the model's `d_ff` instead. `aux_loss` is what the load-balancing loss
    counts; 0 is none.

    In a config.json `scores` is scoring_func, `normalized` norm_topk_prob, `num_groups` n_group,
    `groups_per_token` topk_group, `scale` routed_scaling_factor, `aux_loss` router_aux_loss_coef.
    """

    count: PositiveCount
    per_token: PositiveCount
    d_ff: Width
    shared_d_ff: Annotated[int, Field(ge=0, le=2**22)] = 0
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    correction_bias: bool = False
    num_groups: PositiveCount = 1
    groups_per_token: PositiveCount = 1
    scale: PositiveFinite = 1.0
    dense_layers: Annotated[tuple[int, ...], Field(strict=False)] = ()
    aux_loss: Annotated[float, Field(ge=0, le=1e3)] = 0.0

    @model_validator(mode="after")
    def _can_choose(self) -> Self:
        if self.per_token > self.count:
            raise PydanticCustomError(
                "too_few_experts",
                "a token goes to {per_token} of {count} experts",
                {"per_token": self.per_token, "count": self.count},
            )
        if self.shared_gate and not self.shared_d_ff:
            raise PydanticCustomError(
                "gate_of_nothing", "shared_gate weighs a shared expert, and shared_d_ff is 0"
            )
        if list(self.dense_layers) != sorted({i for i in self.dense_layers if i >= 0}):
            raise PydanticCustomError(
                "dense_layers", "dense_layers {layers} are no layers, each once and ascending",
                {"layers": str(list(self.dense_layers))},
            )  # fmt: skip
        in_group, rest = divmod(self.count, self.num_groups)
        most = in_group * self.groups_per_token
        if rest or self.groups_per_token > self.num_groups or self.per_token > most:
            raise PydanticCustomError(
                "expert_groups",
                "{count} experts cannot be chosen {per_token} a token from {chosen} of {groups} "
                "groups of equally many",
                {"count": self.count, "per_token": self.per_token,
                 "chosen": self.groups_per_token, "groups": self.num_groups},
            )  # fmt: skip
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_usual(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        document: dict[str, object] = serialize(self)
        fields = type(self).model_fields
        usual = [name for name in document if getattr(self, name) == fields[name].default]
        return {name: document[name] for name in document if name not in usual}
