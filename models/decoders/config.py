"""Read a Hugging Face config.json, or refuse by name whatever would change the computation.

Absent keys mean what they mean to transformers (read from 5.17), but those of a RoPE scaling, which
must be there. A key that is unknown here is refused too unless it is empty or of bookkeeping: it
may be the one that matters.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from twinstream.models.decoders.experts import (
    EXPERT_MODEL_TYPES,
    ExpertKeys,
    ExpertsError,
    expert_refusals,
    experts_of,
)
from twinstream.models.decoders.keys import HARMLESS_KEYS, NEUTRAL_VALUES, REASONS, says_nothing
from twinstream.models.decoders.priced import PRICED_TYPES, PricedConfigError, priced_fields
from twinstream.models.decoders.quantization import (
    QUANTIZATION_FILES,
    StoredCodes,
    stored_codes,
    without_codes,
)
from twinstream.models.decoders.rope import RopeKeys, rope_refusals
from twinstream.models.options import Depth, PositiveFinite, RopeScaling
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_text, real_path

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *EXPERT_MODEL_TYPES)
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_MIXTRAL_ROPE_THETA = 1e6
DEFAULT_QWEN3_HEAD_DIM = 128
DEFAULT_EPS = {"mixtral": 1e-5, "olmoe": 1e-5, "glm4_moe": 1e-5}  # of others 1e-6
_OF_ADAPTERS = "adapter_config.json"
NEXT_TOKEN_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
_WINDOWED = ("mistral", "qwen2", "qwen3")  # those that leave a window of 4096 out
_OWN_BIAS = ("qwen2", "qwen2_moe")  # Q, K and V always have one, unless qkv_bias says otherwise
DEFAULT_WINDOW = 4096
Dtype = Literal["bfloat16", "float32"]
DTYPES: Mapping[str, Dtype] = {
    "bfloat16": "bfloat16",
    "float32": "float32",
}
TRAINED_AS: Mapping[str, Dtype] = {**DTYPES, "float16": "bfloat16"}  # by the dtype a config says
MAX_SHOWN_CHARS = 200


class HfConfigError(TwinstreamError):
    """A Hugging Face config.json cannot be read."""

    def __init__(self, *, path: str | Path, problem: str) -> None:
        self.path, self.problem = Path(path), problem
        super().__init__(f"{self.path}: {problem}")


class Refusal(NamedTuple):
    """One entry of a config.json that is not supported."""

    key: str
    value: object
    reason: str


class UnsupportedConfigError(HfConfigError):
    """A Hugging Face config.json asks for what is not supported."""

    def __init__(self, *, path: str | Path, refusals: tuple[Refusal, ...]) -> None:
        self.refusals = refusals
        told = (f"{key} = {_shown(value)} ({reason})" for key, value, reason in refusals)
        super().__init__(path=path, problem=f"not supported: {'; '.join(told)}")


class _Config(ExpertKeys, RopeKeys):
    """The keys that are read; all others end in `model_extra`."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: Depth
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    rms_norm_eps: PositiveFinite | None = None
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    sliding_window: NonNegativeInt | None = None
    use_sliding_window: bool | None = None
    qkv_bias: bool | None = None
    use_qk_norm: bool | None = None


_KNOWN = frozenset({*_Config.model_fields, *HARMLESS_KEYS, *NEUTRAL_VALUES})


def read_hf_config(
    path: str | Path, dtype: Dtype | None = None, longest: int | None = None
) -> dict[str, Any]:
    """The fields of a ModelSpec, from a config.json or the one in a folder.

    Args:
        dtype: of parameters, whatever the file says.
        longest: tokens of the longest sequence, where it is known: a sliding window that it does
            not exceed is full attention.

    Raises:
        HfConfigError: the file cannot be read, or asks for what is not supported.
        QuantizedConfigError: weights are stored in codes that are not read.
    """
    file = hf_config_file(path)
    return config_fields(file, value_config(file), dtype, longest)


def value_config(file: Path) -> dict[str, Any]:
    """What is in a config.json, of weights that are values once their codes are read.

    Raises:
        HfConfigError: the file cannot be read.
        QuantizedConfigError: weights are stored in codes that are not read.
    """
    codes_of(file)
    return without_codes(read_json_object(file))


def codes_of(file: Path) -> StoredCodes | None:
    """What a config.json, or a file beside it, says of codes; None where weights are values.

    Raises:
        HfConfigError: the file cannot be read.
        QuantizedConfigError: weights are stored in codes that are not read.
    """
    raw = read_json_object(file)
    found = stored_codes(file, raw)
    if found is not None or file.name != "config.json":
        return found
    for name, method in QUANTIZATION_FILES.items():
        beside = file.with_name(name)
        if beside.is_file():
            told = read_json_object(beside)
            return stored_codes(beside, {"quantization_config": told | {"quant_method": method}})
    return None


def config_fields(
    file: Path, raw: Mapping[str, Any], dtype: Dtype | None = None, longest: int | None = None
) -> dict[str, Any]:
    """The same of what is in a config.json; `file` is for its name, and for errors."""
    model_type = _read_model_type(file, raw)
    if model_type in PRICED_TYPES:
        return _priced_fields(file, raw, model_type, dtype)
    try:
        config = _Config.model_validate(raw)
    except ValidationError as error:
        raise HfConfigError(path=file, problem=describe_problems(error)) from None
    refusals = [
        *_refusals(config, raw, model_type), *_window_refusals(config, model_type, longest),
        *(Refusal(*found) for found in rope_refusals(config, raw)),
        *(Refusal(*found) for found in expert_refusals(config, model_type)),
    ]  # fmt: skip
    if dtype is None and _dtype(config) not in TRAINED_AS:
        key = "torch_dtype" if config.dtype is None else "dtype"
        reason = f"choose one of {', '.join(DTYPES)}, as by --dtype bfloat16"
        refusals.append(Refusal(key, _dtype(config), reason))
    if refusals:
        raise UnsupportedConfigError(path=file, refusals=tuple(refusals))
    return {
        "name": config_name(file, model_type),
        "num_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": _num_kv_heads(file, config, model_type),
        "head_dim": _head_dim(file, config, model_type),
        "d_ff": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps or DEFAULT_EPS.get(model_type, 1e-6),
        "rope_theta": next(iter(config.rope_thetas.values()), _default_theta(model_type)),
        "rope_scaling": _rope_scaling(file, config),
        "qk_norm": _has_qk_norm(config, model_type),
        "qk_norm_rows": model_type == "olmoe",
        "qkv_bias": model_type in _OWN_BIAS and config.qkv_bias is not False,
        "tied_embeddings": config.tie_word_embeddings,
        "dtype": dtype or TRAINED_AS[_dtype(config)],
        "experts": _experts(file, config, model_type),
    }


def _priced_fields(
    file: Path, raw: Mapping[str, Any], model_type: str, dtype: Dtype | None
) -> dict[str, Any]:
    try:
        fields = priced_fields(raw)
    except PricedConfigError as error:
        if error.reason:
            refusal = Refusal(error.key, error.value, error.reason)
            raise UnsupportedConfigError(path=file, refusals=(refusal,)) from None
        raise HfConfigError(path=file, problem=f"key '{error.key}' is missing") from None
    told = str(raw.get("dtype") or raw.get("torch_dtype"))
    named = {
        "name": config_name(file, model_type),
        "dtype": dtype or TRAINED_AS.get(told, "float32"),
    }
    return named | fields


def _default_theta(model_type: str) -> float:
    return DEFAULT_MIXTRAL_ROPE_THETA if model_type == "mixtral" else DEFAULT_ROPE_THETA


def _has_qk_norm(config: _Config, model_type: str) -> bool:
    has_always = model_type in ("qwen3", "qwen3_moe", "olmoe", "dots1")
    return has_always or (model_type == "glm4_moe" and config.use_qk_norm is True)


def _experts(file: Path, config: _Config, model_type: str) -> dict[str, Any] | None:
    try:
        return experts_of(config, model_type, config.num_hidden_layers, config.intermediate_size)
    except ExpertsError as error:
        raise HfConfigError(path=file, problem=str(error)) from None


def stated_dtype(path: str | Path) -> str | None:
    """In which dtype a config.json says that its parameters are; None, if none, means float32.

    Raises:
        HfConfigError: the file cannot be read.
    """
    config = read_json_object(hf_config_file(path))
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, dict) else (config,)
    told = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((str(dtype) for dtype in told if dtype is not None), None)


def is_own_config(path: str | Path) -> bool:
    """Whether a path is that of a config.json of a family that is read key by key."""
    try:
        raw = read_json_object(hf_config_file(path))
    except HfConfigError:
        return False
    return raw.get("model_type") in MODEL_TYPES


def is_priced_config(path: str | Path) -> bool:
    """Whether a path is that of a config.json of a family that is priced, and not run here."""
    try:
        raw = read_json_object(hf_config_file(path))
    except HfConfigError:
        return False
    return raw.get("model_type") in PRICED_TYPES


def unread_keys(path: str | Path) -> tuple[str, ...]:
    """Keys of a config.json that are unknown here, and passed over because they say nothing.

    Raises:
        HfConfigError: the file cannot be read.
    """
    raw = without_codes(read_json_object(hf_config_file(path)))
    return tuple(key for key in raw if key not in _KNOWN)


def next_token_count(config: Mapping[str, Any]) -> int:
    """How many layers behind the last predict a token further on, by a config.json."""
    told = [config.get(key) for key in NEXT_TOKEN_KEYS]
    return sum(count for count in told if isinstance(count, int) and count > 0)


def describe_problems(error: ValidationError) -> str:
    """Say in one line what pydantic found, in terms of keys and values."""
    told = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            told.append(f"key '{key}' is missing")
        elif key:
            told.append(f"{key} = {_shown(problem['input'])}: {problem['msg']}")
        else:
            told.append(problem["msg"])
    return "; ".join(told)


def hf_config_file(path: str | Path) -> Path:
    """A config.json, or the one in a folder."""
    is_folder = os.path.isdir(path)  # noqa: PTH112 - false of too long a name, too
    return Path(path) / "config.json" if is_folder else Path(path)


def config_name(file: Path, model_type: str) -> str:
    """What a model is called whose config.json this is: as its folder, or as the file."""
    is_named_by_folder = file.name == "config.json"
    return (real_path(file.parent).name if is_named_by_folder else file.stem) or model_type


def read_json_object(file: Path) -> dict[str, Any]:
    """Of a config.json.

    Raises:
        HfConfigError: there is no such file, or it holds something else.
    """
    try:
        raw = json.loads(read_text(file, "utf-8-sig"))
    except FileNotFoundError:
        problem = "there is no such file"
        if file.with_name(_OF_ADAPTERS).exists():
            problem += (
                f": {file.parent} has an adapter ({_OF_ADAPTERS}); give its base, and to train the "
                "adapter further --adapter"
            )
        raise HfConfigError(path=file, problem=problem) from None
    except OSError as error:
        raise HfConfigError(path=file, problem=f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise HfConfigError(path=file, problem=f"is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise HfConfigError(path=file, problem="is not a JSON object")
    return raw


def _read_model_type(file: Path, raw: Mapping[str, Any]) -> str:
    if {"ops", "slots"} <= set(raw) or {"mesh", "schedules"} <= set(raw):
        raise HfConfigError(path=file, problem="is a schedule, not a model's config.json")
    if "model_type" not in raw:
        raise HfConfigError(path=file, problem="key 'model_type' is missing")
    model_type = raw["model_type"]
    if model_type not in (*MODEL_TYPES, *PRICED_TYPES):
        known = ", ".join((*MODEL_TYPES, *PRICED_TYPES))
        refusal = Refusal("model_type", model_type, f"only {known} are")
        raise UnsupportedConfigError(path=file, refusals=(refusal,))
    return str(model_type)


def _refusals(config: _Config, raw: Mapping[str, Any], model_type: str) -> Iterator[Refusal]:
    for key, value in raw.items():
        if key not in _KNOWN:
            if not says_nothing(key, value):
                yield Refusal(key, value, REASONS.get(key, "unknown key"))
        elif key == "attention_bias" and model_type in _OWN_BIAS:
            continue  # transformers does not read it for these: q, k and v have a bias
        elif value not in NEUTRAL_VALUES.get(key, (value,)):
            yield Refusal(key, value, REASONS.get(key, "not implemented"))
    for key, families in (("qkv_bias", _OWN_BIAS), ("use_qk_norm", ("glm4_moe",))):
        if raw.get(key) and model_type not in families:
            yield Refusal(key, raw[key], f"it is no key of {model_type}")
    if model_type == "glm4_moe" and not config.rotates_whole_heads(raw):
        half = "absent, which means 0.5"
        yield Refusal("partial_rotary_factor", raw.get("partial_rotary_factor", half),
                      "not implemented")  # fmt: skip
    for architecture in config.architectures or ():
        if not architecture.endswith(("ForCausalLM", "Model")):
            yield Refusal("architectures", config.architectures, "only causal language models are")


def _window_refusals(config: _Config, model_type: str, longest: int | None) -> Iterator[Refusal]:
    """Attention that is not full, for sequences as long as these."""
    reason = "only full causal attention is implemented"
    is_qwen = model_type.startswith("qwen")
    window, is_told = config.sliding_window, "sliding_window" in config.model_fields_set
    if window is None and not is_told and (is_qwen or model_type in _WINDOWED):
        window = DEFAULT_WINDOW
    kinds = set(config.layer_types or ()) - {"full_attention"}
    if (is_qwen and not config.use_sliding_window) or (model_type == "dots1" and not kinds):
        window = None
    if window is not None:
        if longest is not None and longest <= window and kinds <= {"sliding_attention"}:
            return
        reason += f", and with --seq-len up to {window} it is full"
    if kinds:
        yield Refusal("layer_types", config.layer_types, reason)
    if window is None:
        return
    if is_qwen:
        yield Refusal("use_sliding_window", config.use_sliding_window, reason)
    elif is_told:
        yield Refusal("sliding_window", window, reason)
    else:
        implied = "mistral means this by leaving the key out, and full attention by null"
        yield Refusal("sliding_window", window, f"{reason}; {implied}")


def _rope_scaling(file: Path, config: _Config) -> RopeScaling | None:
    for key, rope in config.ropes.items():
        if rope.kind == "default":
            continue
        try:
            return RopeScaling.model_validate(rope.scaling)
        except ValidationError as error:
            problem = f"{key}: {describe_problems(error)}"
            raise HfConfigError(path=file, problem=problem) from None
    return None


def _dtype(config: _Config) -> str:
    return config.dtype or config.torch_dtype or "float32"


def _num_kv_heads(file: Path, config: _Config, model_type: str) -> int:
    # Absent, only llama takes as many as heads; the others have numbers of one checkpoint.
    if "num_key_value_heads" not in config.model_fields_set and model_type != "llama":
        raise HfConfigError(path=file, problem="key 'num_key_value_heads' is missing")
    return config.num_key_value_heads or config.num_attention_heads


def _head_dim(file: Path, config: _Config, model_type: str) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if model_type == "qwen3":
        return DEFAULT_QWEN3_HEAD_DIM
    if config.hidden_size % config.num_attention_heads:
        problem = (
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
            f"{config.num_attention_heads} and key 'head_dim' is missing"
        )
        raise HfConfigError(path=file, problem=problem)
    return config.hidden_size // config.num_attention_heads


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
