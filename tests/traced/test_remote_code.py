"""A folder with code of its own is run only where a person says so, and then as any other model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.weights.coded_folders import encode
from tests.front_door.command_line import call, error_of
from tests.training.small_runs import options, same_bits_after_a_stop, trained, write_rows
from twinstream.executor.weights.traced.module_folder import loaded_module
from twinstream.training.options import OptionsError

CONFIG = """
from transformers import PretrainedConfig

class MineConfig(PretrainedConfig):
    model_type = "mine_of_nobody"
    def __init__(self, width=32, vocab_size=260, **more):
        self.width, self.vocab_size = width, vocab_size
        super().__init__(**more)
"""
MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_mine import MineConfig

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
    def forward(self, x): return x + torch.relu(self.linear(self.norm(x)))

class MineForCausalLM(PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config.width) for _ in range(3))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()
    def forward(self, input_ids, **more):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(x))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "configuration_mine.py").write_text(CONFIG)
    (path / "modeling_mine.py").write_text(MODEL)
    config = {
        "model_type": "mine_of_nobody", "width": 32, "vocab_size": 260,
        "auto_map": {
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
        "architectures": ["MineForCausalLM"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (260, 32), "head.weight": (260, 32), "head.bias": (260,)}
    for layer in range(3):
        shapes |= {f"layers.{layer}.linear.weight": (32, 32), f"layers.{layer}.linear.bias": (32,)}
        shapes |= {f"layers.{layer}.norm.weight": (32,), f"layers.{layer}.norm.bias": (32,)}
    tensors = {name: torch.randn(s, generator=generator) * 0.1 for name, s in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_code_is_run_only_where_it_is_trusted(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "m.json"
    said = error_of("trace", folder, "--seq-len", 64, "-o", out)
    assert "computed by Python files of its own folder" in said and "--trust-remote-code" in said
    assert call("trace", folder, "--seq-len", 64, "--trust-remote-code", "-o", out).code == 0
    step = ("--seq-len", 64, "--machine", "cpu", "--tokens-per-step", 256)
    assert call("plan", "--model", out, *step).code == 0
    assert call("plan", "--model", folder, *step, "--trust-remote-code").code == 0
    (folder / "modeling_mine.py").write_text(MODEL + "\n# another\n")
    rows = write_rows(tmp_path / "rows.jsonl")
    told = call("train", out, rows, "-o", tmp_path / "run", "--steps", 1, *step)
    assert told.code == 2 and "not what was traced" in told.err


def test_a_trusted_folder_is_trained_and_written_with_its_code(
    tmp_path: Path, folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    given = {
        "model": str(folder), "trust_remote_code": True,
        "data": (str(write_rows(tmp_path / "rows.jsonl")),),
    }  # fmt: skip
    again = {"policy": "streaming", "host_mem": "1GiB"}
    same_bits_after_a_stop(tmp_path, again, **given)
    frozen = ("layers.*", "embed.*")
    result, _ = trained(options(tmp_path / "frozen", **given, freeze=frozen))
    assert result.model is not None
    before, after = (load_file(f / "model.safetensors") for f in (folder, result.model))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    AutoModelForCausalLM.from_pretrained(result.model, trust_remote_code=True)
    with pytest.raises(OptionsError):
        options(tmp_path, **{**given, "trust_remote_code": "perhaps"})


def test_codes_of_a_folder_with_code_of_its_own_are_read(tmp_path: Path, folder: Path) -> None:
    """Parameters have the values of a folder without codes; a dry run refuses what is damaged."""
    encode(folder, tmp_path / "values", "int8", lambda name: "linear.weight" in name)
    values = load_file(tmp_path / "values" / "model.safetensors")
    module = loaded_module(folder, "float32", "it", trusts_code=True)
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter, values[name], rtol=2e-7), name
    file = folder / "model.safetensors"
    stored = {n: t for n, t in load_file(file).items() if n != "layers.1.linear.SCB"}
    save_file(stored, file, metadata={"format": "pt"})
    rows = write_rows(tmp_path / "rows.jsonl")
    said = error_of(
        "train", folder, rows, "--dry-run", "--trust-remote-code", "--tokenizer", "bytes",
        "--seq-len", 64, "--tokens-per-step", 128, "--steps", 1, "--machine", "cpu",
    )  # fmt: skip
    assert "model.safetensors: has layers.1.linear.weight as I8 codes, and no scales" in said
