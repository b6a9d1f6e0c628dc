"""The files of a Hugging Face folder beside its weights: config.json, tokenizer, generation."""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinstream.executor.weights.errors import WeightsError
from twinstream.models.decoders.quantization import without_codes
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.schedule.files import read_bytes, reason_of

CONFIG = "config.json"
TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "normalizer.json", "tekken.json"),
    *("*.model", "*.spm", "*.tiktoken", "*.jinja", "chat_template.json"),
    "additional_chat_templates/*.jinja",
)
_OTHERS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_NAMES_CODE = (CONFIG, "tokenizer_config.json", *_OTHERS)
_DTYPE_KEYS = ("dtype", "torch_dtype")


def model_files(spec: ModelSpec, like: Path | None) -> dict[str, bytes]:
    """config.json and what `like` has beside its weights, by name.

    The config.json is that of `like`, to the byte (but for a byte order mark) if its dtype is the
    model's, and one of its own where there is none.

    Raises:
        WeightsError: a file cannot be read.
        HfConfigError: there is none to copy, and no family of transformers is like this model.
    """
    if like is None or not (like / CONFIG).exists():
        config = _json(to_hf_config(spec))
    else:
        config = model_config(like, spec.dtype)
    return {CONFIG: config} | files_beside(like)


def model_config(like: Path, dtype: str) -> bytes:
    """The config.json of a folder, to the byte if its dtype is the model's.

    Raises:
        WeightsError: it cannot be read.
    """
    content = _read(like / CONFIG).removeprefix(BOM_UTF8)
    return _with_dtype(like / CONFIG, content, dtype)


def tokenizer_files(like: Path | None) -> dict[str, bytes]:
    """Return a folder's files of tokenizer, chat templates and generation, by name.

    Raises:
        WeightsError: a file cannot be read.
    """
    return _files(like, TOKENIZER)


def files_beside(like: Path | None) -> dict[str, bytes]:
    """Return all that belongs to a model beside its config and weights, by name: tokenizer, chat
    templates, what prepares images, and the Python files that one of them names.

    Raises:
        WeightsError: a file cannot be read.
    """
    found = _files(like, (*TOKENIZER, *_OTHERS))
    if like is not None and any(_names_code(like / name) for name in _NAMES_CODE):
        found |= _files(like, ("*.py",))
    return found


def _files(folder: Path | None, patterns: Sequence[str]) -> dict[str, bytes]:
    if folder is None:
        return {}
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): _read(path) for path in sorted(paths)}


def _names_code(path: Path) -> bool:
    return path.is_file() and b'"auto_map"' in _read(path)


def _with_dtype(path: Path, content: bytes, dtype: str) -> bytes:
    """A config.json as it is, but for the dtype that it says or, by saying none, means."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WeightsError(path, f"is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise WeightsError(path, "is not a JSON object")
    if (plain := without_codes(config)) != config:  # what is written has values
        config, content = plain, _json(plain)
    told_by = [key for key in _DTYPE_KEYS if config.get(key) is not None] or ["torch_dtype"]
    if all(config.get(key, "float32") == dtype for key in told_by):
        return content
    return _json(config | dict.fromkeys(told_by, dtype))


def _json(config: dict[str, Any]) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise WeightsError(path, f"cannot be read: {reason_of(error)}") from None
