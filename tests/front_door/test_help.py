"""Help: the usual options fit two screens, all are there on demand, and each is declared once."""

from inspect import get_annotations

import pytest

from tests.front_door.command_line import call
from twinstream.commands.arguments.grouped import options_of
from twinstream.options.option_group import PANELS, OptionGroup, flag_of
from twinstream.options.plan_options import ClusterOptions, PlanOptions
from twinstream.training.options import TrainOptions

_GROUPS = (PlanOptions, ClusterOptions, TrainOptions)


@pytest.mark.parametrize("command", ["plan", "train", "whatif"])
def test_the_usual_options_fit_two_screens_and_the_rest_is_there_on_demand(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    usual, whole = call(command, "--help").out, call(command, "--help-all").out
    lines = usual.splitlines()
    assert len(lines) <= 100 and max(map(len, whole.splitlines())) <= 100
    hidden = int(lines[-1].split()[0])
    assert f"{command} --help-all" in lines[-1]
    rows = [line for line in whole.splitlines() if line.startswith("  --")]
    assert hidden == len(rows) - sum(line.startswith("  --") for line in lines) > 5
    assert (
        usual.index("--seq-len") and "--chunk-tokens" not in usual and "--chunk-tokens N" in whole
    )


def test_help_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, call("train", "--help-all").out.splitlines())) <= 60


@pytest.mark.parametrize("group", _GROUPS)
def test_every_flag_says_what_it_does_in_a_panel_of_the_list(group: type[OptionGroup]):
    for name, field in group.model_fields.items():
        extra = field.json_schema_extra
        if field.description is None:
            assert name in ("model", "data", "output")  # arguments
            continue
        assert isinstance(extra, dict) and extra["panel"] in PANELS, name
        assert field.description[0].isalnum() and field.description.endswith("."), name


def test_options_that_commands_share_are_one_declaration():
    """But for the model, machine and sequence length, which mean less to a run."""
    shared = set(PlanOptions.model_fields | ClusterOptions.model_fields)
    differ = {
        name for name in shared & set(TrainOptions.model_fields)
        if _declared(name, TrainOptions) not in (
            _declared(name, PlanOptions), _declared(name, ClusterOptions),
        )
    }  # fmt: skip
    assert differ == {"model", "machine", "seq_len", "keep"}
    assert len(shared & set(TrainOptions.model_fields)) >= 26


def test_what_was_given_is_told_by_its_flag():
    wanted = PlanOptions(model="tiny", machine="cpu", effort="quick", home=("parameter=host",))
    assert wanted.given() == ["--model", "--home", "--effort"]
    assert flag_of("seq_len") == "--seq-len"
    assert {name for name, _, _ in options_of(PlanOptions)} == set(PlanOptions.model_fields)


def _declared(name: str, group: type[OptionGroup]) -> type[OptionGroup] | None:
    """The class that declares it, the nearest."""
    return next((kind for kind in group.__mro__ if name in get_annotations(kind)), None)
