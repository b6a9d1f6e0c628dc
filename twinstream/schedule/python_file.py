"""Objects of a person's own Python file, named FILE.py:NAME.

A document may name such a file, too. It is run only where the person at this process has named it,
or has said that the document is trusted (`is_named`).
"""

import hashlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_bytes, read_text, real_path
from twinstream.schedule.node import Node

_named: set[str] = set()  # digests of what was named in this process: consent is the process's


def note_named(sha256: str) -> None:
    """The person at this process has named code with this digest."""
    _named.add(sha256)


def is_named(sha256: str) -> bool:
    """Whether code was named here, and not by a document alone."""
    return sha256 in _named


class OwnCodeExitedError(TwinstreamError):
    """A person's own code has tried to end the process."""


def told_exit(error: SystemExit) -> str:
    """Who called sys.exit, in a sentence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{last.filename}, line {last.lineno} ends the process (sys.exit, code {error.code!r}) "
        "before the command is done: leave that out"
    )


class OwnFunction(Node):
    """A function of a person's own file, which may not change meanwhile."""

    path: str
    function: str
    sha256: str

    @classmethod
    def of(cls, text: str, **more: Any) -> Self:
        """The function that `FILE.py:FUNCTION` names.

        Raises:
            TwinstreamError: the text is not of that form.
            DocumentError: the file cannot be read.
        """
        found = split_name(text)
        if found is None:
            raise TwinstreamError(f"'{text}' names no function of a file: write FILE.py:FUNCTION")
        path = real_path(found[0])
        digest = digest_of(path)
        note_named(digest)
        return cls(path=str(path), function=found[1], sha256=digest, **more)

    def load(self) -> Any:
        """The function itself.

        Raises:
            TwinstreamError: the file is not what it was, or cannot be run.
        """
        path = Path(self.path)
        if digest_of(path) != self.sha256:
            raise TwinstreamError(f"{path} is not what it was: plan again")
        return object_of_file(path, self.function)


def digest_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        DocumentError: it cannot be read.
    """
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror}") from None


def split_name(name: str) -> tuple[Path, str] | None:
    """The file and the object of `FILE.py:NAME`; None where it is not of that form.

    >>> split_name("mine.py:POLICY")
    (PosixPath('mine.py'), 'POLICY')
    >>> split_name("optimal")
    """
    path, colon, inside = name.rpartition(":")
    return (Path(path), inside) if colon and path.endswith(".py") else None


def object_of_file(path: Path, name: str) -> Any:
    """Run the file, and return its object of that name.

    Raises:
        DocumentError: the file cannot be read.
        TwinstreamError: running it fails, or it has no such object.
    """
    try:
        read_bytes(path)
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror}") from None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(real_path(path).parent)  # whose other files it may import, as a script may
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise OwnCodeExitedError(told_exit(error)) from error
    except Exception as error:
        raise TwinstreamError(f"{path} fails with {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise TwinstreamError(f"{path} has no '{name}'")
    return getattr(module, name)


def digest_of_code(folder: Path) -> str:
    """Of a folder's config.json and its files of Python.

    Raises:
        DocumentError: one of them cannot be read.
    """
    files = [folder / "config.json", *sorted(folder.glob("**/*.py"))]
    return hashlib.sha256(" ".join(map(digest_of, files)).encode()).hexdigest()


def require_own_code(folder: Path) -> None:
    """Refuse a config whose code is another repository's: nobody has read that.

    Raises:
        TwinstreamError: a class of `auto_map` is written REPOSITORY--MODULE.CLASS.
    """
    found = json.loads(read_text(folder / "config.json", "utf-8-sig"))
    elsewhere = [name for name in _auto_mapped(found) if "--" in name]
    if elsewhere:
        raise TwinstreamError(
            f"{folder / 'config.json'} takes code from another repository, {elsewhere[0]}, which "
            "--trust-remote-code does not cover: put its files into the folder, and name them "
            "without '--'"
        )


def _auto_mapped(value: Any) -> Iterator[str]:
    """Names of classes in `auto_map`, of parts of a config, too."""
    if isinstance(value, list):
        for one in value:
            yield from _auto_mapped(one)
    if not isinstance(value, dict):
        return
    for key, inside in value.items():
        if key == "auto_map" and isinstance(inside, dict):
            listed = [one if isinstance(one, list | tuple) else [one] for one in inside.values()]
            yield from (str(name) for names in listed for name in names)
        else:
            yield from _auto_mapped(inside)
