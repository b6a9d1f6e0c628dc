"""The lines, or the piece of a text, that belong to a range of bytes of a file."""

from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from twinstream.data.data_error import DataError, unreadable
from twinstream.schedule.files import open_file

_LOOK_BYTES = 1 << 16  # for a line's end; a text that has none for so long is cut at a space
_PIECE_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"  # which some programs put before UTF-8 text


def lines_in(path: Path, first: int, end: int) -> tuple[bytes, int]:
    """The whole lines that begin in [first, end), and the byte at which they do."""
    try:
        with open_file(path) as file:
            start = _line_start(file, first, end)
            file.seek(start)
            content = file.read(max(0, end - start))
            if content and not content.endswith(b"\n"):
                content += file.readline()
    except OSError as error:
        raise unreadable(path, error) from None
    return _unmarked(content, start)


def digest_of_range(path: Path, first: int, end: int) -> str:
    """Return a hash of the bytes [first, end) of a file.

    Raises:
        DataError: it cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        with open_file(path) as file:
            file.seek(first)
            for start in range(first, end, _PIECE_BYTES):
                digest.update(file.read(min(_PIECE_BYTES, end - start)))
    except OSError as error:
        raise unreadable(path, error) from None
    return digest.hexdigest()


def text_in(path: Path, first: int, end: int) -> tuple[str, int]:
    """The text from the first line's end after byte `first` to that after `end`, and its byte.

    Where lines are very long it begins and ends at a space. The ranges of a file give all of it.

    Raises:
        DataError: it is not UTF-8.
    """
    content, start = text_bytes_in(path, first, end)
    return decoded(content, path, start), start


def text_bytes_in(path: Path, first: int, end: int) -> tuple[bytes, int]:
    """Return the bytes of what `text_in` returns, not decoded yet."""
    try:
        with open_file(path) as file:
            start, stop = _text_cut(file, first), _text_cut(file, end)
            file.seek(start)
            content = file.read(stop - start)
    except OSError as error:
        raise unreadable(path, error) from None
    return _unmarked(content, start)


def decoded(content: bytes, path: Path, first_byte: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {first_byte + error.start} is "
            f"0x{content[error.start]:02x}; convert it: iconv -f ENCODING -t UTF-8"
        ) from None


def line_number(path: Path, byte: int) -> int:
    """Return the number of the line that begins at a byte, from 1."""
    lines, left = 1, byte
    with open_file(path) as file:
        while left and (content := file.read(min(left, 1 << 20))):
            lines += content.count(b"\n")
            left -= len(content)
    return lines


def _unmarked(content: bytes, start: int) -> tuple[bytes, int]:
    if start == 0 and content.startswith(_MARK):
        return content[len(_MARK) :], len(_MARK)
    return content, start


def _line_start(file: BinaryIO, offset: int, end: int) -> int:
    """The first line that begins at an offset or after it, but `end` if that is no later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    return offset - 1 + len(file.readline(end - offset + 1))


def _text_cut(file: BinaryIO, offset: int) -> int:
    """Where a text may be cut, at an offset or after it; 0 stays 0."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    look = file.read(_LOOK_BYTES)
    if (line_end := look.find(b"\n")) >= 0:
        return offset + line_end
    if len(look) < _LOOK_BYTES:
        return offset - 1 + len(look)
    if (space := look.find(b" ", 1)) >= 0:
        return offset - 1 + space
    inside = next((i for i in range(1, 5) if look[i] & 0xC0 != 0x80), 1)
    return offset - 1 + inside
