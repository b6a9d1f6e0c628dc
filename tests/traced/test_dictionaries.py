"""Blocks that hand tensors on in dictionaries of a class of their own, as Gemma 4's do."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.small_runs import options, trained

MODULE = """
from collections import UserDict
import torch
from torch import nn
class Counted(BASE):
    def __init__(self, first):
        super().__init__(); self.first = first
class Block(nn.Module):
    def __init__(self, index):
        super().__init__(); self.index = index; self.layer = nn.Linear(32, 32)
    def forward(self, x, shared):
        if self.index >= 2: x = x + shared["kept"][("of", shared.first)]
        y = torch.tanh(self.layer(x))
        if self.index == 1: shared["kept"] = Counted(7); shared["kept"][("of", shared.first)] = y
        return x + y
class Model(nn.Module):
    def __init__(self):
        super().__init__(); self.embedding = nn.Embedding(260, 32)
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.head = nn.Linear(32, 260, bias=False)
    def forward(self, ids):
        x, shared = self.embedding(ids), Counted("the second")
        for block in self.blocks: x = block(x, shared)
        return self.head(x)
def build(): return Model()
"""
PLAIN = MODULE.replace(
    MODULE[MODULE.index("class Counted") : MODULE.index("class Block")],
    """
def Counted(first): return {"first": first}
""",
).replace("shared.first", 'shared["first"]')


@pytest.mark.parametrize("base", ["dict", "UserDict"])
def test_they_are_dictionaries(tmp_path: Path, base: str) -> None:
    losses, weights = [], []
    for name, text in (("own", MODULE.replace("BASE", base)), ("plain", PLAIN)):
        (tmp_path / f"{name}.py").write_text(text)
        wanted = options(tmp_path / name, model=f"{tmp_path / name}.py:build", policy="streaming")
        result, seen = trained(wanted)
        assert result.model is not None
        losses.append(seen.losses)
        weights.append(load_file(result.model / "model.safetensors"))
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
