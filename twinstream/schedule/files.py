"""Documents in and out of files."""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node

Document = TypeVar("Document", bound=Node)


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
            f"{path} is not a valid {kind.__name__.lower()} document: {shown}{more}"
        ) from None


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
            f"{path} is a {kind.__name__.lower()} of format {found}, and this twinstream reads "
            f"format {field.default}: update twinstream"
        )


def write_document(document: Node, path: Path) -> None:
    """Write JSON; as `write_text`."""
    write_text(document.model_dump_json(exclude_none=True) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write through a temporary neighbour, so that a crash never leaves half a file.

    Raises:
        DocumentError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise DocumentError(f"cannot write {path}: {error.strerror or error}") from None


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(step) for step in location) or "document"
