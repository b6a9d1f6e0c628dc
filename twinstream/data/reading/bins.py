"""Files of tokens: nanoGPT's, which are nothing but tokens, llm.c's with a header, Megatron-LM's.

llm.c (dev/data/data_common.py, llmc/dataloader.h): 256 int32, of which the first three are magic,
version and number of tokens; then the tokens. nanoGPT (data/*/prepare.py): uint16 and nothing else.
Megatron-LM (megatron/core/datasets/indexed_dataset.py): tokens and nothing else, and beside them an
.idx: 9 bytes of magic, the version as uint64, a code of the dtype as a byte, the number of
sequences and of documents as uint64, then the length of each sequence as int32.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstream.data.data_error import DataError, unreadable
from twinstream.schedule.files import open_file

_HEADER_BYTES = 256 * 4
_LLMC: dict[int, tuple[int, str]] = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_LLMC_MAGICS = range(20240101, 20250101)  # its other files, as dates, so that none is read as ids
_LARGEST_ID = 2**31 - 1
_INDEX = struct.Struct("<9sQBQQ")
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LOOK_BYTES = 1 << 16
_LOOK_TOKENS = 16  # fewer tell nothing
_HIGH_HALVES = 16  # ids below 2**20 have fewer in their upper two bytes


@dataclass(frozen=True)
class BinLayout:
    """The first byte, dtype and number of the tokens in a file."""

    first_byte: int
    dtype: str
    num_tokens: int


def bin_layout(path: Path) -> BinLayout:
    """Find the layout from the header, the .idx beside it, or what its first bytes can only be.

    Raises:
        DataError: the header or the .idx is of another file or version, or does not fit the size.
    """
    index = path.with_suffix(".idx")
    try:
        with open_file(path) as file:
            look = file.read(_LOOK_BYTES)
        size_bytes = path.stat().st_size
        if index.exists():
            return _with_index(path, index, size_bytes)
    except OSError as error:
        raise unreadable(path, error) from None
    header = np.frombuffer(look[: 3 * 4], "<i4") if len(look) >= 12 else (0, 0, 0)
    magic, version, num_tokens = header
    if magic in _LLMC:
        return _with_header(path, int(magic), int(version), int(num_tokens), size_bytes)
    if magic in _LLMC_MAGICS:
        raise DataError(
            f"{path} begins with {magic}, which is no magic number of llm.c's token files "
            f"({', '.join(map(str, _LLMC))}) but of another file of its: give a file of tokens"
        )
    dtype = _dtype_of(look)
    itemsize = np.dtype(dtype).itemsize
    if size_bytes % itemsize:
        raise DataError(
            f"{path} has {size_bytes} bytes, {'an odd number' if itemsize == 2 else 'no multiple'}"
            f", and tokens of {itemsize} bytes without a header: the file is cut off, or it is no "
            "file of tokens"
        )
    return BinLayout(0, dtype, size_bytes // itemsize)


def _dtype_of(look: bytes) -> str:
    """Of tokens without a header: of 2 bytes, unless each second number of 2 bytes is too small.

    The lower two bytes of larger numbers take all values, the upper ones next to none; of numbers
    of 2 bytes those in even places are as those in odd places.
    """
    halves = np.frombuffer(look[: len(look) // 8 * 8], "<u2")
    low, high = halves[::2], halves[1::2]
    if len(low) < _LOOK_TOKENS:
        return "<u2"
    if not high.any() and not low[1::2].any() and low.any():
        return "<i8"
    is_wide = low.any() if not high.any() else high.max() < _HIGH_HALVES and low.max() >= 256
    return "<u4" if is_wide else "<u2"


def _with_index(path: Path, index: Path, size_bytes: int) -> BinLayout:
    with open_file(index) as file:
        header = file.read(_INDEX.size)
        if len(header) < _INDEX.size or not header.startswith(_INDEX_MAGIC):
            raise DataError(
                f"{index} is no index of Megatron-LM (it does not begin with MMIDIDX), so the size "
                f"of the tokens in {path.name} is unknown: write it again, or take it away"
            )
        _, version, code, num_sequences, _ = _INDEX.unpack(header)
        lengths = np.frombuffer(file.read(4 * num_sequences), "<i4")
    if version != 1 or code not in _INDEX_DTYPES:
        raise DataError(
            f"{index} is of version {version} with dtype {code}: twinstream reads version 1 with "
            f"whole numbers (dtypes {', '.join(map(str, _INDEX_DTYPES))})"
        )
    dtype, num_tokens = _INDEX_DTYPES[code], int(lengths.sum(dtype=np.int64))
    _require_size(path, size_bytes, num_tokens, 0, dtype, index.name)
    return BinLayout(0, dtype, num_tokens)


def _with_header(
    path: Path, magic: int, version: int, num_tokens: int, size_bytes: int
) -> BinLayout:
    known_version, dtype = _LLMC[magic]
    if version != known_version:
        raise DataError(
            f"{path} is a file of llm.c of version {version}; with the magic number {magic} "
            f"twinstream reads version {known_version}: write it again with today's llm.c"
        )
    _require_size(path, size_bytes, num_tokens, _HEADER_BYTES, dtype, "its header")
    return BinLayout(_HEADER_BYTES, dtype, num_tokens)


def _require_size(
    path: Path, size_bytes: int, num_tokens: int, first_byte: int, dtype: str, source: str
) -> None:
    expected_bytes = first_byte + num_tokens * np.dtype(dtype).itemsize
    if size_bytes != expected_bytes:
        raise DataError(
            f"{path} has {size_bytes} bytes, and {source} says {num_tokens} tokens, which are "
            f"{expected_bytes} bytes: the file is cut off; copy or write it again"
        )


def read_bin(path: Path, first: int, end: int) -> NDArray[np.int32]:
    """Tokens [first, end) of a file.

    Raises:
        DataError: as `bin_layout`; an id is negative or needs more than 31 bits.
    """
    layout = bin_layout(path)
    itemsize = np.dtype(layout.dtype).itemsize
    try:
        tokens = np.fromfile(
            path, layout.dtype, count=end - first, offset=layout.first_byte + first * itemsize
        )
    except OSError as error:
        raise unreadable(path, error) from None
    impossible = np.flatnonzero((tokens < 0) | (tokens > _LARGEST_ID))
    if len(impossible):
        raise DataError(
            f"{path}, token {first + int(impossible[0])}: id {tokens[impossible[0]]} is no "
            f"token's; the file is damaged, or its tokens are not of {itemsize} bytes"
        )
    return tokens.astype(np.int32)
