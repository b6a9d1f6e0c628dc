"""The command line: parse, call one library function, print."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import OwnCodeExitedError, told_exit

_USER_ERROR = 2
_INTERRUPTED = 130
_QUESTIONS = {  # a command, and its module in twinstream.commands
    "How fast would it train, what should I buy?": {
        "models": "models",
        "machines": "models",
        "clusters": "models",
        "trace": "trace",
        "fit": "fit",
        "plan": "plan",
        "verify": "verify",
        "simulate": "simulate",
        "sweep": "sweep",
        "whatif": "whatif",
        "explore": "explore",
        "estimate": "sizing.estimate",
        "fleet": "sizing.fleet",
        "optimum": "sizing.optimum",
        "cost": "cost",
    },
    "Train it here": {
        "train": "runs.train",
        "score": "runs.score",
        "probe": "runs.probe",
        "run": "runs.run",
        "export": "runs.export",
        "demo": "runs.demo",
    },
    "How far off was the prediction?": {
        "compare": "runs.compare",
        "report": "report",
        "validate": "runs.validate",
        "calibrate": "runs.calibrate",
    },
}


_PLAN_FIRST = (
    "run takes a schedule, and {flag} says what to plan: twinstream plan ... -o step.json && "
    "twinstream run step.json"
)


class PlanFirstError(TwinstreamError):
    """What `plan` is asked is asked of a command that takes a plan."""


class _Commands(TyperGroup):
    """The commands, each imported when it is called; Ctrl-C ends the process at once, quietly."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names = [name for commands in _QUESTIONS.values() for name in commands]
        self.commands = dict.fromkeys(names)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self.commands.get(cmd_name) is None and cmd_name in self.commands:
            self.commands[cmd_name] = _imported(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_INTERRUPTED)  # an orderly exit would abort in the streams' threads


class _Command(TyperCommand):
    """A command whose outputs are not among its inputs, and that takes a model in either way."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from twinstream.commands.arguments.help_text import HELP_ALL
        from twinstream.commands.arguments.understood import model_where_it_is_read

        if HELP_ALL in args:
            typer.echo(self._help(ctx, whole=True))
            raise typer.Exit
        if self.name == "run":
            self._refuse_to_plan(args)
        return super().parse_args(ctx, model_where_it_is_read(self.params, args))

    def _refuse_to_plan(self, args: list[str]) -> None:
        given = {word.partition("=")[0] for word in args if word.startswith("--")}
        if beside := given - _flags(self):
            for flag in sorted(beside & _flags(_imported("plan"))):
                raise PlanFirstError(_PLAN_FIRST.format(flag=flag))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(self._help(ctx, whole=False))

    def _help(self, ctx: Any, *, whole: bool) -> str:
        from twinstream.commands.arguments.help_text import help_text

        takes = self.collect_usage_pieces(ctx)
        return help_text(self, ctx.command_path, takes, whole=whole)

    def invoke(self, ctx: Any) -> Any:
        from twinstream.commands.arguments.outputs import require_own_outputs

        require_own_outputs(ctx.params)
        try:
            return super().invoke(ctx)
        except SystemExit as error:  # commands end by typer.Exit
            raise OwnCodeExitedError(told_exit(error)) from None


app = typer.Typer(
    name="twinstream",
    cls=_Commands,
    help="Plan, simulate and execute GPU training steps under memory limits, from one schedule.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _imported(name: str) -> Any:
    """The command of a name, from its module of `twinstream.commands`."""
    question = next(question for question, names in _QUESTIONS.items() if name in names)
    module = import_module(f"twinstream.commands.{_QUESTIONS[question][name]}")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    found = getattr(module, name)
    from twinstream.commands.arguments.understood import understood

    if isinstance(found, typer.Typer):  # a command of several
        for each in found.registered_commands:
            assert each.callback is not None
            each.callback, each.cls = understood(each.callback), _Command
        alone.add_typer(found, name=name, rich_help_panel=question)
        return typer.main.get_group(alone).commands[name]
    alone.command(rich_help_panel=question, cls=_Command)(understood(found))
    return typer.main.get_command(alone)


def _flags(command: Any) -> set[str]:
    return {flag for one in command.params for flag in one.opts}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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
        from twinstream.commands.output import printable

        typer.echo(f"error: {printable(str(error))}", err=True)
        sys.exit(_USER_ERROR)
