"""The model and the data of a run, opened and checked."""

from dataclasses import dataclass, replace
from pathlib import Path

from twinstream.data.options import DataOptions
from twinstream.data.training_data import TrainingData
from twinstream.log.run_files import RunFiles
from twinstream.models.presets import load_model, preset_names
from twinstream.models.spec import ModelSpec
from twinstream.training.amounts import source_of
from twinstream.training.options import TrainOptions


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        folder: the Hugging Face folder that its weights come from; None where they are random.
        files: a folder with config.json, tokenizer and so on to be copied through.
        has_weights: whether the folder has them yet; a dry run needs none.
    """

    spec: ModelSpec
    folder: Path | None = None
    files: Path | None = None
    has_weights: bool = True


def open_model(options: TrainOptions, *, weights: bool) -> Model:
    """The model, and the headers of its weights checked where it has some.

    Args:
        weights: whether those of a folder have to be there.

    Raises:
        TwinstreamError: there is no such model, or its weights are not whole.
    """
    spec = load_model(options.model)
    if options.dtype is not None:
        spec = spec.model_copy(update={"dtype": options.dtype})
    path = Path(options.model)
    if options.model in preset_names():
        return Model(spec)
    if not path.is_dir():
        return Model(spec, files=path.parent if path.name == "config.json" else None)
    from twinstream.api import require_torch

    require_torch()
    from twinstream.executor.weights.hf_files import has_weights
    from twinstream.executor.weights.hf_folder import HfFolder

    is_there = has_weights(path)
    if weights or is_there:
        HfFolder.open(path, spec)
    return Model(spec, folder=path, files=path, has_weights=is_there)


def base_name(model: Model) -> str | None:
    """What a PEFT folder says of its base."""
    return None if model.folder is None else str(model.folder.resolve())


def open_data(options: TrainOptions, model: Model) -> tuple[TrainingData, TrainingData | None]:
    """What is trained on and, if asked for, evaluated on.

    Raises:
        DataError: a file, a row, the tokenizer or its template cannot be used.
    """
    tokenizer = options.tokenizer
    if tokenizer is None and model.files is not None:
        tokenizer = model.files if (model.files / "tokenizer.json").exists() else None
    rows = DataOptions(
        loss_on=options.loss_on, long_documents=options.long_documents,
        chat_template=options.chat_template, workers=options.data_workers,
    )  # fmt: skip

    def opened(names: tuple[str, ...], rows: DataOptions) -> TrainingData:
        return TrainingData.open(
            [source_of(name) for name in names], tokenizer, longest=options.seq_len, options=rows,
            cache=RunFiles(options.output).tokens, vocab_size=model.spec.vocab_size,
        )  # fmt: skip

    data = opened(options.data, rows)
    if not options.eval_data:
        return data, None
    return data, opened(options.eval_data, replace(rows, workers=0))
