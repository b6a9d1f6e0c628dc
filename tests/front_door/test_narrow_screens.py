"""On narrow terminals columns stand below one another, and no number is cut."""

import io
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.front_door.command_line import TINY_STEP, call
from tests.front_door.test_looks import what_if
from twinstream.commands import output
from twinstream.fidelity.fit_report import observation_table, parameter_table
from twinstream.hardware_profiles.calibration.fitting import (
    Fit,
    FittedObservation,
    FittedParameter,
    Observation,
)
from twinstream.hardware_profiles.calibration.parameters import Parameter
from twinstream.hardware_profiles.loader import load_machine
from twinstream.screens.fitted_table import FittedTable
from twinstream.study.whatif.screen import sensitivities_table

WIDTHS = (100, 80, 60)
TIGHT = (*TINY_STEP, "--machine", "cpu", "--device-mem", "6MiB")
COMMANDS = {
    "machines": ("machines",),
    "models": ("models",),
    "clusters": ("clusters",),
    "plan": ("plan", *TIGHT, "--policy", "layer_offload"),
    "cost": ("cost", "llama3-70b", "--cluster", "h100_dgx", "--pp", 8, "--tp", 8),
    "verify": ("verify", "SCHEDULE"),
    "simulate": ("simulate", "SCHEDULE"),
    "compare": ("compare", "SCHEDULE", "PREDICTED", "MEASURED", "--machine", "cpu"),
    "plan of a cluster": (
        "plan",
        "--cluster",
        "h100_dgx",
        "--gpus",
        16,
        "--model",
        "8b",
        "--seq-len",
        8192,
        "--global-batch",
        32,
        "--pp",
        2,
        "--tp",
        8,
        "--tokens",
        "1e12",
        "--price-per-gpu-hour",
        2.5,
    ),
    "what if": (
        "whatif",
        *TIGHT,
        "--policy",
        "streaming",
        "--set",
        "device_mem=8MiB",
        "--set",
        "pcie_h2d_bytes_per_s=16e9",
        "--tokens",
        "1e12",
        "--price-per-gpu-hour",
        2.5,
    ),
    "fit": (
        "fit",
        "tiny",
        "--machine",
        "h100",
        "--machine",
        "rtx4090",
        "--seq-len",
        "64,128",
        "--tokens-per-step",
        256,
        "--jobs",
        1,
        "--effort",
        "quick",
    ),
    "validate": ("validate", "--machine", "rtx3090", "--measured", "examples/measured.csv"),
}


class Screens(dict[int, Console]):
    """A console of each width, in place of the one that a command prints to."""

    is_terminal = True

    def __init__(self) -> None:
        for width in WIDTHS:
            self[width] = Console(
                width=width, file=io.StringIO(), highlight=False, markup=False, legacy_windows=False
            )

    def print(self, part: object) -> None:
        for console in self.values():
            console.print(part)

    def check(self) -> None:
        widest, *narrow = (console.file.getvalue() for console in self.values())
        assert numbers_of(widest)
        for width, shown in zip(WIDTHS[1:], narrow, strict=True):
            assert "\u2026" not in shown  # an ellipsis
            assert max(map(len, shown.splitlines())) <= width
            assert numbers_of(widest) - numbers_of(shown) == Counter()


def numbers_of(text: str) -> Counter[str]:
    """Words with a digit, how often each is there; of paths and long names a line may break."""
    words = re.findall(r"\S*\d\S*", text)
    return Counter(word for word in words if len(word) < 24 and "/" not in word)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_screen_cuts_a_number(name, files, monkeypatch):
    places = {"SCHEDULE": files.schedule, "PREDICTED": files.predicted, "MEASURED": files.measured}
    screens = Screens()
    monkeypatch.setattr(output, "screen", lambda: screens)
    outcome = call(*(places.get(str(part), part) for part in COMMANDS[name]))
    assert outcome.code == 0, outcome.err
    screens.check()


def test_no_what_if_cuts_a_number():
    screens = Screens()
    screens.print(sensitivities_table(what_if((-0.9, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0, 3.0))))
    screens.check()


def test_no_calibration_cuts_a_number():
    known = (("sustained", 0.01), ("attention_backward_head_dim_128", 0.01), ("kept", 1.0))
    parameters = tuple(
        FittedParameter(Parameter(name, "", (), 1.0, 0.5, 2.0), 0.71, 0.78, 1.1, width, 14)
        for name, width in known
    )
    times = FittedObservation(Observation("H100, 1B, 512 tokens", "", 9.5), 9.1, 9.4, 9.3)
    fit = Fit(load_machine("h100"), parameters, (times,), 3)
    screens = Screens()
    screens.print(parameter_table(fit))
    screens.print(observation_table(fit))
    screens.check()
    assert "too little of kept" in screens[60].file.getvalue()


heads = st.lists(st.text("abc ", min_size=1, max_size=24).map(str.strip), min_size=1, max_size=8)
figures = st.lists(st.integers(0, 10**9).map("{:,}".format), min_size=1, max_size=3)


@given(heads=heads, figures=figures, width=st.integers(40, 100))
def test_every_number_of_every_row_is_there(heads, figures, width):
    table = FittedTable("name", title="title")
    for head in heads:
        table.add_column(head, justify="right")
    for index, figure in enumerate(figures):
        table.add_row(f"row {index}", *[f"{figure} GB"] * len(heads))
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert shown.count("title") == 1
    for figure in set(figures):
        assert shown.count(f" {figure} GB") >= figures.count(figure) * len(heads)


@pytest.mark.parametrize("command", ["fit", "plan", "whatif", "train", "run", "cost"])
def test_no_sentence_of_help_is_cut_or_begins_without_its_noun(command, monkeypatch) -> None:
    """At 80 columns the last column of a box is a sentence's, whole."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip("│ ") for line in call(command, "--help-all").out.splitlines()]
    assert len(lines) > 25
    assert not [line for line in lines if line.endswith("…") or "  Of " in line]


def test_lines_in_a_pipe_have_no_blanks_at_their_ends() -> None:
    told = call("plan", *TINY_STEP, "--machine", "cpu").out
    assert told and not [line for line in told.splitlines() if line != line.rstrip()]
