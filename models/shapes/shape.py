"""A transformer by its sizes: what prices, memory and traffic follow from, and nothing to run."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.models.spec import ModelSpec
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount

Width = Annotated[int, Field(gt=0, le=2**22)]


class Experts(Node):
    """The routed experts of every layer's feed-forward network.

    `d_ff` is one expert's width, `per_token` how many a token goes to; `shared_d_ff` the width of
    one that all tokens go to, 0 without one.
    """

    count: PositiveCount
    per_token: PositiveCount
    d_ff: Width
    shared_d_ff: Annotated[int, Field(ge=0, le=2**22)] = 0


class ModelShape(Node):
    """Sizes of a decoder-only transformer.

    `mlp`: gated ones (swiglu, geglu) have three matrices, gelu and squared_relu two. `positions`:
    learned ones are `max_positions` rows of width d_model. `biases`: of all linear layers and
    norms, as GPT-3 has. `dropout`: masks of one byte an element are kept for the backward pass.
    With `experts` their widths count and `d_ff` does not.
    """

    name: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(gt=0, le=2**16)]
    d_model: Width
    num_heads: Width
    num_kv_heads: Width
    head_dim: Width
    d_ff: Width
    vocab_size: Annotated[int, Field(gt=0, le=2**26)]
    mlp: Literal["swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rope", "learned"] = "rope"
    max_positions: Annotated[int, Field(ge=0, le=2**26)] = 0
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: bool = False
    tied_embeddings: bool = False
    experts: Experts | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise PydanticCustomError(
                "heads_not_divisible",
                "num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}",
                {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads},
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
    def of(cls, spec: ModelSpec) -> Self:
        """The shape of a model that twinstream also runs."""
        same = ("name", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff",
                "vocab_size", "qkv_bias", "qk_norm", "tied_embeddings")  # fmt: skip
        return cls(**{field: getattr(spec, field) for field in same})

    @property
    def d_q(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of all key heads together; the values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward network has a gate."""
        return self.mlp in ("swiglu", "geglu")
