"""Parameters that a module's forward never reads are carried as they are, whatever the plan."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from tests.training.small_runs import options, trained
from twinstream.cli import app
from twinstream.models.providers.traced import TracedModel

MODULE = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__(); self.used = nn.Linear(32, 32); self.spare = nn.Linear(5, 3)
    def forward(self, x): return x + torch.tanh(self.used(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__(); self.embedding = nn.Embedding(260, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 260, bias=False); self.spare = nn.Linear(7, 2)
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks: x = block(x)
        return self.head(x)
def build(): return Model()
"""
UNREAD = [f"{name}.{kind}" for name in ("spare", *(f"blocks.{i}.spare" for i in range(3)))
          for kind in ("weight", "bias")]  # fmt: skip
TOLD = f"forward does not read {UNREAD[2]} and 7 more (70 parameters, 280 B)"


@pytest.mark.parametrize("policy", ["resident", "streaming", "optimal"])
def test_what_forward_does_not_read_is_written_back_as_it_was(tmp_path: Path, policy: str) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    model, scope = f"{tmp_path / 'own.py'}:build", dict[str, object]()
    cap = {"device_mem": "340KiB"} if policy == "optimal" else {}
    wanted = options(tmp_path, model=model, policy=policy, seed=3, weight_decay=0.5, **cap)
    result, seen = trained(wanted)
    assert result.model is not None
    assert seen.losses[-1] < seen.losses[0]
    after = load_file(result.model / "model.safetensors")
    exec(MODULE, scope)
    torch.manual_seed(3)
    before: nn.Module = scope["build"]()  # type: ignore[operator]
    same = [name for name, one in before.named_parameters() if torch.equal(one, after[name])]
    assert sorted(same) == sorted(UNREAD) and len(after) == 16


def test_trace_and_plan_say_what_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    document = tmp_path / "model.json"
    run = CliRunner().invoke
    told = run(app, ["trace", f"{tmp_path / 'own.py'}:build", "-o", str(document)])
    assert TOLD in " ".join(told.output.split())
    (unread,) = [one for one in TracedModel.load(document).groups if one.name == "unused"]
    assert sorted(tensor.name for tensor in unread.tensors) == sorted(UNREAD)
    step = ["--seq-len", "32", "--tokens-per-step", "64", "--machine", "cpu"]
    told = run(app, ["plan", "--model", str(document), *step])
    assert told.exit_code == 0 and "not trained" in told.output
    fields = json.loads(document.read_text())
    assert "tensors" in fields["groups"][-1] and fields["groups"][-1]["name"] == "unused"
