"""A model as a chain of layers: from a TOML or JSON file, or one of those that have a name."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from twinstream.models.layered.kinds import LOOKED_UP, AnyLayer, LayerPart
from twinstream.schedule.errors import TwinstreamError, did_you_mean
from twinstream.schedule.files import parse_toml, read_text, reason_of
from twinstream.schedule.node import Node

_PRESETS = Path(__file__).parent / "presets.toml"
Dtype = Literal["float32", "float16", "bfloat16"]
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class LayeredModelError(TwinstreamError):
    """No layered model is of this name, or a file does not describe one."""


class LayeredChain(NamedTuple):
    """The parts of a model: what is looked up, the others in order, and which first reads it."""

    embeddings: tuple[LayerPart, ...]
    parts: tuple[LayerPart, ...]
    join: int


class LayeredModel(Node):
    """Layers in the order of the forward pass; those that look something up come first.

    `dtype` is of dense parameters and activations, `table_dtype` of what is looked up. `products`:
    float32 may be multiplied in TF32, at half the rate of 16 bits.
    """

    name: str = "model"
    source: str = ""
    dtype: Dtype = "bfloat16"
    table_dtype: Dtype | None = None
    products: Literal["own", "tf32"] = "own"
    layers: Annotated[tuple[AnyLayer, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _chain_is_one(self) -> Self:
        looked_up = [isinstance(layer, LOOKED_UP) for layer in self.layers]
        if sorted(looked_up, reverse=True) != looked_up:
            raise PydanticCustomError("order", "tables, tokens and patches come first")
        if all(looked_up):
            raise PydanticCustomError("order", "there is no layer after what is looked up")
        if sum(layer.joins for layer in self.layers) > 1:
            raise PydanticCustomError("joins", "one layer at most joins what is looked up")
        if self.products == "tf32" and self.dtype != "float32":
            raise PydanticCustomError("products", f"tf32 multiplies float32, not {self.dtype}")
        return self

    @property
    def itemsize(self) -> int:
        """Bytes of a dense parameter, and of an element of activations."""
        return _ITEMSIZE[self.dtype]

    @property
    def table_itemsize(self) -> int:
        """Bytes of an element of what is looked up."""
        return _ITEMSIZE[self.table_dtype or self.dtype]

    @property
    def chain(self) -> LayeredChain:
        """Its parts, in the order of the forward pass."""
        embeddings: list[LayerPart] = []
        parts: list[LayerPart] = []
        join = 0
        for layer in self.layers:
            if isinstance(layer, LOOKED_UP):
                embeddings += layer.parts()
                continue
            if layer.joins:
                join = len(parts)
            parts += layer.parts()
        return LayeredChain(tuple(embeddings), tuple(parts), join)

    @property
    def parameters(self) -> int:
        """All of them, every expert's included."""
        return sum(part.parameters for part in (*self.chain.embeddings, *self.chain.parts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its layers and their classes, by which a strategy may speak of them."""
        chain = self.chain
        parts = (*chain.embeddings, *chain.parts)
        return tuple(dict.fromkeys((*(p.layer for p in parts), *(p.kind for p in parts))))


def layered_names() -> tuple[str, ...]:
    """Names of the layered models that come with the package, sorted."""
    return tuple(sorted(_presets()))


def load_layered(name_or_path: str | Path | LayeredModel) -> LayeredModel:
    """Return the layered model of a name, or of a TOML or JSON file; a model is itself.

    Raises:
        LayeredModelError: there is none, or its description is wrong.
    """
    if isinstance(name_or_path, LayeredModel):
        return name_or_path
    name, path = str(name_or_path), Path(name_or_path)
    if name in _presets():
        return _made({"name": name, **_presets()[name]}, name)
    if path.suffix not in (".toml", ".json"):
        hint = did_you_mean(name, layered_names()) or f"known: {', '.join(layered_names())}"
        raise LayeredModelError(
            f"unknown layered model '{name}': {hint}; or give a TOML or JSON file with its layers, "
            "or --seq-len with a decoder"
        )
    return _made({"name": path.stem, **_read(path)}, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
        found = parse_toml(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise LayeredModelError(f"cannot read the model {path}: {reason_of(error)}") from None
    if not isinstance(found, dict):
        raise LayeredModelError(f"{path} has no table of a model, but {type(found).__name__}")
    return found


def _made(document: dict[str, Any], source: str) -> LayeredModel:
    try:
        return LayeredModel.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"]) or "model"
        raise LayeredModelError(f"{source}: {place}: {first['msg']}") from None


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_PRESETS.read_text(encoding="utf-8"))
