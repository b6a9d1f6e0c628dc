"""Python of other people: a document runs none that nobody named, and none ends the process."""

import json

import pytest
import torch

import twinstream as ts
from tests.front_door.command_line import call, error_of
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.building import build_module, offline
from twinstream.models.providers.traced import ModuleSource
from twinstream.schedule import python_file
from twinstream.schedule.files import read_document
from twinstream.schedule.python_file import require_own_code
from twinstream.trusted_code import UntrustedCodeError

MODEL = """
import sys
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_name("EXECUTED").touch()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        {in_block}
        return x + torch.tanh(self.linear(x))

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(260, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 260, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    {in_build}
    return Small()
"""
STEP = ("--machine", "cpu", "--seq-len", 32, "--tokens-per-step", 64, "--policy", "streaming")
RUN = ("--steps", 1, "--backend", "cpu")


def model_file(folder, in_block="pass", in_build="pass"):
    path = folder / "m.py"
    path.write_text(MODEL.format(in_block=in_block, in_build=in_build))
    return f"{path}:build"


def test_a_document_runs_no_python_that_nobody_named_here(tmp_path, monkeypatch):
    model, plan, ran = tmp_path / "model.json", tmp_path / "plan.json", tmp_path / "EXECUTED"
    assert call("trace", model_file(tmp_path), "-o", model).code == 0
    assert call("plan", "--model", model, *STEP, "-o", plan).code == 0
    ran.unlink()
    monkeypatch.setattr(python_file, "_named", set())  # another process, another person
    text = tmp_path / "t.txt"
    text.write_text("hello world " * 400)
    train = (
        "train", model, text, "-o", tmp_path / "run", "--tokenizer", "bytes", "--seq-len", 32,
        "--tokens-per-step", 64, "--machine", "cpu", "--backend", "cpu", "--steps", 1,
    )  # fmt: skip
    for asked in (("run", plan, *RUN), train):
        told = " ".join(error_of(*asked).split())
        assert "m.py, which it names by itself" in told and "--trust-remote-code" in told
    schedule = read_document(ts.Schedule, plan)
    with pytest.raises(UntrustedCodeError, match="trusts_code=True"):
        ts.execute(schedule, ts.RunSettings("cpu", num_steps=1))
    assert not ran.exists()
    assert call("run", plan, *RUN, "--trust-remote-code").code == 0
    assert ran.exists()


def test_a_relative_path_in_a_document_is_no_exception(tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    assert call("plan", "--model", model_file(tmp_path), *STEP, "-o", plan).code == 0
    (tmp_path / "EXECUTED").unlink()
    monkeypatch.setattr(python_file, "_named", set())
    plan.write_text(plan.read_text().replace(str(tmp_path / "m.py"), "m.py"))
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "m.py") in "".join(error_of("run", plan, *RUN).split())
    assert not (tmp_path / "EXECUTED").exists()


@pytest.mark.parametrize("place", ["in_block", "in_build"])
def test_own_code_that_ends_the_process_is_one_message(tmp_path, place):
    name = model_file(tmp_path, **{place: "sys.exit(0)"})
    told = " ".join(error_of("plan", "--model", name, *STEP).split())
    assert "m.py, line" in told and "sys.exit, code 0" in told


def test_own_code_that_ends_the_process_when_imported_is_one_message(tmp_path):
    (tmp_path / "m.py").write_text("raise SystemExit(3)\n")
    told = " ".join(error_of("plan", "--model", f"{tmp_path / 'm.py'}:build", *STEP).split())
    assert "m.py, line 1 ends the process (sys.exit, code 3)" in told


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": {"AutoModelForCausalLM": "someone/elsewhere--modeling_y.X"}},
        {"auto_map": {"AutoTokenizer": ["a.B", "someone/elsewhere--tok.T"]}},
        {"text_config": {"auto_map": {"AutoConfig": "someone/elsewhere--c.C"}}},
    ],
)
def test_code_of_another_repository_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ts.TwinstreamError, match="another repository, someone/elsewhere--"):
        require_own_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config).replace("someone/elsewhere--", ""))
    require_own_code(tmp_path)


def test_nothing_is_fetched_while_a_module_is_built():
    from huggingface_hub import constants, is_offline_mode

    before = constants.HF_HUB_OFFLINE
    with offline():
        assert is_offline_mode()
        assert constants.HF_HUB_OFFLINE is True
    assert constants.HF_HUB_OFFLINE is before


SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "llama", "hidden_act": "zz"},
        {"model_type": "llama", "hidden_act": "\0"},
        {"model_type": "qwen3_moe", "dtype": "64"},
        {"model_type": "dots1", "n_group": 1, "n_shared_experts": None},
        {"model_type": "llama", "text_config": "x"},
        {"model_type": "gemma3_text", "layer_types": 7},
        {"model_type": "gpt_oss", "num_local_experts": "many"},
    ],
    ids=str,
)
def test_whatever_transformers_raises_over_a_config_is_one_refusal(wrong):
    source = ModuleSource(config={**SIZES, **wrong})
    with pytest.raises(ModuleRefusal, match="transformers") as refusal:
        build_module(source, torch.float32, None)
    assert "\n" not in str(refusal.value)
