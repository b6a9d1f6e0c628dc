"""Shapes by name: the tables of presets/*.toml, twinstream's own presets, or a config.json."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinstream.models.hf_config import hf_config_file, read_json_object
from twinstream.models.presets import load_preset, preset_names
from twinstream.models.shapes.hf_experts import EXPERT_MODEL_TYPES, read_expert_config
from twinstream.models.shapes.shape import ModelShape
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError, did_you_mean, require

_PRESETS = Path(__file__).parent / "presets"


class UnknownShapeError(TwinstreamError):
    """No shape has this name."""

    def __init__(self, *, name: str, known: tuple[str, ...]) -> None:
        self.name, self.known = name, known
        hint = did_you_mean(name, known)
        meant = f": {hint}" if hint else "."
        super().__init__(
            f"unknown model '{name}'{meant} The shapes are {', '.join(known)}; for another model "
            "give the path of a Hugging Face config.json or of a folder that holds one."
        )


def shape_names() -> tuple[str, ...]:
    """Names that `load_shape` knows, sorted: shapes, and the presets of models that also run."""
    return tuple(sorted({*_tables(), *preset_names()}))


def shape_source(name: str) -> str | None:
    """Where the sizes of a shape are from; None of a preset that also runs.

    >>> shape_source("mixtral-8x7b")
    'mistralai/Mixtral-8x7B-v0.1 config.json'
    """
    table = _tables().get(name)
    return None if table is None else str(table["source"])


def load_shape(
    name_or_path: str | Path | ModelShape | ModelSpec, *, longest: int | None = None
) -> ModelShape:
    """Load a shape by name, or from a Hugging Face config.json by its path or its folder's path.

    A shape is itself. A name wins over a folder of the same name; write `./8b` or pass a Path for
    the folder. A config.json may be of what twinstream runs, of mixtral or of qwen3_moe, in any
    dtype.

    Args:
        longest: tokens of the longest sequence: a sliding window that it does not exceed is full
            attention. Without it every window is refused.

    Raises:
        UnknownShapeError: neither a known name nor an existing path.
        HfConfigError: the config.json cannot be read, or asks for what a shape does not have.

    >>> load_shape("llama3-405b").num_kv_heads, load_shape("8b").d_ff
    (8, 14336)
    """
    require("model", name_or_path, str, Path, ModelShape, ModelSpec)
    if isinstance(name_or_path, ModelShape):
        return name_or_path
    if isinstance(name_or_path, ModelSpec):
        return ModelShape.of(name_or_path)
    if isinstance(name_or_path, str):
        tables = _tables()
        if name_or_path in tables:
            return _shape(name_or_path, tables)
        if name_or_path in preset_names():
            return ModelShape.of(load_preset(name_or_path))
    path = Path(name_or_path)
    if path.suffix == ".json" or os.path.exists(path):  # noqa: PTH110 - false of too long a name
        return _from_config(path, longest)
    raise UnknownShapeError(name=str(name_or_path), known=shape_names())


def _from_config(path: Path, longest: int | None) -> ModelShape:
    raw = read_json_object(hf_config_file(path))
    if raw.get("model_type") in EXPERT_MODEL_TYPES:
        return read_expert_config(path, longest)
    return ModelShape.of(ModelSpec.from_hf_config(path, dtype="bfloat16", longest=longest))


def _tables() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(_PRESETS.glob("*.toml")):
        found |= tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def _shape(name: str, tables: Mapping[str, dict[str, Any]]) -> ModelShape:
    fields = _fields(name, tables)
    del fields["source"]
    return ModelShape.model_validate({"name": name} | fields)


def _fields(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What a table says, over what its base says."""
    own = dict(tables[name])
    base = own.pop("base", None)
    return own if base is None else _fields(base, tables) | own
