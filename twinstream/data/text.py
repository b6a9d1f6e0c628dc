"""Real text as training data: byte-level tokens, or those of a given tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_bytes
from twinstream.schedule.workload import Workload


class TextError(TwinstreamError):
    """The error of a text that cannot be used."""


def default_text() -> bytes:
    """Python's own help topics: real prose that every installation has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: Path) -> bytes:
    try:
        text = read_bytes(path)
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) < 2:
        raise TextError(f"{path} has {len(text)} byte(s); training needs at least 2")
    return text


def byte_tokens(text: bytes) -> NDArray[np.int32]:
    """Return a token for each byte, ids 0 to 255, int32."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.int32)


@dataclass(frozen=True)
class TextBatches:
    """Consecutive windows of a token stream, around and around; labels are the next tokens.

    The stream begins with the tokens of training step `first_step`.
    """

    tokens: NDArray[np.int32]
    workload: Workload
    first_step: int = 1

    def chunk(self, step: int, index: int) -> NDArray[np.int32]:
        """Ids and labels [2, chunk_tokens] of chunk `index` of training step `step` (from 1)."""
        length = self.workload.chunk_tokens
        skipped = (step - self.first_step) * self.workload.tokens_per_step
        first = skipped + index * length
        positions = np.arange(first, first + length + 1) % len(self.tokens)
        window = self.tokens[positions]
        return np.stack([window[:-1], window[1:]]).astype(np.int32)


def check_vocabulary(tokens: NDArray[np.int32], vocab_size: int) -> None:
    """Raise TextError unless this is a stream of token ids of the model's vocabulary."""
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TextError(
            "tokens need to be a numpy array of whole numbers with one dimension, got "
            f"{getattr(tokens, 'dtype', type(tokens).__name__)} of shape {np.shape(tokens)}"
        )
    if len(tokens) < 2 or tokens.min() < 0:
        raise TextError(
            f"training needs at least 2 tokens, and ids from 0; there are {len(tokens)}, "
            f"{int((tokens < 0).sum())} of them negative"
        )
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise TextError(
            f"the text has token id {largest}, the model's vocabulary has {vocab_size} ids; "
            "use a model with a larger vocabulary or another tokenizer"
        )
