"""The token stream of a run: the bytes of a text, or what a tokenizer makes of it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstream.data.text import TextError, byte_tokens, default_text, read_text
from twinstream.schedule.files import read_text as read_text_file


def token_stream(text: Path | None, tokenizer: Path | None) -> NDArray[np.int32]:
    """Tokens of a text file, by default of Python's help topics.

    Args:
        tokenizer: a Hugging Face tokenizer.json; by default every byte is a token.

    Raises:
        TextError: a file cannot be read or is too short, or `tokenizers` is not installed.
    """
    content = default_text() if text is None else read_text(text)
    if tokenizer is None:
        return byte_tokens(content)
    try:
        prose = content.decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{text} is not UTF-8 text: byte {error.start}") from None
    ids = _encoded(prose, tokenizer)
    if len(ids) < 2:
        raise TextError(f"the text has {len(ids)} token(s); training needs at least 2")
    return np.asarray(ids, dtype=np.int32)


def _encoded(prose: str, tokenizer: Path) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise TextError(
            "--tokenizer needs the package `tokenizers`, which is not installed: "
            "pip install tokenizers; without --tokenizer every byte is a token"
        ) from None
    try:
        definition = read_text_file(tokenizer)
    except UnicodeDecodeError as error:
        raise TextError(f"{tokenizer} is not UTF-8 text: byte {error.start}") from None
    except OSError as error:
        raise TextError(f"cannot read {tokenizer}: {error.strerror or error}") from None
    try:
        loaded = Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more specific
        raise TextError(f"{tokenizer} is no tokenizer.json: {error}") from None
    ids: list[int] = loaded.encode(prose, add_special_tokens=False).ids
    return ids
