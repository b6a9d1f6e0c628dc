"""How a campaign's commands end."""

import os
import sys
from collections.abc import Callable, Sequence

import typer

from twinstream.schedule.errors import TwinstreamError

_USER_ERROR = 2
_INTERRUPTED = 130


def run_app(
    command: typer.Typer | Callable[..., object], arguments: Sequence[str] | None
) -> None:  # fmt: skip
    """Run a command line, by default the process's own, and end as a command does."""
    app = command
    if not isinstance(app, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(command)
    run_command(lambda: app(args=None if arguments is None else list(arguments)))


def run_command(command: Callable[[], object]) -> None:
    """A user error is one message on stderr and exit code 2; Ctrl-C ends it quietly."""
    try:
        command()
    except TwinstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)
