"""`python -m benchmarks.gpu` on the CPU, with every stage, twice."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.device.device_side import DeviceSide
from benchmarks.gpu.device.worker import DeviceWorker
from twinstream.executor.probe.process import JobRefused
from twinstream.executor.probe.tasks import kernels
from twinstream.executor.probe.timing import timing
from twinstream.schedule.errors import TwinstreamError

REPO = Path(__file__).parents[3]


class SameProcess(DeviceWorker):
    """The device's side of a campaign without a process of its own."""

    def __init__(self, backend):
        super().__init__(backend)
        self.side = DeviceSide(backend)

    def ask(self, request, kind, limit_s):
        try:
            return self.side.answer(request)
        except TwinstreamError as error:
            raise JobRefused(str(error)) from None

    def close(self):
        self.side.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(command, "DeviceWorker", SameProcess)
    monkeypatch.setattr(kernels, "_SHAPES", kernels._SHAPES[:2])
    monkeypatch.setattr(timing, "_BUDGET_S", 0.005)


def test_the_first_tests_of_a_lent_gpu_are_there():
    for test in command._SMOKE:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (REPO / path).read_text(encoding="utf-8")
    assert all((REPO / path).exists() for path in command._TESTS)


def call(out: Path, *more: str) -> None:
    """Run it; typer ends a command by SystemExit, with 0 or none where all went well."""
    arguments = ["--backend", "cpu", "--size", "tiny", "--jobs", "0", "--out", str(out), *more]
    try:
        command.main(arguments)
    except SystemExit as stop:
        if stop.code:
            raise


# torch.compile warns of its own use of deprecated functions
@pytest.mark.filterwarnings("ignore")
def test_every_stage_runs_and_a_second_call_has_nothing_to_do(tmp_path, capsys):
    gpu_tests = tmp_path / "test_nothing.py"
    gpu_tests.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    out = tmp_path / "out"
    call(out, "--tests", str(gpu_tests), "--commit", "abc123")
    printed = capsys.readouterr().out
    assert "abc123" in printed and "1 passed, 0 failed" in printed
    table = json.loads((out / "table.json").read_text())
    assert [row["cell"].removeprefix("tiny S64 ") for row in table["cells"]] == [
        "offloading", "resident", "resident sdpa_cpu",
    ]  # fmt: skip
    assert table["cells"][0]["whole_error"] is not None
    assert table["facts"]["facts"]["machine"] and table["tests"]["complete"]
    assert len(table["train"]["losses"]) == len(table["train"]["eval_losses"]) == 2
    assert table["train"]["checkpoint_bytes"] > 10**6
    assert "`twinstream train`: 2 steps, loss 5." in printed
    assert [row["peer"].split()[0] for row in table["peers"]] == [
        "plain",
        "compiled",
        "fsdp_offload",
    ]
    for row in table["cells"]:
        assert row["measured_tokens_per_s"] > 0
        assert row["loss"] == pytest.approx(table["peers"][0]["loss"], rel=0.05)
        assert {kind["name"] for kind in row["kinds"]} >= {"block_forward", "block_backward"}
    files = sorted(path.name for path in out.iterdir())
    assert files == ["profile.toml", "results.json", "table.json", "table.md",
                     "timelines.json.gz"]  # fmt: skip
    before = (out / "results.json").read_bytes()
    call(out, "--tests", str(gpu_tests))
    assert (out / "results.json").read_bytes() == before
    assert "..." not in capsys.readouterr().err


def test_what_is_short_has_no_whole_steps_and_no_peers(tmp_path, capsys):
    stages = ("check", "probe", "cells", "peers")
    call(tmp_path, "--size", "short", *(word for stage in stages for word in ("--stage", stage)))
    told = capsys.readouterr()
    assert "eager, head_dim 128, 2 of 64 tokens: same bits twice" in told.err
    outcomes = json.loads((tmp_path / "results.json").read_text())["outcomes"]
    cells = ["tiny S64 offloading", "tiny-experts S64", "tiny S64 lora", "tiny S64 nf4 lora"]
    assert [key for key in outcomes if "tiny" in key] == cells
    assert {outcome["status"] for outcome in outcomes.values()} == {"done"}
    assert "plain tiny" not in told.out


def test_the_tests_of_a_short_lease_are_there_and_have_their_time(tmp_path, monkeypatch):
    assert all((REPO / path).exists() for path in command._TELLING)
    seen = []
    monkeypatch.setattr(command, "_run", lambda settings, *_: seen.append(settings))
    call(tmp_path, "--size", "short")
    call(tmp_path, "--size", "tiny")
    short, tiny = seen
    assert (short.smoke, short.smoke_s) == (command._TELLING, 300.0)
    assert (tiny.smoke, tiny.smoke_s) == (command._SMOKE, 30.0)
    assert short.presets == ("tiny",) and short.host_bytes is None, "on a CPU"
    assert "train" not in short.stages and "check" in short.stages


def test_some_jobs_can_be_asked_for_and_again(tmp_path, capsys):
    call(tmp_path, "--stage", "peers", "--only", "plain", "--only", "fsdp")
    assert "compiled" not in capsys.readouterr().err
    capsys.readouterr()
    call(tmp_path, "--stage", "peers", "--again", "plain", "--only", "plain", "--only", "fsdp")
    told = capsys.readouterr().err
    assert "plain tiny S64: done" in told and "fsdp_offload" not in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "cuda"), "there is no CUDA device here"),
        (("--host-mem", "much", "--size", "full"), "cannot read the size 'much'"),
        (("--attention", "nothing", "--stage", "probe"), "'nothing' is unknown"),
    ],
)
def test_what_cannot_be_is_a_sentence(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        call(tmp_path, *arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
