"""Opens MODEL of a run: a preset, a config, or a folder whose weights are checked."""

from dataclasses import dataclass
from pathlib import Path

from twinstream.models.presets import is_preset, require_weights
from twinstream.models.providers.model import (
    AnyModel,
    length_refusal,
    require_executable,
    with_aux_loss,
)
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.files import real_path
from twinstream.tracing import find_model
from twinstream.training.machine import Tell
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.trusted_code import require_trusted


@dataclass(frozen=True)
class OpenedModel:
    """What is trained.

    Attributes:
        folder: the Hugging Face folder that its weights come from; None where they are random.
        files: a folder with config.json, tokenizer and so on to be copied through.
        has_weights: whether the folder has them yet; a dry run needs none.
    """

    spec: AnyModel
    folder: Path | None = None
    files: Path | None = None
    has_weights: bool = True

    @property
    def in_peft(self) -> str:
        """What is known of PEFT and an adapter of this model."""
        if self.spec.is_tried_in_peft:
            return "PEFT loads it as it is"
        return f"its files are PEFT's, though of '{self.spec.own_code}' it was not tried there"


def open_model(options: TrainOptions, *, weights: bool) -> OpenedModel:
    """The model, and the headers of its weights checked where it has some.

    Args:
        weights: whether those of a folder have to be there.

    Raises:
        TwinstreamError: there is no such model, or its weights are not whole.
    """
    spec = find_model(
        options.model, dtype=options.dtype,
        longest=options.seq_len, packed_tokens=options.chunk_tokens, is_packed=None,
        lora=options.lora or _lora_of_adapter(options), loss=options.loss,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    require_trusted(options.model, spec, Recipe(), trusts=options.trust_remote_code)
    spec = with_aux_loss(spec, options.aux_loss)
    require_executable(spec)
    path = Path(options.model)
    if weights:
        require_weights(options.model)
    if is_preset(options.model):
        return OpenedModel(spec)
    if not path.is_dir():
        if weights:
            from twinstream.executor.providers.registry import provider_of

            provider_of(spec).require_savable(spec)
        return OpenedModel(spec, files=path.parent if path.name == "config.json" else None)
    from twinstream.api import require_torch

    require_torch()
    from twinstream.executor.providers.registry import provider_of
    from twinstream.executor.weights.hf_files import has_weights

    is_there = has_weights(path)
    if weights or is_there:
        provider_of(spec).check(path, spec, has_weights=is_there)
    return OpenedModel(spec, folder=path, files=path, has_weights=is_there)


def within_positions(options: TrainOptions, spec: AnyModel, tell: Tell) -> TrainOptions:
    """The options, the length of sequences that a model has positions for where none is given.

    Raises:
        OptionsError: one is given that is longer.
    """
    why, limit = length_refusal(spec, options.seq_len), spec.position_limit
    if why is None or limit is None:
        return options
    if "seq_len" in options.model_fields_set:
        raise OptionsError(why)
    tell(
        f"sequences have up to {limit.tokens:,} tokens, not {options.seq_len:,}, since {limit.why}"
    )
    return options.with_seq_len(limit.tokens)


def dropout_of(adapter: Path | None) -> float:
    """What an adapter that is gone on from was trained with; 0 where there is none."""
    if adapter is None:
        return 0.0
    from twinstream.executor.weights.peft.peft_folder import read_adapter_config

    told = read_adapter_config(adapter).get("lora_dropout")
    return float(told) if isinstance(told, int | float) else 0.0


def _lora_of_adapter(options: TrainOptions) -> str | None:
    """What --lora would say of the adapter that is gone on from, should the model be traced."""
    if options.adapter is None:
        return None
    from twinstream.api import require_torch

    require_torch()
    from twinstream.executor.weights.traced.module_adapters import lora_of_folder

    return lora_of_folder(options.adapter).text


def lora_text(spec: AnyModel, recipe: Recipe, options: TrainOptions) -> str | None:
    """What --lora would say of the adapter that is gone on from."""
    lora = spec.own_lora or recipe.lora
    return None if lora is None or options.adapter is None else lora.text


def base_name(model: OpenedModel) -> str | None:
    """What a PEFT folder says of its base."""
    return None if model.folder is None else str(real_path(model.folder))
