"""The command line: parse, call one library function, print."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from twinstream.commands.asking import whatif
from twinstream.commands.calibrating import calibrate
from twinstream.commands.catalog import machines, models
from twinstream.commands.comparing import compare
from twinstream.commands.demonstrating import demo
from twinstream.commands.exploring import explore
from twinstream.commands.options import require_own_outputs
from twinstream.commands.output import printable
from twinstream.commands.planning import plan
from twinstream.commands.probing import probe
from twinstream.commands.reporting import report
from twinstream.commands.running import run
from twinstream.commands.simulating import simulate
from twinstream.commands.sweeping import sweep
from twinstream.commands.tracing import trace
from twinstream.commands.validating import validate
from twinstream.commands.verifying import verify
from twinstream.schedule.errors import TwinstreamError

_USER_ERROR = 2
_INTERRUPTED = 130
_QUESTIONS: dict[str, tuple[Callable[..., None], ...]] = {
    "How fast would it train, what should I buy?": (
        models,
        machines,
        plan,
        verify,
        simulate,
        sweep,
        whatif,
        explore,
    ),
    "Train it here": (probe, run, demo),
    "How far off was the prediction?": (compare, report, trace, validate, calibrate),
}


class _Commands(TyperGroup):
    """The commands; Ctrl-C ends the process at once, quietly."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_INTERRUPTED)  # an orderly exit would abort in the streams' threads


class _Command(TyperCommand):
    """A command whose outputs are not among its inputs."""

    def invoke(self, ctx: Any) -> Any:
        require_own_outputs(ctx.params)
        return super().invoke(ctx)


app = typer.Typer(
    name="twinstream",
    cls=_Commands,
    help="Plan, simulate and execute GPU training steps under memory limits, from one schedule.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _question, _commands in _QUESTIONS.items():
    for _command in _commands:
        app.command(rich_help_panel=_question, cls=_Command)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinstream {version('twinstream')}")
        raise typer.Exit


@app.callback()
def _top(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Plan, simulate and execute GPU training steps under memory limits, from one schedule."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user error is one message on stderr and exit code 2."""
    try:
        app(args=None if arguments is None else list(arguments))
    except TwinstreamError as error:
        typer.echo(f"error: {printable(str(error))}", err=True)
        sys.exit(_USER_ERROR)
