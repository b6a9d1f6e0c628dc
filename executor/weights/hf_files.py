"""The files of a Hugging Face folder that hold its weights."""

import json
from pathlib import Path

from twinstream.executor.weights.errors import WeightsError, some_of
from twinstream.schedule.files import read_text, reason_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights under the names that transformers looks for."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def weight_map(folder: Path) -> dict[str, str] | None:
    """Return which file has which tensor, by the index; None where one file holds all.

    Where there are both, transformers takes the one file, and so does this.

    Raises:
        WeightsError: there are no safetensors, or the index is broken.
    """
    try:
        if (folder / SINGLE).exists():
            return None
        if not (folder / INDEX).exists():
            raise WeightsError(folder, _nothing_there(folder))
        return _read_index(folder / INDEX)
    except OSError as error:
        raise WeightsError(folder, f"cannot be read: {reason_of(error)}") from None


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(read_text(path, "utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"is not valid JSON ({error}); fetch it again") from None
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise WeightsError(
            path, "has no 'weight_map', which says which file has which tensor; fetch it again"
        )
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(
                path, f"weight_map names {file!r:.80} for {name}; it needs a file of this folder"
            )
    return found


def _nothing_there(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder; give the one with config.json and model.safetensors"
    names = sorted(entry.name for entry in folder.iterdir())
    needed = f"has neither {SINGLE} nor {INDEX}"
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f"{needed}, only {some_of(shards)}; fetch what is missing, or save the model again"
    if pickles := [name for name in names if Path(name).suffix in _PICKLES]:
        return (
            f"{needed}, only {some_of(pickles)}: pickles, which run code when they are read, and "
            "are refused. If you trust them, convert them once: AutoModelForCausalLM"
            f".from_pretrained({str(folder)!r}).save_pretrained(...) of transformers"
        )
    return f"{needed}; there is {some_of(names) or 'nothing'}. Fetch the weights"
