"""Documents in and out of files, and the lock of a folder that one process writes."""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node

Document = TypeVar("Document", bound=Node)
LOCK = ".lock"
_MOST_BYTES = 1 << 32  # of a document; of the small files that people write themselves:
_MOST_TEXT_BYTES = 1 << 28
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.(partial|incomplete)$")  # what a kill leaves of a write
_HASHING_THREADS = 8
_NAME_CHARS = 40  # of a name, so that that of a neighbour is not too long


class DocumentError(TwinstreamError):
    """A file is missing, unreadable, or not the document it should be."""


def real_path(path: str | Path) -> Path:
    """Absolute and without links; a link that leads to itself stays, for who opens it to tell of.

    `Path.resolve` raises a RuntimeError at such a one before Python 3.13.
    """
    return Path(os.path.realpath(path))


def open_file(path: str | Path) -> BufferedReader:
    """A regular file, for reading: a pipe, a terminal or a device may have no end.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "no path has a null byte", str(path).replace("\0", "\\0"))
    file = FileIO(path, "rb", opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return BufferedReader(file)


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to is opened too, instead of waiting."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: str | Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """A whole file.

    Raises:
        OSError: as `open_file`; or it is larger than that.
    """
    with open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > most_bytes:
            problem = f"it has {size_bytes} bytes, and at most {most_bytes} are read"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read()


def digests_of(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of files, several at a time.

    Raises:
        OSError: as `open_file`.
    """

    def digest(path: Path) -> str:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return list(threads.map(digest, paths))


def stamp_of(path: Path) -> list[int]:
    """What changes with every change of a file: nobody can put back the time of its last one.

    Raises:
        OSError: there is no such file.
    """
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """A small file's text.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is in another encoding.
    """
    return read_bytes(path, _MOST_TEXT_BYTES).decode(encoding)


def parse_toml(text: str) -> dict[str, Any]:
    """
    Raises:
        tomllib.TOMLDecodeError: it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("arrays or tables are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # a whole number of thousands of digits
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from None


def read_document(kind: type[Document], path: Path) -> Document:
    """Read and validate a JSON document.

    Raises:
        DocumentError: names the file, the place in it, and the first things that are wrong.
    """
    try:
        text = read_bytes(path)
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {reason_of(error)}") from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        _require_version(kind, text, path)
        found = error.errors(include_url=False, include_input=False)
        shown = "; ".join(f"{_place(e['loc'])}: {e['msg']}" for e in found[:3])
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise DocumentError(
            f"{path} is not a valid {called(kind)} document: {shown}{more}"
        ) from None


def called(kind: type[Node]) -> str:
    """Return what people call a kind of document; a rank's is one device's alone.

    >>> called(type("RankSchedule", (Node,), {})), called(type("StepBound", (Node,), {}))
    ('schedule', 'step bound')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower().removeprefix("rank ")


def _require_version(kind: type[Document], text: bytes, path: Path) -> None:
    """A document of another format is not looked at any further."""
    field = kind.model_fields.get("schema_version")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if field is None or not isinstance(document, dict):
        return
    found = document.get("schema_version", field.default)
    if isinstance(found, int) and found > field.default:
        raise DocumentError(
            f"{path} is a {called(kind)} of format {found}, and this twinstream reads "
            f"format {field.default}: update twinstream"
        )


def write_document(document: Node, path: Path) -> None:
    """Write JSON; as `write_bytes`."""
    write_text(document.model_dump_json(exclude_none=True) + "\n", path)


def write_text(text: str, path: str | Path) -> None:
    """Write UTF-8; as `write_bytes`. A lone surrogate, which no text has, is written as `?`."""
    write_bytes(text.encode("utf-8", errors="replace"), path)


def write_lines(lines: Iterable[str], path: str | Path) -> None:
    """Write lines of UTF-8 as they come; as `write_bytes`."""
    _write((line.encode("utf-8", errors="replace") + b"\n" for line in lines), path)


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a whole file: what was there stays as it is until all of the new is on the disk.

    The new content goes to a neighbour with a name of its own, which is synced and takes the
    file's place; on any error it is removed. Writers of one file do not disturb one another: the
    last has it. A link stays one, and a file's permissions stay.

    Raises:
        DocumentError: it cannot be written.
    """
    _write([content], path)


def _write(pieces: Iterable[bytes], path: str | Path) -> None:
    try:
        target = Path(os.path.realpath(path))
        partial = neighbour(target, "partial")
        try:
            with open(partial, "xb") as file:  # noqa: PTH123 - the one place that writes files
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # a ValueError is of a name that can be no file's
        raise DocumentError(f"cannot write {path}: {reason_of(error)}") from None


def neighbour(path: Path, kind: str) -> Path:
    """A name beside that of a file or folder that nobody has, for what takes its place."""
    return path.with_name(f"{path.name[:_NAME_CHARS]}.{uuid4().hex}.{kind}")


def open_for_append(path: Path) -> FileIO:
    """A file of this program's own: a link would lead to somebody else's, and a pipe may hang.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link: remove it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(handle, "a+b", buffering=0)


def is_leftover(path: Path) -> bool:
    """Whether a kill left it of a file or folder being written, or of `only_writer`."""
    return path.name == LOCK or _PARTIAL.search(path.name) is not None


def require_no_writer(folder: Path) -> None:
    """
    Raises:
        DocumentError: a process holds the folder (`only_writer`); says which.
    """
    with suppress(OSError), open_file(folder / LOCK) as file:
        if _is_locked(file):
            raise _held(folder, file)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds a folder, which is made, against other processes; the lock goes with this one.

    Raises:
        DocumentError: another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_for_append(folder / LOCK)
    except (FileExistsError, NotADirectoryError):
        raise DocumentError(
            f"{folder} cannot be a folder: there is a file of that name on the way; choose another"
        ) from None
    except OSError as error:
        problem = reason_of(error)
        if error.filename == str(folder / LOCK):
            raise DocumentError(f"cannot write {folder / LOCK}: {problem}") from None
        raise DocumentError(f"cannot make the folder {folder}: {problem}") from None
    with file:
        if _is_locked(file):
            raise _held(folder, file)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield


def _held(folder: Path, file: BinaryIO) -> DocumentError:
    file.seek(0)
    return DocumentError(
        f"process {file.read(32).decode(errors='replace')} is writing into {folder}: wait for it, "
        "stop it, or choose another folder"
    )


def _is_locked(file: BinaryIO) -> bool:
    """By another; else it is ours until it is closed. Some file systems have no locks."""
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def require_folder(folder: Path) -> None:
    """Find out whether a folder can be made, and a file in it; neither is left.

    Raises:
        DocumentError: it cannot be.
    """
    made: list[Path] = []
    try:
        for one in reversed((folder, *folder.parents)):
            if not one.exists():
                one.mkdir()
                made.append(one)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise DocumentError(f"cannot make the folder {folder}: {reason_of(error)}") from None
    finally:
        for one in reversed(made):
            with suppress(OSError):  # someone else has put something there
                one.rmdir()


def reason_of(error: Exception) -> str:
    """Return what went wrong, in the system's words."""
    return getattr(error, "strerror", None) or str(error)


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(step) for step in location) or "document"
