"""docs/own_model.md, as a reader follows it."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.front_door.command_line import call
from tests.training.small_runs import write_rows
from twinstream.executor.modules import module_kernels

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"


def indented(text: str, start: str) -> str:
    """The indented lines from one on."""
    lines = text[text.index(f"    {start}") :].splitlines()
    last = next(at for at, line in enumerate(lines) if line and not line.startswith("    "))
    return "\n".join(line.removeprefix("    ") for line in lines[:last]) + "\n"


@pytest.mark.filterwarnings("ignore")
def test_writes_of_others_into_the_arena_are_no_changes_of_a_loss(tmp_path, monkeypatch) -> None:
    """Autograd counts writes by storage: a feed of the next round is no change of labels."""
    made = module_kernels._Rows.__init__
    versions: list[int] = []

    def looked_at(rows, bound) -> None:
        made(rows, bound)
        for name, held in (("step_state", rows.loss_scale), ("tokens", rows.labels)):
            before = held._version
            bound.operands[name].bytes.add_(0)
            versions.append(held._version - before)

    monkeypatch.setattr(module_kernels._Rows, "__init__", looked_at)
    (tmp_path / "my_model.py").write_text(indented(PAGE.read_text(), "import torch\n"))
    built, rows = f"{tmp_path}/my_model.py:build", write_rows(tmp_path / "data.jsonl")
    step = ("--seq-len", 64, "--tokens-per-step", 512, "--steps", 1, "--machine", "cpu")
    trained = call("train", built, rows, "-o", tmp_path / "run", "--tokenizer", "bytes", *step)
    assert trained.code == 0 and versions and not any(versions), trained.err


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    page = PAGE.read_text()
    (tmp_path / "my_model.py").write_text(indented(page, "import torch\n"))
    built = f"{tmp_path}/my_model.py:build"
    step = ("--seq-len", 64, "--tokens-per-step", 512)
    assert call("plan", "--model", built, "--machine", "rtx4090", *step).code == 0
    rows, run = write_rows(tmp_path / "data.jsonl"), tmp_path / "run"
    trained = call(
        "train", built, rows, "-o", run, "--tokenizer", "bytes", *step, "--steps", 2,
        "--machine", "cpu", "--lora", "r=2,targets=out",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert len(load_file(run / "model" / "adapter_model.safetensors")) == 8
    again = ("train", built, rows, "-o", tmp_path / "whole", "--tokenizer", "bytes", *step)
    assert call(*again, "--steps", 2, "--machine", "cpu").code == 0
    program = indented(page, "from safetensors.torch import load_model").replace(
        "run/model", str(tmp_path / "whole" / "model")
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
