"""Finds a model by its name: a family without kernels of ours is traced, where torch is there."""

from importlib.util import find_spec
from pathlib import Path

from twinstream.models.adapters.lora import has_dropout, module_lora_of
from twinstream.models.hf.config import (
    TRAINED_AS,
    Dtype,
    UnsupportedConfigError,
    hf_config_file,
    is_own_config,
    read_json_object,
    stated_dtype,
    value_config,
)
from twinstream.models.loss import LOSSES, kind_of_loss, names_loss
from twinstream.models.model import KINDS, AnyModel, is_traced, load_any_model
from twinstream.models.presets import config_of, is_preset
from twinstream.models.traced import ModuleSource, TracedModel
from twinstream.schedule.errors import TwinstreamError, require
from twinstream.schedule.files import real_path
from twinstream.schedule.python_file import OwnFunction, digest_of_code, note_named, split_name

DEFAULT_SEQ_LEN = 2048


class CannotTraceError(TwinstreamError):
    """A model has to be traced, which is not possible here."""


def find_model(  # noqa: PLR0913
    model: str | Path | AnyModel, *, dtype: Dtype | None = None, longest: int | None = None,
    is_packed: bool | None = False, lora: str | None = None,
    loss: str | None = None, packed_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> AnyModel:  # fmt: skip
    """The model of a name, a path, or `FILE.py:FUNCTION`.

    Presets and config.json of the families llama, mistral, qwen2 and qwen3 are computed by
    twinstream's own kernels. Any other config.json, or folder with one, is traced: its own module
    is run once on tensors without memory.

    Args:
        dtype: of parameters, whatever the model's own is.
        longest: tokens of the longest sequence.
        packed_tokens: of a chunk, where documents are packed.
        is_packed: of a model that is traced, whether documents are packed side by side; None is
            where a probe shows that they do not see each other.
        lora: of a model that is traced, adapters in its blocks (`r=16,targets=q_proj,v_proj`).
        loss: `FILE.py:FUNCTION` of rows of logits and labels, which makes any model a traced one;
            that of pairs (`dpo`) is no part of a model.
        trust_remote_code: run the code of the model's folder, which makes any model a traced one.

    Raises:
        CannotTraceError: it has to be traced, and torch or transformers is not installed.
        TwinstreamError: there is no such model, or it cannot be traced; says why.
    """
    require("model", model, str, Path, *KINDS)
    if isinstance(model, str | Path) and (shipped := config_of(model)) != model:
        found = find_model(
            shipped, dtype=dtype, longest=longest, is_packed=is_packed, lora=lora, loss=loss,
            packed_tokens=packed_tokens, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        return found.model_copy(update={"name": Path(shipped).parent.name})
    _require_function(model)
    if names_loss(loss):
        if (sides := kind_of_loss(loss).sides) > 1:  # which are packed
            is_packed, packed_tokens = None, packed_tokens or (sides * longest if longest else None)
        loss = None
    if loss is not None and split_name(loss) is None:
        raise CannotTraceError(
            f"--loss '{loss:.80}' names no function of a file: write {', '.join(LOSSES)}, or "
            "FILE.py:FUNCTION"
        )
    if not isinstance(model, str | Path) or is_traced(model):
        found = load_any_model(model, dtype=dtype, longest=longest)
        _require_no_loss(loss, str(found.name))
        return found
    if loss is not None and is_preset(model):
        _require_no_loss(loss, str(model))
    if split_name(str(model)) is None and loss is None and not trust_remote_code:
        own = _own_or_why(model, dtype, longest, lora)
        if not isinstance(own, str):
            return own
        _require_tracing(model, own)
    return trace_model(
        model, dtype=dtype, seq_len=longest, is_packed=is_packed, lora=lora,
        loss=loss, packed_tokens=packed_tokens, trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _own_or_why(
    model: str | Path, dtype: Dtype | None, longest: int | None, lora: str | None
) -> AnyModel | str:
    """The model, or why twinstream's kernels do not compute it, or its adapters."""
    try:
        found = load_any_model(model, dtype=dtype, longest=longest)
    except UnsupportedConfigError as error:
        return str(error)
    refusal = found.executor_refusal
    if is_preset(model):
        return found
    if refusal is None and has_dropout(lora):
        return f"{model}: twinstream's own kernels have no dropout, which --lora asks for"
    if refusal is None:
        return found
    return f"{model}: twinstream's own kernels do not compute it: {refusal}"


def path_notes(
    model: str | Path, dtype: Dtype | None, longest: int | None, lora: str | None = None
) -> list[str]:
    """Why a config.json is traced, in a line; none where twinstream's kernels compute it.

    Args:
        longest: tokens of the longest sequence.
        lora: adapters, as `find_model` takes them.
    """
    if split_name(str(model)) is not None or is_traced(model):
        return []
    config = config_of(model)
    own = _own_or_why(config, dtype, longest, lora)
    if not isinstance(own, str):
        return []
    if not is_own_config(config):
        kind = read_json_object(hf_config_file(config)).get("model_type")
        own = f"there are none of {kind}"
    return [
        f"{model} runs by transformers' own module, which was traced, and not by twinstream's "
        f"kernels: {own}"
    ]


def trace_model(  # noqa: PLR0913
    model: str | Path, *, dtype: Dtype | None = None, attention: str | None = None,
    seq_len: int | None = None, is_packed: bool | None = False, lora: str | None = None,
    loss: str | None = None, packed_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> TracedModel:  # fmt: skip
    """Trace a module without its weights: `twinstream trace MODEL`.

    Args:
        model: a config.json of any causal decoder of transformers, a folder with one, or
            `FILE.py:FUNCTION`, where the function builds a module with a list of blocks.
        dtype: of parameters; by default what the config says (bfloat16 for float16), else float32.
        attention: `eager` or `sdpa`; by default what transformers takes.
        seq_len: tokens of a sequence; other lengths are good as far as no window separates them.
        packed_tokens: of a chunk, where documents are packed.
        is_packed: whether documents are packed side by side; None is where a probe of a small
            copy shows that they do not see each other.
        lora: adapters beside linear layers of the blocks, all or `targets` by their names there:
            `r=16,alpha=32,targets=q_proj,v_proj`. The base is frozen.
        loss: `FILE.py:FUNCTION` of logits [R, V] and labels [R], which returns a loss of each row.
        trust_remote_code: run the code in the model's folder, whose config.json names it.

    Raises:
        CannotTraceError: torch or transformers is not installed.
        TwinstreamError: the module cannot be planned; says where, why, and what to do.
    """
    model = config_of(model)
    _require_function(model)
    _require_tracing(model, f"{model} is traced")
    from twinstream.executor.modules.packing_probe import Packing, isolates_documents
    from twinstream.executor.modules.tracing import trace

    source, chosen = _source_of(model, dtype, trusts_code=trust_remote_code)
    packing: Packing = "unknown" if is_packed is False else isolates_documents(source, attention)
    if is_packed is None:
        is_packed = packing in ("isolated", "isolated_by_mask")
    if lora is not None:
        source = source.model_copy(update={"lora": module_lora_of(lora)})
    if loss is not None:
        source = source.model_copy(update={"loss": OwnFunction.of(loss)})
    found = trace(
        source, dtype=chosen, attention=attention,
        seq_len=max(seq_len or DEFAULT_SEQ_LEN, (packed_tokens or 0) if is_packed else 0),
        is_packed=is_packed, longest=seq_len,
    )  # fmt: skip
    return found.model_copy(update={"packing": packing})


def _require_function(model: str | Path | AnyModel) -> None:
    if isinstance(model, str | Path) and str(model).endswith(".py"):
        raise CannotTraceError(
            f"{model} is a file of Python: say which of its functions builds the module, as "
            f"{model}:build"
        )


def _require_no_loss(loss: str | None, model: str) -> None:
    if loss is not None:
        raise CannotTraceError(
            f"a loss of your own is part of what is traced, and '{model}' is described already: "
            "give a config.json, a folder or FILE.py:FUNCTION"
        )


def _source_of(
    model: str | Path, dtype: Dtype | None, *, trusts_code: bool
) -> tuple[ModuleSource, Dtype]:
    """What builds the module, and the dtype of its parameters."""
    from twinstream.executor.modules.building import python_source

    function = split_name(str(model))
    if function is not None:
        return python_source(*function), dtype or "float32"
    if is_traced(model):
        raise CannotTraceError(f"{model} is a traced model already: give it to plan, or train it")
    file = hf_config_file(model)
    config = value_config(file)
    chosen = dtype or TRAINED_AS.get(str(stated_dtype(file)), "float32")
    has_code = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    if not trusts_code:
        if has_code and not _is_of_transformers(str(config.get("model_type"))):
            raise CannotTraceError(
                f"{model} is computed by Python files of its own folder: read them, and say so "
                "with --trust-remote-code"
            )
        return ModuleSource(config=config), chosen
    if not has_code:
        raise CannotTraceError(
            f"{file} names no code of its own (auto_map): leave out --trust-remote-code"
        )
    folder = real_path(file.parent)
    digest = digest_of_code(folder)
    note_named(digest)
    found = ModuleSource(kind="remote", path=str(folder), sha256=digest)
    return found, chosen


def _is_of_transformers(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _require_tracing(model: str | Path, why: str) -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise CannotTraceError(
            f"{why}. Any model can be planned once it is traced, for which {' and '.join(missing)} "
            f"has to be installed (pip install 'twinstream[executor]'): there, twinstream trace "
            f"{model} -o model.json; then give that file, here or anywhere"
        )
