"""Models by name: the TOML files in presets/, or a path to a Hugging Face config.json."""

import os
import tomllib
from pathlib import Path

from twinstream.models.hf_config import Dtype, states_dtype, unread_keys
from twinstream.models.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError, did_you_mean, require

_PRESETS = Path(__file__).parent / "presets"


class UnknownModelError(TwinstreamError):
    """No preset has this name."""

    def __init__(self, *, name: str, known: tuple[str, ...]) -> None:
        self.name, self.known = name, known
        hint = did_you_mean(name, known)
        meant = f": {hint}" if hint else "."
        super().__init__(
            f"unknown model '{name}'{meant} The presets are {', '.join(known)}; for another model "
            "give the path of a Hugging Face config.json or of a folder that holds one."
        )


def preset_names() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


def load_preset(name: str) -> ModelSpec:
    """Load a preset.

    Raises:
        UnknownModelError: no preset has this name.

    >>> load_preset("8b").d_kv
    1024
    """
    known = preset_names()
    if name not in known:
        raise UnknownModelError(name=name, known=known)
    text = (_PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    return ModelSpec.model_validate(tomllib.loads(text))


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
    if isinstance(name_or_path, str) and name_or_path in preset_names():
        name_or_path = load_preset(name_or_path)
    if isinstance(name_or_path, ModelSpec):
        return name_or_path.model_copy(update={"dtype": dtype or name_or_path.dtype})
    path = Path(name_or_path)
    if path.suffix == ".json" or os.path.exists(path):  # noqa: PTH110 - false of too long a name
        return ModelSpec.from_hf_config(path, dtype=dtype, longest=longest)
    raise UnknownModelError(name=str(name_or_path), known=preset_names())


def model_notes(name_or_path: str | Path, dtype: str | None) -> list[str]:
    """What to know of a config.json, a line each: that it leaves its dtype open, unread keys.

    Args:
        dtype: the one asked for, if any.
    """
    if isinstance(name_or_path, str) and name_or_path in preset_names():
        return []
    notes = []
    if dtype is None and not states_dtype(name_or_path):
        notes.append(
            f"{name_or_path} states no dtype, so float32 is taken, as transformers does. Most "
            "train in bfloat16, which is several times faster on a GPU: --dtype bfloat16."
        )
    if unread := unread_keys(name_or_path):
        notes.append(
            f"{name_or_path}: not read, since nothing follows from it: {', '.join(unread)}."
        )
    return notes
