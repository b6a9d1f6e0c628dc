"""How the command line begins and ends: imports, Ctrl-C, standard output that cannot be written."""

import errno
import inspect
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from typing import get_args, get_type_hints

import pytest
import typer

import twinstream
from tests.front_door.command_line import call, error_of
from twinstream.cli import app
from twinstream.commands.output import print_report, printable

SLOW = ("numpy", "pydantic", "rich", "scipy", "typer")
# Sends itself SIGINT as soon as the module is looked for, however it is imported.
INTERRUPTED_AT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
wanted = sys.argv[1]

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Watch())
from twinstream.__main__ import main
sys.argv[1:] = ["models"]
main()
"""


def ran(*command: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], stderr=subprocess.PIPE, text=True, check=False, **options
    )  # fmt: skip


@pytest.mark.parametrize("module", ["typer", "pydantic", "rich.table", "twinstream.cli"])
def test_ctrl_c_while_modules_load_ends_quietly_with_130(module):
    done = ran("-c", INTERRUPTED_AT, module, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_slow_is_imported_before_ctrl_c_is_heeded():
    script = f"import sys, twinstream.__main__; print([m for m in {SLOW} if m in sys.modules])"
    done = ran("-c", script, stdout=subprocess.PIPE)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("command", [["models"], ["machines", "--json"], ["--help"], ["--version"]])
def test_a_full_standard_output_is_one_message_and_exit_code_2(command):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = ran("-m", "twinstream", *command, stdout=full)
    message = f"error: cannot write to standard output: {os.strerror(errno.ENOSPC)}\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_closed_standard_output_is_one_message_and_exit_code_2():
    shell = ["sh", "-c", '"$0" -m twinstream models >&-', sys.executable]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed\n")


@pytest.mark.parametrize("module", ["demo", "study.sweep.cells"])
def test_a_module_that_imports_the_api_can_be_the_first_to_be_imported(module):
    done = ran("-c", f"import twinstream.{module}", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_packages():
    assert twinstream.__version__ == version("twinstream")
    done = ran("-m", "twinstream", "--version", stdout=subprocess.PIPE)
    assert done.stdout == f"twinstream {twinstream.__version__}\n"


def test_every_public_name_is_there_and_none_is_hidden_by_a_module():
    modules = {module.name for module in pkgutil.iter_modules(twinstream.__path__)}
    for name in twinstream.__all__:
        assert name in dir(twinstream)
        assert name not in modules
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twinstream.nothing  # noqa: B018


def test_every_public_name_and_its_methods_have_docstrings():
    public = {name: getattr(twinstream, name) for name in twinstream.__all__}
    methods = {
        f"{name}.{inside}": one
        for name, found in public.items()
        for inside, one in vars(found).items()
        if not inside.startswith(("_", "model_")) and _is_method(one)
    }
    without = [name for name, one in (public | methods).items() if not one.__doc__]
    assert without == ["Evaluator"]  # an alias


def test_everything_that_a_public_function_takes_or_returns_is_public():
    public = {name: getattr(twinstream, name) for name in twinstream.__all__}
    functions = [one for one in public.values() if inspect.isfunction(one)]
    functions += [twinstream.PlanRequest.of, twinstream.Planner.__init__, twinstream.Planner.plan]
    assert len(functions) > 12
    for function in functions:
        namespace = {**vars(inspect.getmodule(function)), "State": dict}
        for hint in get_type_hints(function, namespace).values():
            for kind in _classes_in(hint):
                assert kind in public.values(), (function, kind)


def _classes_in(hint: object) -> "list[object]":
    """The project's own classes in an annotation."""
    if inside := get_args(hint):
        return [kind for one in inside for kind in _classes_in(one)]
    if isinstance(hint, list):  # what a Callable takes
        return [kind for one in hint for kind in _classes_in(one)]
    return [hint] if getattr(hint, "__module__", "").startswith("twinstream") else []


def _is_method(one: object) -> bool:
    return callable(one) or isinstance(one, property | classmethod)


def with_output() -> list[str]:
    """Commands that take `-o`."""
    group = typer.main.get_command(app)
    return [
        name
        for name in group.commands
        if any("-o" in parameter.opts for parameter in group.get_command(None, name).params)
    ]


@pytest.mark.parametrize("command", with_output())
def test_a_dash_is_no_output(command):
    assert "cannot write -: standard output has the tables" in error_of(command, "-o", "-")


def test_a_name_cannot_send_a_terminal_anything(capsys):
    assert printable("\x1b[31mred\x07\u009b\udcff\n\tnext") == (
        "\ufffd[31mred\ufffd\ufffd\ufffd\n\tnext"
    )
    print_report("\x1b[31mred")
    assert "\x1b" not in capsys.readouterr().out
    outcome = call("plan", "--model", "\x1b[31mred", "--machine", "h100", "--seq-len", 64)
    assert outcome.code == 2 and "\x1b" not in outcome.err


def test_a_full_disk_after_a_run_costs_neither_losses_nor_speed(files, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    output = tmp_path / "measured.json"
    run = ("run", files.schedule, "--steps", 2, "--backend", "cpu", "-o", output)
    outcome = call(*run)
    assert outcome.code == 2
    assert "loss of 2 steps" in outcome.out and "tokens/s" in outcome.out
    assert outcome.err.endswith(f"error: cannot write {output}: No space left on device\n")
    assert list(tmp_path.iterdir()) == []
