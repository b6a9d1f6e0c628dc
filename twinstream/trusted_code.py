"""Which Python a document would run, and whether anybody here has allowed it."""

from collections.abc import Iterator
from pathlib import Path

from twinstream.models.model import AnyModel
from twinstream.models.recipe import Recipe
from twinstream.models.update_rules import OwnRule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import is_named


class UntrustedCodeError(TwinstreamError):
    """A document names Python that nobody at this process has named or allowed."""


def require_trusted(document: str, model: AnyModel, recipe: Recipe, *, trusts: bool) -> None:
    """Refuse to run what a document alone names, whoever wrote it.

    Args:
        document: what it is called in the message.
        trusts: the person has said so, for this document and now.

    Raises:
        UntrustedCodeError: it would run a file that was not named here.
    """
    for path, digest in _code_of(model, recipe):
        if not trusts and not is_named(digest):
            raise UntrustedCodeError(
                f"{document} would run the Python of {Path(path).absolute()}, which it names by "
                "itself: read it, and say so with --trust-remote-code (in Python "
                "RunSettings(trusts_code=True))"
            )


def _code_of(model: AnyModel, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Path and digest of each file or folder of Python."""
    yield from model.python_files
    if isinstance(recipe.update, OwnRule):
        yield recipe.update.path, recipe.update.sha256
