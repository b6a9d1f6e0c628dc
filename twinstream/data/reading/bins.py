"""Files of tokens: raw uint16 as nanoGPT writes them, or llm.c's with a header.

llm.c (dev/data/data_common.py, llmc/dataloader.h): 256 int32, of which the first three are magic,
version and number of tokens; then the tokens. nanoGPT (data/*/prepare.py): uint16 and nothing else.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError, unreadable

_HEADER_BYTES = 256 * 4
_LLMC: dict[int, tuple[int, str]] = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_LLMC_MAGICS = range(20240101, 20250101)  # its other files, as dates, so that none is read as ids
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class BinLayout:
    """Where the tokens of a file are, and of what type."""

    first_byte: int
    dtype: str
    num_tokens: int


def bin_layout(path: Path) -> BinLayout:
    """From the header, or the size where there is none.

    Raises:
        DataError: the header is of another file or version, or does not fit the size.
    """
    try:
        with path.open("rb") as file:
            header = np.frombuffer(file.read(_HEADER_BYTES)[: 3 * 4], dtype=np.uint8)
        size_bytes = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from None
    magic, version, num_tokens = header.view("<i4") if len(header) == 12 else (0, 0, 0)
    if magic in _LLMC:
        return _with_header(path, int(magic), int(version), int(num_tokens), size_bytes)
    if magic in _LLMC_MAGICS:
        raise DataError(
            f"{path} begins with {magic}, which is no magic number of llm.c's token files "
            f"({', '.join(map(str, _LLMC))}) but of another file of its: give a file of tokens"
        )
    if size_bytes % 2:
        raise DataError(
            f"{path} has {size_bytes} bytes, an odd number, and tokens of 2 bytes without a "
            "header: the file is cut off, or it is no file of uint16 tokens"
        )
    return BinLayout(0, "<u2", size_bytes // 2)


def _with_header(
    path: Path, magic: int, version: int, num_tokens: int, size_bytes: int
) -> BinLayout:
    known_version, dtype = _LLMC[magic]
    if version != known_version:
        raise DataError(
            f"{path} is a file of llm.c of version {version}; with the magic number {magic} "
            f"twinstream reads version {known_version}: write it again with today's llm.c"
        )
    expected_bytes = _HEADER_BYTES + num_tokens * np.dtype(dtype).itemsize
    if size_bytes != expected_bytes:
        raise DataError(
            f"{path} has {size_bytes} bytes, and its header says {num_tokens} tokens, which are "
            f"{expected_bytes} bytes: the file is cut off; copy or write it again"
        )
    return BinLayout(_HEADER_BYTES, dtype, num_tokens)


def read_bin(path: Path, first: int, end: int) -> NDArray[np.int32]:
    """Tokens [first, end) of a file.

    Raises:
        DataError: as `bin_layout`; an id needs more than 31 bits.
    """
    layout = bin_layout(path)
    itemsize = np.dtype(layout.dtype).itemsize
    try:
        tokens = np.fromfile(
            path, layout.dtype, count=end - first, offset=layout.first_byte + first * itemsize
        )
    except OSError as error:
        raise unreadable(path, error) from None
    if len(tokens) and int(tokens.max()) > _LARGEST_ID:
        raise DataError(
            f"{path}, token {first + int(tokens.argmax())}: id {tokens.max()} is no token's; the "
            "file is damaged, or its tokens are not uint32"
        )
    return tokens.astype(np.int32)
