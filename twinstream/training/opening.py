"""The model and the data of a run, opened and checked."""

from dataclasses import dataclass, replace
from pathlib import Path

from twinstream.data.encoding.tokenizer import DEFINITION, OF_SLOW_TOKENIZERS
from twinstream.data.options import DataOptions
from twinstream.data.reading.files import find_files
from twinstream.data.training_data import TrainingData
from twinstream.log.run_files import RunFiles
from twinstream.models.presets import is_preset, load_model
from twinstream.models.spec import ModelSpec, require_executable
from twinstream.training.amounts import source_of
from twinstream.training.options import BYTES, TrainOptions


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
    spec = load_model(options.model, dtype=options.dtype, longest=options.seq_len)
    require_executable(spec)
    path = Path(options.model)
    if is_preset(options.model):
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
    tokenizer = _tokenizer(options, model)
    rows = DataOptions(
        loss_on=options.loss_on, long_documents=options.long_documents,
        chat_template=options.chat_template, workers=options.data_workers,
        skip_bad_rows=options.skip_bad_rows,
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


def _tokenizer(options: TrainOptions, model: Model) -> Path | None:
    """A folder or tokenizer.json; None is bytes, which given weights have only if told so."""
    given, folder = options.tokenizer, model.files
    if given is not None:
        return None if given == Path(BYTES) and not given.exists() else given
    if folder is None:
        return None
    if (folder / DEFINITION).exists():
        return folder
    is_slow = any((folder / name).exists() for name in OF_SLOW_TOKENIZERS)
    if model.folder is None and not is_slow:
        return None
    names = (*options.data, *options.eval_data)
    found = [file for name in names for file in find_files(source_of(name)).files]
    return None if all(file.kind == "bin" for file in found) else folder
