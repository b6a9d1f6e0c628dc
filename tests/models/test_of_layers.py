"""Layers as traced modules: beside one that torch has traced, and in plans."""

from pathlib import Path

import pytest

import twinstream as ts
from tests.front_door.command_line import error_of
from twinstream.models.layered.model import LayeredModel, layered_names, load_layered
from twinstream.models.providers.of_layers import layered_module
from twinstream.models.providers.traced import TracedModel
from twinstream.tracing import find_model

WIDTH, FFN, HEADS, LAYERS = 64, 256, 4, 2
MODULE = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm({WIDTH}), nn.LayerNorm({WIDTH})
        self.into, self.out = nn.Linear({WIDTH}, 3 * {WIDTH}), nn.Linear({WIDTH}, {WIDTH})
        self.up, self.down = nn.Linear({WIDTH}, {FFN}), nn.Linear({FFN}, {WIDTH})

    def forward(self, x):
        b, t, w = x.shape
        heads = self.into(self.before(x)).view(b, t, 3, {HEADS}, w // {HEADS})
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(seen.reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))

class Encoder(nn.Module):
    sample_inputs = {{"pixels": torch.zeros(3, 32, 32)}}

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, {WIDTH}, 8, 8, bias=False)
        self.positions = nn.Parameter(torch.zeros(16, {WIDTH}))
        self.layers = nn.ModuleList([Block() for _ in range({LAYERS})])
        self.head = nn.Linear({WIDTH}, 10)

    def forward(self, pixels):
        patches = self.patches(pixels.to(self.positions.dtype)).flatten(2).transpose(1, 2)
        x = patches + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))
"""


def test_sizes_and_costs_are_those_of_a_module_that_was_traced(tmp_path: Path) -> None:
    (tmp_path / "encoder.py").write_text(MODULE)
    real = find_model(f"{tmp_path / 'encoder.py'}:Encoder", dtype="bfloat16", longest=1)
    layers = [
        {"kind": "patches", "image": 32, "patch": 8, "width": WIDTH},
        {"kind": "transformer", "layers": LAYERS, "heads": HEADS, "width": WIDTH, "ffn": FFN,
         "seq_len": 16},
        {"kind": "mlp", "name": "head", "widths": [WIDTH, 10]},
    ]  # fmt: skip
    own = layered_module(LayeredModel.model_validate({"dtype": "bfloat16", "layers": layers}))
    assert isinstance(real, TracedModel)
    assert own.num_parameters == pytest.approx(
        real.num_parameters, rel=0.02
    )  # it has norms and biases
    for batch in (8, 64):
        size = batch, 1
        assert own.forward_flops(*size) == pytest.approx(real.forward_flops(*size), rel=0.01)
        assert own.training_flops(*size) == pytest.approx(real.training_flops(*size), rel=0.04)
        for name in ("forward", "backward"):
            ours, theirs = getattr(own.kinds[0], name), getattr(real.kinds[0], name)
            assert ours.peak_bytes.at(*size) == pytest.approx(theirs.peak_bytes.at(*size), rel=0.2)
            moved = [sum(w.hbm_bytes for w in one.works_at(*size)) for one in (ours, theirs)]
            assert moved[0] == pytest.approx(moved[1], rel=0.15)


@pytest.mark.parametrize("name", layered_names())
def test_parameters_are_those_of_the_layers(name: str) -> None:
    layers = load_layered(name)
    if name.startswith("dlrm") and name != "dlrm_kaggle":
        with pytest.raises(ts.TwinstreamError, match=r"looks up rows of \S+ GiB, .* estimate"):
            layered_module(layers)
        return
    found = layered_module(layers)
    assert found.num_parameters == layers.parameters
    assert sum(group.num_elements for group in found.groups) == layers.parameters


def test_one_is_planned_within_a_cap_and_proven() -> None:
    step = ts.TrainingStep(seq_len=1, tokens_per_step=32, chunk_tokens=32)
    whole, small = (
        ts.plan("vit_l", "h100", step=step, device_mem=mem) for mem in ("70GiB", "3GiB")
    )
    machine = ts.load_machine("h100")
    moved = [ts.summarize(one, ts.simulate(one), machine).h2d_bytes for one in (whole, small)]
    assert moved[0] < moved[1]
    assert ts.verify(small) == [] and ts.conforms(small) == []


def test_one_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b c")
    told = error_of("train", "vit_l", tmp_path / "a.txt", "-o", tmp_path / "run", "--seq-len", "1")
    assert "no code" in told and "FILE.py:FUNCTION" in told
