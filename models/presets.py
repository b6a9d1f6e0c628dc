"""Models by name: the tables of presets/*.toml, or a path to a Hugging Face config.json."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from twinstream.models.decoders.config import (
    TRAINED_AS,
    Dtype,
    HfConfigError,
    codes_of,
    hf_config_file,
    is_own_config,
    is_priced_config,
    stated_dtype,
    unread_keys,
)
from twinstream.models.decoders.spec import ModelSpec
from twinstream.schedule.errors import TwinstreamError, require

_OF_HUGGING_FACE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PRESETS = Path(__file__).parent / "presets"
_MOST_NEAR = 3
_ABOUT = ("source", "aliases", "hub")


class UnknownModelError(TwinstreamError):
    """No preset has this name."""

    def __init__(self, *, name: str, known: tuple[str, ...]) -> None:
        self.name, self.known = name, known
        folder = name.split("/")[-1]
        if (traced := _traced_of(name)) is not None and traced in known:
            super().__init__(
                f"'{name}' is not priced for clusters: its layers ({_traced()[traced]['why']}) are "
                "traced from transformers' own code, which plan --machine, fit, whatif and train "
                "do."
            )
            return
        if _OF_HUGGING_FACE.fullmatch(name):
            super().__init__(
                f"there is no folder {name}. For the model of that name on Hugging Face: "
                f"hf download {name} --local-dir {folder}, then give that folder; its "
                "config.json alone does to plan."
            )
            return
        near = _nearest(name, known)
        hint = f": did you mean {' or '.join(repr(one) for one in near)}?" if near else "."
        super().__init__(
            f"unknown model '{name}'{hint} `twinstream models` lists the {len(preset_names())} "
            "presets; for another model give the path of a Hugging Face config.json or of a folder "
            "that holds one."
        )


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """A few names that were probably meant, those of the hub's models first."""
    close = difflib.get_close_matches(name.lower(), list(known), n=8, cutoff=0.6)
    of_hub = {one for one, table in _tables().items() if "hub" in table}
    begin = [one for one in known if len(name) > 2 and one.startswith(name.lower())]
    ranked = list(dict.fromkeys([*begin[:_MOST_NEAR], *close]))
    return sorted(ranked[:_MOST_NEAR], key=lambda one: one not in of_hub)


def preset_names() -> tuple[str, ...]:
    """Names of the presets, sorted; aliases are not among them."""
    return tuple(sorted(_tables()))


def executable_presets() -> tuple[str, ...]:
    """Names of the presets that our kernels run, sorted."""
    return tuple(name for name in preset_names() if load_preset(name).executor_refusal is None)


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


def preset_of(name: str) -> str | None:
    """The preset that a name is of: its own, an alias or the hub's, in any case; None of no preset.

    >>> preset_of("Qwen/Qwen3-8B"), preset_of("Qwen3-8B"), preset_of("llama-3.1-8b")
    ('qwen3-8b', 'qwen3-8b', 'llama3.1-8b')
    """
    own = preset_aliases().get(name, name)
    return own if own in _tables() else _plain_names().get(_plain(name))


def load_preset(name: str) -> ModelSpec:
    """Load a preset by its name, an alias, or its name on the hub.

    Raises:
        UnknownModelError: no preset has this name.

    >>> load_preset("8b").d_kv
    1024
    """
    tables = _tables()
    own = preset_of(name)
    if own is None:
        known = {*tables, *preset_aliases(), *_traced()}
        raise UnknownModelError(name=name, known=tuple(sorted(known)))
    return ModelSpec.model_validate({"name": own} | _fields(own, tables))


def load_model(
    name_or_path: str | Path | ModelSpec, *, dtype: Dtype | None = None, longest: int | None = None
) -> ModelSpec:
    """Load a preset by name, or a Hugging Face config.json by its path or its folder's path.

    A ModelSpec is itself. Of the same name a folder wins over a model of the hub, and a preset that
    is on no hub over a folder; write `./8b` or pass a Path for the folder.

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
    if (shipped := config_of(name_or_path)) != name_or_path and is_priced_config(shipped):
        name_or_path = shipped
    path = Path(name_or_path)
    is_file = path.suffix == ".json" or os.path.exists(path)  # noqa: PTH110 - false of too long a name
    if is_file and not is_preset(name_or_path):
        return ModelSpec.from_hf_config(path, dtype=dtype, longest=longest)
    return load_model(load_preset(str(name_or_path)), dtype=dtype)


def is_preset(name_or_path: str | Path) -> bool:
    """Whether a preset is meant: by its own name or an alias, or by the hub's and no folder is
    there."""
    if not isinstance(name_or_path, str) or (own := preset_of(name_or_path)) is None:
        return False
    is_named = name_or_path in {own, *_tables()[own].get("aliases", ())}
    if is_named and "hub" not in _tables()[own]:
        return True
    return not Path(name_or_path).exists()


def traced_presets() -> Mapping[str, int]:
    """Models of the hub that transformers' own code computes here, and their parameters.

    >>> traced_presets()["gpt-oss-20b"]
    20914757184
    """
    return {name: int(table["parameters"]) for name, table in _traced().items()}


def config_of(model: str | Path) -> str | Path:
    """The shipped config.json of a traced preset's name, its own or the hub's, where no file has
    that name; everything else as it is.

    >>> Path(config_of("google/gemma-3-4b-it")).parent.name, config_of("8b")
    ('gemma-3-4b', '8b')
    """
    if not isinstance(model, str) or os.path.exists(model):  # noqa: PTH110 - false of too long a name
        return model
    own = _traced_of(model)
    return model if own is None else _PRESETS / "traced" / own / "config.json"


def require_weights(name: str | Path) -> None:
    """Refuse a name of the hub where its weights are meant, of which a preset has none.

    Raises:
        UnknownModelError: says how they are fetched.
    """
    if not isinstance(name, str) or name in _traced():
        return
    own = preset_of(name) if is_preset(name) else None
    if own is not None and name in {own, *_tables()[own].get("aliases", ())}:
        return
    if (hub := _hub_of(str(name))) is not None:
        raise UnknownModelError(name=hub, known=preset_names())


def folder_of(name: str) -> str:
    """The folder that a command trains: of a model of the hub its own name there.

    >>> folder_of("qwen3-8b"), folder_of("gemma-3-4b"), folder_of("8b")
    ('Qwen3-8B', 'gemma-3-4b-it', '8b')
    """
    hub = _hub_of(name)
    return name if hub is None else hub.split("/")[1]


def download_of(name: str) -> str | None:
    """The command that fetches the weights of a preset of the hub; None of others."""
    hub = _hub_of(name)
    return None if hub is None else f"hf download {hub} --local-dir {folder_of(name)}"


def _hub_of(name: str) -> str | None:
    own, table = (preset_of(name) if is_preset(name) else None), _tables()
    if own is None and config_of(name) != name:
        own, table = _traced_of(name), _traced()
    hub = table[own].get("hub", ()) if own is not None else ()
    return next((one for one in hub if _is_of(name, one)), hub[0] if hub else None)


def _traced_of(name: str) -> str | None:
    """The traced preset of a name, in any case."""
    for own, table in _traced().items():
        if _plain(name) == _plain(own) or any(_is_of(name, hub) for hub in table["hub"]):
            return own
    return None


def _is_of(name: str, hub: str) -> bool:
    return _plain(name) in (_plain(hub), _plain(hub.split("/")[1]))


def model_notes(name_or_path: str | Path, dtype: str | None) -> list[str]:
    """What to know of a config.json, a line each: what its weights are stored in, if they are
    rounded, that it leaves its dtype open, unread keys.

    Args:
        dtype: the one asked for, if any.

    Raises:
        QuantizedConfigError: its weights are stored in codes that are not read.
    """
    if is_preset(name_or_path) or config_of(name_or_path) != name_or_path:
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


def _plain(name: str) -> str:
    """As names are compared: the hub and people write Qwen3-8B, qwen3-8b, Llama-3.1 or llama3.1."""
    return re.sub("[-_]", "", name.lower())


@cache
def _plain_names() -> Mapping[str, str]:
    """Presets by all names that they have, as they are compared."""
    found: dict[str, str] = {}
    for name, table in _tables().items():
        hub = table.get("hub", ())
        for one in (name, *table.get("aliases", ()), *hub, *(full.split("/")[1] for full in hub)):
            found[_plain(one)] = name
    return found


@cache
def _traced() -> Mapping[str, dict[str, Any]]:
    return tomllib.loads((_PRESETS / "traced" / "index.toml").read_text(encoding="utf-8"))


@cache
def _tables() -> Mapping[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(_PRESETS.glob("*.toml")):
        found |= tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def _fields(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What a table says of the model, over what its base says."""
    own = {key: value for key, value in tables[name].items() if key not in _ABOUT}
    base = own.pop("base", None)
    return own if base is None else _fields(base, tables) | own
