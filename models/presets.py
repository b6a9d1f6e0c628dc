"""Models by name: the tables of presets/*.toml, or a path to a Hugging Face config.json."""

import os
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from twinstream.models.executable import executor_refusal
from twinstream.models.hf.config import (
    TRAINED_AS,
    Dtype,
    HfConfigError,
    codes_of,
    hf_config_file,
    is_own_config,
    stated_dtype,
    unread_keys,
)
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError, did_you_mean, require

_OF_HUGGING_FACE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PRESETS = Path(__file__).parent / "presets"


class UnknownModelError(TwinstreamError):
    """No preset has this name."""

    def __init__(self, *, name: str, known: tuple[str, ...]) -> None:
        self.name, self.known = name, known
        if _OF_HUGGING_FACE.fullmatch(name):
            super().__init__(
                f"there is no folder {name}. For the model of that name on Hugging Face: "
                f"hf download {name} --local-dir {name.split('/')[1]}, then give that folder; its "
                "config.json alone does to plan."
            )
            return
        hint = did_you_mean(name, known)
        meant = f": {hint}" if hint else "."
        super().__init__(
            f"unknown model '{name}'{meant} The presets are {', '.join(known)}; for another model "
            "give the path of a Hugging Face config.json or of a folder that holds one."
        )


def preset_names() -> tuple[str, ...]:
    """Names of the presets, sorted; aliases are not among them."""
    return tuple(sorted(_tables()))


def executable_presets() -> tuple[str, ...]:
    """Names of the presets that our kernels run, sorted."""
    return tuple(name for name in preset_names() if executor_refusal(load_preset(name)) is None)


def preset_aliases() -> Mapping[str, str]:
    """Other names of presets, and the preset that each is.

    >>> preset_aliases()["llama3-8b"]
    '8b'
    """
    return {alias: name for name, table in _tables().items() for alias in table.get("aliases", ())}


def preset_source(name: str) -> str:
    """Where the sizes of a preset are from.

    >>> preset_source("mixtral-8x7b")
    'mistralai/Mixtral-8x7B-v0.1 config.json'
    """
    return str(_tables()[name]["source"])


def load_preset(name: str) -> ModelSpec:
    """Load a preset by its name or an alias.

    Raises:
        UnknownModelError: no preset has this name.

    >>> load_preset("8b").d_kv
    1024
    """
    tables = _tables()
    own = preset_aliases().get(name, name)
    if own not in tables:
        raise UnknownModelError(name=name, known=tuple(sorted({*tables, *preset_aliases()})))
    return ModelSpec.model_validate({"name": own} | _fields(own, tables))


def load_model(
    name_or_path: str | Path | ModelSpec, *, dtype: Dtype | None = None, longest: int | None = None
) -> ModelSpec:
    """Load a preset by name, or a Hugging Face config.json by its path or its folder's path.

    A ModelSpec is itself. A preset's name wins over a folder of the same name; write `./8b` or pass
    a Path for the folder.

    Args:
        dtype: of parameters, whatever the model's own is.
        longest: tokens of the longest sequence: a sliding window that it does not exceed is full
            attention. Without it every window is refused.

    Raises:
        UnknownModelError: neither a preset nor an existing path.
        HfConfigError: the config.json cannot be read, or asks for what is not supported.
    """
    require("model", name_or_path, str, Path, ModelSpec)
    if isinstance(name_or_path, ModelSpec):
        return name_or_path.model_copy(update={"dtype": dtype or name_or_path.dtype})
    path = Path(name_or_path)
    is_file = path.suffix == ".json" or os.path.exists(path)  # noqa: PTH110 - false of too long a name
    if is_file and not is_preset(name_or_path):
        return ModelSpec.from_hf_config(path, dtype=dtype, longest=longest)
    return load_model(load_preset(str(name_or_path)), dtype=dtype)


def is_preset(name_or_path: str | Path) -> bool:
    """Whether a preset has this name, as its own or as an alias."""
    known = {*preset_names(), *preset_aliases()}
    return isinstance(name_or_path, str) and name_or_path in known


def model_notes(name_or_path: str | Path, dtype: str | None) -> list[str]:
    """What to know of a config.json, a line each: what its weights are stored in, if they are
    rounded, that it leaves its dtype open, unread keys.

    Args:
        dtype: the one asked for, if any.

    Raises:
        QuantizedConfigError: its weights are stored in codes that are not read.
    """
    if is_preset(name_or_path):
        return []
    file = hf_config_file(name_or_path)
    try:
        stated = stated_dtype(file)
    except HfConfigError:
        return []
    trained = dtype or TRAINED_AS.get(str(stated), "float32")
    notes = []
    if (codes := codes_of(file)) is not None:
        notes.append(
            f"{name_or_path} stores matrices in {codes.what}: they are read as the values that "
            f"the codes stand for, and computed with in {trained}."
        )
    if stated == "float16" and trained == "bfloat16":
        notes.append(
            f"{name_or_path} is in float16, in which nothing is trained here: its weights are "
            "rounded to bfloat16. --dtype float32 keeps them."
        )
    elif stated is not None and stated not in TRAINED_AS and dtype is None:
        notes.append(
            f"{name_or_path} states {stated:.40}, in which nothing is trained here: float32 is "
            "taken."
        )
    if not is_own_config(name_or_path):
        return notes
    if dtype is None and stated is None:
        notes.append(
            f"{name_or_path} states no dtype, so float32 is taken, as transformers does. Most "
            "train in bfloat16, which is several times faster on a GPU: --dtype bfloat16."
        )
    if unread := unread_keys(name_or_path):
        notes.append(
            f"{name_or_path}: not read, since nothing follows from it: {', '.join(unread)}."
        )
    return notes


@cache
def _tables() -> Mapping[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(_PRESETS.glob("*.toml")):
        found |= tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def _fields(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What a table says of the model, over what its base says."""
    own = {key: value for key, value in tables[name].items() if key not in ("source", "aliases")}
    base = own.pop("base", None)
    return own if base is None else _fields(base, tables) | own
