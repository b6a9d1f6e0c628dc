"""Files that are one JSON array of rows, read piece by piece."""

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from twinstream.data.data_error import DataError, unreadable
from twinstream.schedule.files import open_file

_READ_BYTES = 1 << 20
_SPACE = " \t\r\n"
_MARK = "\ufeff"  # which some programs put before UTF-8 text


def begins_an_array(path: Path) -> bool:
    """Return whether the first character of a file, after white space, is a bracket."""
    with open_file(path) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def rows_within(path: Path, first: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows that begin at bytes [first, end), each with that byte.

    `first` is 0 or where a row begins. A file that ends before its array does is refused.

    Raises:
        DataError: the file cannot be read, is no JSON, or has something else than objects.
    """
    try:
        with open_file(path) as file:
            file.seek(first)
            text = _Text(file, path, first)
            if first == 0:
                text.skip(_MARK)
                text.skip(_SPACE)
                text.skip("[")
            while (char := text.next_char(_SPACE + ",")) != "]" and text.byte < end:
                yield text.byte, text.take_object(char)
    except OSError as error:
        raise unreadable(path, error) from None


class _Text:
    """Text of a file from a byte on, of which only what is not yet taken is held."""

    def __init__(self, file: BinaryIO, path: Path, byte: int) -> None:
        self.byte = byte
        self._file, self._path, self._held, self._at = file, path, "", 0
        self._decoder = getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()

    def next_char(self, skipped: str) -> str:
        """The next character that is none of these; nothing at the file's end."""
        self.skip(skipped)
        return self._held[self._at : self._at + 1]

    def skip(self, skipped: str) -> None:
        while self._at < len(self._held) or self._more(_READ_BYTES):
            char = self._held[self._at]
            if char not in skipped:
                return
            self._at += 1
            self.byte += len(char.encode())

    def take_object(self, first_char: str) -> dict[str, Any]:
        """Read and return the JSON object that begins at this place."""
        wanted = _READ_BYTES
        while first_char == "{":
            try:
                found, stop = self._json.raw_decode(self._held, self._at)
            except RecursionError as error:
                raise self._refused(str(error)) from None
            except ValueError as error:
                if not self._more(wanted):
                    raise self._refused(str(error)) from None
                wanted *= 2  # so that a row is not begun more often than a few times
            else:
                self.byte += len(self._held[self._at : stop].encode())
                self._at = stop
                return found  # type: ignore[no-any-return]
        raise self._refused("a row begins otherwise" if first_char else "the file ends before it")

    def _more(self, size_bytes: int) -> bool:
        content = self._file.read(size_bytes)
        try:
            text = self._decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._path} is not UTF-8 text (behind byte {self.byte}: {error.reason}); "
                "convert it: iconv -f ENCODING -t UTF-8"
            ) from None
        self._held, self._at = self._held[self._at :] + text, 0
        return bool(content)

    def _refused(self, problem: str) -> DataError:
        shown = self._held[self._at : self._at + 60]
        return DataError(
            f"{self._path}, byte {self.byte}: the array of rows is no JSON from here on "
            f'({problem}): {shown!r}; each row needs to be one object, as {{"text": "..."}}'
        )
