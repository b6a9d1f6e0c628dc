"""Objects of a person's own Python file, named FILE.py:NAME."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import DocumentError, read_bytes


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
    folder = str(path.resolve().parent)  # whose other files it may import, as a script may
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TwinstreamError(f"{path} fails with {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise TwinstreamError(f"{path} has no '{name}'")
    return getattr(module, name)
