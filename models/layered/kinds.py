"""Kinds of layers, and what a sample costs in each part of one: parameters, products, lookups."""

from math import ceil
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeInt, model_validator
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount, PositiveSize

LayerClass = Literal["embedding", "dense", "experts", "transformer"]
CLASSES: tuple[LayerClass, ...] = ("embedding", "dense", "experts", "transformer")


class Product(NamedTuple):
    """Of a sample: [rows, depth] x [depth, columns]; the second is a weight, or a sample's too."""

    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth


class Attention(NamedTuple):
    """Scores and values of a sample's tokens among each other; causal ones are half of them."""

    tokens: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> int:
        pairs = self.tokens**2
        return 4 * self.heads * self.head_dim * (pairs // 2 if self.causal else pairs)


class LayerPart(NamedTuple):
    """A part of a layer that is computed, gathered and reduced as one; amounts are of a sample.

    `parameters` are all of it, `experts` copies included. `reduces` and `reduces_back`: where it is
    split over tensor parallel ranks, its output (in backward, its input's gradient) is summed
    over them. `outputs`, `saved` and `moved` are elements: what it hands on, what backward reads of
    it, and what passes memory beside the products. `looked_up` are elements of rows that are read,
    of `row` elements each, `pooled` those that are left of them.
    """

    layer: str
    kind: LayerClass
    parameters: int
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    outputs: int = 0
    saved: int = 0
    moved: int = 0
    reduces: bool = False
    reduces_back: bool = False
    experts: int = 1
    active: int = 1
    looked_up: int = 0
    pooled: int = 0
    rows: int = 0
    row: int = 0
    sparse: bool = False

    @property
    def flops(self) -> int:
        """Of a sample in the forward pass, scores of attention included."""
        scores = self.attention.flops if self.attention else 0
        return sum(product.flops for product in self.products) + scores


class Layer(Node):
    """One kind of layer; `name` is by what strategies and frozen parts call it, else its kind.

    `joins`: it reads what was looked up; by default the layer after the tables does.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    joins: bool = False

    @property
    def called(self) -> str:
        return self.name or str(vars(self)["kind"])

    def parts(self) -> tuple[LayerPart, ...]:
        """Its parts, in the order of the forward pass."""
        raise NotImplementedError

    def blocks(self) -> tuple[tuple[LayerPart, ...], ...]:
        """Parts that one device computes as one task."""
        return tuple((part,) for part in self.parts())


class Tables(Layer):
    """Embedding tables of categories: each sample looks up some rows of each and sums them."""

    kind: Literal["tables"]
    tables: PositiveCount
    rows: PositiveSize
    width: PositiveCount
    lookups: PositiveCount
    pooling: Literal["sum", "none"] = "sum"

    def parts(self) -> tuple[LayerPart, ...]:
        looked_up = self.tables * self.lookups * self.width
        pooled = self.tables * self.width if self.pooling == "sum" else looked_up
        return (
            LayerPart(
                self.called, "embedding", self.tables * self.rows * self.width, outputs=pooled,
                saved=self.tables * self.lookups, looked_up=looked_up, pooled=pooled,
                rows=self.tables * self.rows, row=self.width, sparse=True,
            ),
        )  # fmt: skip

    def fed(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what each sample has for it."""
        return (self.tables, self.lookups), "int64"


class Tokens(Layer):
    """A table of words, and one of positions beside it unless there are none.

    `tied`: the rows of words are the parameters of a later layer, and counted there.
    """

    kind: Literal["tokens"]
    vocab: PositiveCount
    width: PositiveCount
    seq_len: PositiveCount
    positions: bool = True
    tied: bool = False

    def parts(self) -> tuple[LayerPart, ...]:
        out = self.seq_len * self.width
        rows = self.vocab + (self.seq_len if self.positions else 0)
        own = rows - (self.vocab if self.tied else 0)
        return (
            LayerPart(
                self.called, "embedding", own * self.width, outputs=out, pooled=out, rows=rows,
                looked_up=out * (1 + self.positions), row=self.width,
            ),
        )  # fmt: skip

    def fed(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what each sample has for it."""
        return (self.seq_len,), "int64"


class Patches(Layer):
    """An image cut into squares, each multiplied by one matrix, and a position for each."""

    kind: Literal["patches"]
    image: PositiveCount
    patch: PositiveCount
    width: PositiveCount
    channels: PositiveCount = 3

    @property
    def number(self) -> int:
        return ceil(self.image / self.patch) ** 2

    def parts(self) -> tuple[LayerPart, ...]:
        inner, out = self.patch**2 * self.channels, self.number * self.width
        return (
            LayerPart(
                self.called, "embedding", (inner + self.number) * self.width,
                (Product(self.number, self.width, inner),), outputs=out,
                saved=self.number * inner, pooled=out, rows=inner + self.number,
                looked_up=2 * out, row=self.width,
            ),
        )  # fmt: skip

    def fed(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what each sample has for it."""
        return (self.channels, self.image, self.image), "float32"


class Mlp(Layer):
    """Dense layers from width to width, `repeat` times over; two by two split over tp ranks.

    `rows` of a sample pass them, as each token of a sequence does.
    """

    kind: Literal["mlp"]
    widths: Annotated[tuple[PositiveCount, ...], Field(strict=False, min_length=2)]
    repeat: PositiveCount = 1
    rows: PositiveCount = 1

    @model_validator(mode="after")
    def _repeats_fit(self) -> Self:
        if self.repeat > 1 and self.widths[0] != self.widths[-1]:
            raise PydanticCustomError(
                "repeat", f"repeat needs equal widths at both ends, got {list(self.widths)}"
            )
        return self

    def parts(self) -> tuple[LayerPart, ...]:
        rows = self.rows
        pairs = list(zip(self.widths, self.widths[1:], strict=False)) * self.repeat
        return tuple(
            LayerPart(
                self.called, "dense", depth * width, (Product(rows, width, depth),),
                outputs=rows * width, saved=rows * depth, moved=2 * rows * width,
                reduces=place % 2 == 1 or place == len(pairs) - 1, reduces_back=place % 2 == 0,
            )
            for place, (depth, width) in enumerate(pairs)
        )  # fmt: skip


class ExpertLayers(Layer):
    """Dense layers of one width, each several times over; a sample passes a few of the copies."""

    kind: Literal["experts"]
    width: PositiveCount
    layers: PositiveCount
    experts: PositiveCount
    active: PositiveCount

    @model_validator(mode="after")
    def _active_are_there(self) -> Self:
        _require_experts(self.active, self.experts)
        return self

    def parts(self) -> tuple[LayerPart, ...]:
        width = self.width
        return tuple(
            LayerPart(
                self.called, "experts", self.experts * width**2,
                (Product(self.active, width, width),), outputs=width, saved=self.active * width,
                moved=2 * self.active * width, reduces=place % 2 == 1,
                reduces_back=place % 2 == 0, experts=self.experts, active=self.active,
            )
            for place in range(self.layers)
        )  # fmt: skip


class Dot(Layer):
    """The products of all vectors of a sample with each other, each pair once."""

    kind: Literal["dot"]
    vectors: PositiveCount
    width: PositiveCount

    def parts(self) -> tuple[LayerPart, ...]:
        pairs, read = self.vectors * (self.vectors - 1) // 2, self.vectors * self.width
        return (
            LayerPart(
                self.called, "dense", 0, (Product(self.vectors, self.vectors, self.width),),
                outputs=pairs, saved=read, moved=self.vectors**2 + pairs,
            ),
        )  # fmt: skip


class Transformer(Layer):
    """Blocks of attention and two (gated: three) dense layers over a sample's tokens.

    `kv_heads` and `head_dim` are heads and width / heads where nothing is said. With `experts` a
    token passes `active` of so many copies of the dense layers, and of `shared` width those that
    all pass.
    """

    kind: Literal["transformer"]
    layers: PositiveCount
    heads: PositiveCount
    width: PositiveCount
    ffn: PositiveCount
    seq_len: PositiveCount
    causal: bool = False
    gated: bool = False
    kv_heads: PositiveCount | None = None
    head_dim: PositiveCount | None = None
    experts: PositiveCount = 1
    active: PositiveCount = 1
    shared: NonNegativeInt = 0

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.head_dim is None and self.width % self.heads:
            raise PydanticCustomError(
                "heads", f"width {self.width} is not divisible by heads {self.heads}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise PydanticCustomError(
                "heads", f"heads {self.heads} are no multiple of kv_heads {self.kv_heads}"
            )
        _require_experts(self.active, self.experts)
        return self

    def parts(self) -> tuple[LayerPart, ...]:
        shared = (self._dense(self.shared, 1, 1),) if self.shared else ()
        return (
            self._attention(), self._dense(self.ffn, self.experts, self.active), *shared
        ) * self.layers  # fmt: skip

    def blocks(self) -> tuple[tuple[LayerPart, ...], ...]:
        """One of each layer."""
        parts, each = self.parts(), 2 + bool(self.shared)
        return tuple(parts[first : first + each] for first in range(0, len(parts), each))

    def _attention(self) -> LayerPart:
        s, w = self.seq_len, self.width
        head_dim = self.head_dim or w // self.heads
        queries = self.heads * head_dim
        into = queries + 2 * (self.kv_heads or self.heads) * head_dim
        scores = Attention(s, self.heads, head_dim, self.causal)
        return LayerPart(
            self.called, "transformer", (into + queries) * w,
            (Product(s, into, w), Product(s, w, queries)), scores, outputs=s * w,
            saved=s * (2 * w + queries + into), moved=s * (2 * w + queries + into), reduces=True,
            reduces_back=True,
        )  # fmt: skip

    def _dense(self, ffn: int, experts: int, active: int) -> LayerPart:
        w, into, rows = self.width, 1 + self.gated, self.seq_len * active
        return LayerPart(
            self.called, "experts" if experts > 1 else "transformer",
            experts * (1 + into) * w * ffn, (Product(rows, into * ffn, w), Product(rows, w, ffn)),
            outputs=self.seq_len * w, saved=rows * (2 * w + (1 + into) * ffn),
            moved=rows * (6 * w + (1 + into) * ffn), reduces=True, reduces_back=True,
            experts=experts, active=active,
        )  # fmt: skip


def _require_experts(active: int, experts: int) -> None:
    if active > experts:
        raise PydanticCustomError(
            "active", f"active {active} are more than there are experts, {experts}"
        )


AnyLayer = Annotated[
    Tables | Tokens | Patches | Mlp | ExpertLayers | Dot | Transformer, Field(discriminator="kind")
]
LOOKED_UP = (Tables, Tokens, Patches)
