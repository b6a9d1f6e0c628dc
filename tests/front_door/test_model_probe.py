"""`probe --model`: a traced model's own blocks are timed, and the profile gives their times."""

from dataclasses import replace

import pytest
import torch

from tests.front_door.command_line import error_of
from twinstream import model_probe
from twinstream.executor.probe.tasks import module_samples
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.loader import load_machine
from twinstream.model_probe import probe_model
from twinstream.tracing import find_model

BUILD = """
from torch import nn
import twinstream as ts

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(32), nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x):
        return x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)

def build():
    return ts.from_blocks([nn.Embedding(64, 32), Block(), Block(), nn.Linear(32, 64)])
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "conv.py"
    path.write_text(BUILD)
    return find_model(f"{path}:build", longest=128)


def test_every_kind_of_task_is_timed_once_a_shape(model, monkeypatch):
    calls = []
    monkeypatch.setattr(module_samples, "_core_ns", lambda call: calls.append(call()) or 1e6)
    monkeypatch.setattr(model_probe, "_pace", lambda machine, kind: 1.0)
    found = probe_model(model, load_machine("cpu"), 128, "cpu")
    names = [task.name for task in found.tasks]
    kinds = ("embed_forward", "block_forward", "head_loss", "block_backward", "embed_backward")
    for shape in ("1 x 64", "1 x 128", "3 x 128"):
        mine = [name for name in names if name.endswith(f"{shape} tokens")]
        assert sorted(mine) == sorted(f"{kind}, {shape} tokens" for kind in kinds)
    assert len(calls) == len(names)
    assert torch.is_grad_enabled()


def test_the_profile_gives_the_times_of_the_models_own_tasks(model, monkeypatch):
    machine = load_machine("cpu")
    truth = machine.model_copy(
        update={
            "efficiency": {
                key: curve.model_copy(update={"max": curve.max / 3})
                for key, curve in machine.efficiency.items()
            }
        }
    )
    timed = module_samples.module_samples

    def exact(*given):
        return [replace(s, time_ns=cost_alone_ns(s.works, truth)) for s in timed(*given)]

    monkeypatch.setattr(module_samples, "_core_ns", lambda call: 1.0)
    monkeypatch.setattr(module_samples, "module_samples", exact)
    monkeypatch.setattr(model_probe, "_pace", lambda machine, kind: 1.0)
    found = probe_model(model, machine, 128, "cpu")
    assert found.error(lambda task: task.before_ns) > 0.4
    assert found.error(lambda task: task.after_ns) < 0.1
    big = max(found.tasks, key=lambda task: task.measured_ns)
    assert big.after_ns == pytest.approx(big.measured_ns, rel=0.05)
    assert found.machine.name.startswith("cpu-") and "own blocks" in found.machine.description
    assert found.machine.efficiency["hbm"] == machine.efficiency["hbm"]


def test_models_of_our_kernels_and_flags_that_contradict_are_refused():
    given = ("probe", "--model", "tiny", "--machine", "cpu")
    assert "is computed by kernels of twinstream's" in error_of(*given)
    assert "--machine goes with --model" in error_of("probe", "--machine", "cpu")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("probe", "--disk", "/nowhere"), "--disk /nowhere: there is no such file or folder"),
        (("probe", "--model", "nothere"), "unknown model 'nothere'"),
        (
            ("plan", "--model", "tiny", "--machine", "cpu", "--seq-len", 64, "--disk-mem", "1GiB",
             "--disk-bandwidth", "fast"),
            "--disk-bandwidth fast is no rate",
        ),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_in_one_line_before_anything_is_measured(asked, said):
    message = error_of(*asked)
    assert message.startswith("error: ") and message.count("\n") == 1 and said in message
