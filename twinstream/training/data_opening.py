"""Files opened with a model's tokenizer, in one way for all commands that read data."""

from collections.abc import Sequence
from pathlib import Path

from twinstream.data.data_error import DataError
from twinstream.data.encoding.tokenizer import DEFINITION, OF_SLOW_TOKENIZERS
from twinstream.data.options import DataOptions
from twinstream.data.reading.files import find_files
from twinstream.data.training_data import TrainingData
from twinstream.training.amounts import source_of
from twinstream.training.options import BYTES


def opened(
    names: Sequence[str],
    tokenizer: Path | None,
    rows: DataOptions,
    *,
    longest: int,
    cache: Path | None = None,
    vocab_size: int | None = None,
) -> TrainingData:
    """The files of these names, each maybe with a weight; the rest as `TrainingData.open` has it.

    Raises:
        DataError: a file, a row, the tokenizer or its template cannot be used.
    """
    sources = [source_of(name) for name in names]
    return TrainingData.open(
        sources, tokenizer, longest=longest, options=rows, cache=cache, vocab_size=vocab_size
    )


def tokenizer_for(
    given: Path | None, folder: Path | None, names: Sequence[str], *, is_random: bool
) -> Path | None:
    """A folder or tokenizer.json; None is bytes.

    Args:
        given: by the user, `bytes` for bytes.
        folder: of the model, where it has one.
        names: of the data; .bin files have tokens and need no tokenizer.
        is_random: the model's weights are random, so that without a tokenizer it learns bytes.

    Raises:
        DataError: a file of the data is not there, or nothing says what a token is.
    """
    if given is not None:
        return None if given == Path(BYTES) and not given.exists() else given
    if folder is not None and (folder / DEFINITION).exists():
        return folder
    is_slow = folder is not None and any((folder / name).exists() for name in OF_SLOW_TOKENIZERS)
    if is_random and not is_slow:
        return None
    found = [file for name in names for file in find_files(source_of(name)).files]
    if all(file.kind == "bin" for file in found):
        return None
    if folder is None:
        raise DataError(
            "a preset has no tokenizer, and how many tokens a text has depends on that: give "
            "--tokenizer FOLDER of a model with the same, or --tokenizer bytes to count each byte "
            "as one (text has about 4 bytes a token)"
        )
    return folder
