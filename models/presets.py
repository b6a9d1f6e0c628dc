"""Models by name: the TOML files in presets/, or a path to a Hugging Face config.json."""

import os
import re
import tomllib
from pathlib import Path

from twinstream.models.hf_config import states_dtype
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


def load_model(name_or_path: str | Path | ModelSpec) -> ModelSpec:
    """Load a preset by name, or a Hugging Face config.json by its path or its folder's path.

    A ModelSpec is itself. A preset's name wins over a folder of the same name; write `./8b` or pass
    a Path for the folder.

    Raises:
        UnknownModelError: neither a preset nor an existing path.
        HfConfigError: the config.json cannot be read, or asks for what is not supported.
    """
    require("model", name_or_path, str, Path, ModelSpec)
    if isinstance(name_or_path, ModelSpec):
        return name_or_path
    if isinstance(name_or_path, str) and name_or_path in preset_names():
        return load_preset(name_or_path)
    path = Path(name_or_path)
    if path.suffix == ".json" or os.path.exists(path):  # noqa: PTH110 - false of too long a name
        return ModelSpec.from_hf_config(path)
    raise UnknownModelError(name=str(name_or_path), known=preset_names())


def dtype_note(name_or_path: str | Path, spec: ModelSpec) -> str | None:
    """That a config.json leaves its dtype open, what is taken, and how to choose; None otherwise.

    Args:
        spec: what it was loaded as.
    """
    if isinstance(name_or_path, str) and name_or_path in preset_names():
        return None
    if states_dtype(name_or_path):
        return None
    return (
        f"{name_or_path} states no dtype, so {spec.dtype} is taken, as transformers does. Most "
        "train in bfloat16, which is several times faster on a GPU: --dtype bfloat16."
    )
