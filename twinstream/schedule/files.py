"""Documents in and out of files."""

import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar
from uuid import uuid4

from pydantic import ValidationError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node

Document = TypeVar("Document", bound=Node)
_NAME_CHARS = 40  # of a name, so that that of a neighbour is not too long


class DocumentError(TwinstreamError):
    """A file is missing, unreadable, or not the document it should be."""


def read_document(kind: type[Document], path: Path) -> Document:
    """Read and validate a JSON document.

    Raises:
        DocumentError: names the file, the place in it, and the first things that are wrong.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}") from None
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
    """How people call a kind of document.

    >>> called(type("ClusterSchedule", (Node,), {}))
    'cluster schedule'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


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


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a whole file: what was there stays as it is until all of the new is on the disk.

    The new content goes to a neighbour with a name of its own, which is synced and takes the
    file's place; on any error it is removed. Writers of one file do not disturb one another: the
    last has it. A link stays one, and a file's permissions stay.

    Raises:
        DocumentError: it cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))
        partial = target.with_name(f"{target.name[:_NAME_CHARS]}.{uuid4().hex}.partial")
        try:
            with open(partial, "xb") as file:  # noqa: PTH123 - the one place that writes files
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # a ValueError is of a name that can be no file's
        raise DocumentError(f"cannot write {path}: {told(error)}") from None


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
        raise DocumentError(f"cannot make the folder {folder}: {told(error)}") from None
    finally:
        for one in reversed(made):
            with suppress(OSError):  # someone else has put something there
                one.rmdir()


def told(error: Exception) -> str:
    """What went wrong, in the system's words."""
    return getattr(error, "strerror", None) or str(error)


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(step) for step in location) or "document"
