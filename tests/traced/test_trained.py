"""`train` on models of other families: folder in, folder out, resumed to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.front_door.command_line import call
from tests.traced.families import tiny_config
from tests.training.small_runs import (
    options,
    same_bits_after_a_stop,
    trained,
    write_rows,
)
from twinstream.executor.modules.building import build_module, python_source
from twinstream.executor.modules.operations import CountOperations
from twinstream.executor.modules.tracing import trace
from twinstream.executor.weights.traced import module_folder
from twinstream.executor.weights.traced.module_folder import ModuleOutline, loaded_module
from twinstream.executor.weights.traced.module_weights import flat_groups
from twinstream.log.metrics import StepMetrics, events_of_kind, read_metrics
from twinstream.log.run_files import RunFiles
from twinstream.models.providers.traced import ModuleSource


def write_model(folder: Path, family: str, *, weights: bool) -> Path:
    """A folder of a tiny model, with weights or with its config alone."""
    config = AutoConfig.for_model(**tiny_config(family, vocab_size=260))
    config.pad_token_id = None
    if not weights:
        config.save_pretrained(folder)
        return folder / "config.json"
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("optim", ["muon", "lion"])
def test_a_module_with_experts_trains_by_other_optimizers(tmp_path: Path, optim: str) -> None:
    model = str(write_model(tmp_path / "model", "qwen3_moe", weights=True))
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    again = {"policy": "streaming", "host_mem": "1GiB"}
    same_bits_after_a_stop(tmp_path, again, model=model, data=rows, optim=optim, learning_rate=3e-3)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt2"])
def test_a_run_goes_on_under_another_cap_and_policy(
    tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "model", family, weights=True))
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    again = {"policy": "streaming", "host_mem": "1GiB"}
    capfd.readouterr()
    result = same_bits_after_a_stop(tmp_path, again, model=model, data=rows)
    assert "Loading weights" not in capfd.readouterr().err  # transformers' bar
    assert result.model is not None
    module = AutoModelForCausalLM.from_pretrained(result.model)
    ids = torch.arange(16).view(1, -1)
    start = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert not torch.equal(module(ids).logits, start(ids).logits)


def test_what_is_frozen_comes_back_as_it_was(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gemma3_text", weights=True)
    frozen = ("model.layers.*", "model.embed_tokens.*")
    wanted = options(tmp_path, model=str(model), freeze=frozen)
    result, _ = trained(wanted)
    assert result.model is not None
    before, after = (load_file(f / "model.safetensors") for f in (model, result.model))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.norm.weight"}  # the head is the embedding
    assert (result.model / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_a_config_alone_trains_from_its_own_random_weights_and_evaluates(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "phi3", weights=False)
    rows = str(write_rows(tmp_path / "eval.jsonl", 20))
    wanted = options(tmp_path, model=str(config), eval_data=(rows,), eval_every="3")
    result, seen = trained(wanted)
    assert result.step == 6 and len(seen.evals) == 2
    assert seen.evals[1].loss < seen.evals[0].loss


def test_a_traced_model_is_planned_run_and_compared(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "gemma3_text", weights=False)
    traced, plan, measured = (tmp_path / name for name in ("m.json", "plan.json", "measured.json"))
    shown = call("trace", config, "--seq-len", 64, "-o", traced, "--json").json()
    assert shown["num_blocks"] == 3 and shown["model_type"] == "gemma3_text"
    step = ("--seq-len", 64, "--tokens-per-step", 256, "--machine", "cpu")
    by_file = call("plan", "--model", traced, *step, "-o", plan, "--json").json()
    by_config = call("plan", "--model", config, *step, "--json").json()
    assert by_file["step_time_s"] == by_config["step_time_s"] and by_file["runs_here"]
    assert call("run", plan, "--steps", 2, "-o", measured).code == 0
    assert call("compare", plan, "--measured", measured).code == 0
    swept = call("whatif", "--model", traced, *step, "--changes", "10%", "--json").json()
    assert swept["base"]["tokens_per_s"] == pytest.approx(by_file["tokens_per_s"], rel=1e-3)


def test_without_torch_a_config_that_must_be_traced_says_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_model(tmp_path / "model", "gemma3_text", weights=False)
    monkeypatch.setattr("twinstream.tracing.find_spec", lambda name: None)
    told = call("plan", "--model", config, "--seq-len", 64, "--machine", "cpu")
    assert told.code == 2 and f"twinstream trace {config} -o model.json" in told.err


def test_a_traced_file_is_read_without_torch(tmp_path: Path) -> None:
    from tests.contract.run_python import run_python

    config = write_model(tmp_path / "model", "gemma3_text", weights=False)
    traced = tmp_path / "m.json"
    assert call("trace", config, "--seq-len", 64, "-o", traced).code == 0
    code = (
        "import sys; sys.modules['torch'] = None; import twinstream as ts;"
        "step = ts.TrainingStep(64, 256);"
        f"print(len(ts.plan({str(traced)!r}, 'h100', step=step).ops))"
    )
    assert int(run_python("-c", code, cwd=tmp_path)) > 10
    assert json.loads(traced.read_text())["source"]["config"]["model_type"] == "gemma3_text"


def test_an_infinite_number_of_a_config_survives_its_file() -> None:
    source = ModuleSource(config={"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]})
    again = ModuleSource.model_validate_json(source.model_dump_json())
    assert again == source
    module = build_module(again, torch.float32, None)
    assert module.config.time_step_limit[1] == float("inf")


OWN_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(32, 32)
    def forward(self, x):
        flat = self.norm(x.flatten(0, 1)).view(x.shape)
        return x + torch.relu(self.linear(flat))

class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed, self.head = nn.Embedding(260, 32), nn.Linear(32, 260)
        self.blocks = nn.ModuleList([Block(norm(32)) for _ in range(3)])
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def layer_norm(): return Model(nn.LayerNorm)
class Renamed(Model):
    def forward(self, idx, targets=None): return super().forward(idx), None
class LastOnly(Model):
    def forward(self, input_ids): return super().forward(input_ids)[:, -1]
class Raises(Model):
    def forward(self, input_ids): raise RuntimeError("not today")
class Nothing(Model):
    def forward(self, input_ids): super().forward(input_ids)
def renamed(): return Renamed(nn.LayerNorm)
def last_only(): return LastOnly(nn.LayerNorm)
def raises(): return Raises(nn.LayerNorm)
def nothing(): return Nothing(nn.LayerNorm)
class Counts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
    def forward(self, x):
        self.count.add_(1)
        return x / self.count
def counts(): return Model(Counts)
def three(): return 3
def fails(): return 1 / 0
"""


def test_a_model_of_a_python_file_trains_and_says_where_its_weights_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    rows = write_rows(tmp_path / "rows.jsonl")
    out = tmp_path / "run"
    told = call(
        *("train", f"{tmp_path / 'own.py'}:layer_norm", rows, "-o", out, "--seq-len", 64),
        *("--tokens-per-step", 256, "--steps", 2, "--machine", "cpu"),
    )
    assert told.code == 0, told.err
    assert "under the names of your module's state_dict" in " ".join(told.out.split())


def test_the_argument_of_the_tokens_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    losses = []
    for name in ("layer_norm", "renamed"):
        out = tmp_path / name
        told = call(
            *("train", f"{tmp_path / 'own.py'}:{name}", write_rows(tmp_path / "rows.jsonl")),
            *("-o", out, "--seq-len", 64, "--tokens-per-step", 256, "--steps", 2),
            *("--machine", "cpu"),
        )
        assert told.code == 0, told.err
        steps = events_of_kind(read_metrics(RunFiles(out).metrics), StepMetrics)
        losses.append([step.loss for step in steps])
    assert losses[0] == losses[1]


def test_lengths_that_were_not_traced_are_refused_by_a_plan(tmp_path: Path) -> None:
    config, model = tmp_path / "config.json", tmp_path / "model.json"
    config.write_text(json.dumps(tiny_config("gemma3_text", sliding_window=64)))
    assert call("trace", config, "--seq-len", 48, "-o", model).code == 0
    asked = ("plan", "--model", model, "--machine", "rtx4090", "--tokens-per-step", 4096)
    assert call(*asked, "--seq-len", 32).code == 0
    told = call(*asked, "--seq-len", 128)
    assert told.code == 2 and " to 63 tokens, not 128: trace it with --seq-len 128" in told.err


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text(OWN_MODEL)
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import layer_norm as build\n")
    told = call("trace", f"{tmp_path}/mine.py:build", "--seq-len", 64, "-o", tmp_path / "m.json")
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nowhere", "there is no such file"),
        ("words.txt", "words.txt"),
        ("own.py:nobody", "has no 'nobody'"),
        ("own.py", "say which of its functions builds the module, as"),
        ("own.py:last_only", "expected [2, "),
        ("own.py:raises", "fails: RuntimeError: not today ("),
        ("own.py:nothing", "returns a NoneType: expected logits"),
        ("own.py:three", "returns a int, not a torch.nn.Module"),
        ("own.py:fails", "fails with ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_traced_is_one_message(tmp_path: Path, what: str, says: str) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    (tmp_path / "words.txt").write_text("no JSON\n")
    told = call("trace", tmp_path / what, "--seq-len", 64, "-o", tmp_path / "m.json")
    assert told.code == 2 and says in " ".join(told.err.split()), told.err
    assert not (tmp_path / "m.json").exists()


def test_state_that_a_step_changes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    traced = tmp_path / "m.json"
    name = f"{tmp_path / 'own.py'}:counts"
    assert call("trace", name, "--seq-len", 64, "-o", traced).code == 0
    told = call("plan", "--model", traced, "--seq-len", 64, "--machine", "cpu")
    assert told.code == 2 and "changes its buffer" in told.err and "blocks.0.norm" in told.err


def test_a_grouped_convolution_costs_as_much_backward_as_two_forward() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    layer = nn.Conv1d(8, 8, 4, padding=3, groups=8)
    with CountOperations() as counted:
        y = layer(x)
    forward = counted.cost.flops
    with CountOperations() as counted:
        y.sum().backward()
    assert forward == 2 * y.numel() * 4
    assert counted.cost.flops == 2 * forward


def test_operations_on_narrow_rows_have_a_price_of_their_own() -> None:
    """Where something is repeated along rows of few elements, or they are summed up."""
    cube, rows, wide = torch.ones(9, 16, 8), torch.ones(9, 16, 1), torch.ones(9, 16, 64)
    told = {
        "repeated": lambda: cube * rows,
        "summed": lambda: cube.sum(-1),
        "as wide": lambda: cube * cube,
        "joined": lambda: torch.cat([cube, rows], -1),
        "wide rows": lambda: wide * rows,
    }
    units = {}
    for name, operation in told.items():
        with CountOperations() as counted:
            operation()
        units[name] = {unit for unit, _, _ in counted.cost.amounts}
    assert units["repeated"] == units["summed"] == {"vector_narrow"}
    assert units["as wide"] == units["joined"] == units["wide rows"] == {"vector"}


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen3_moe"])
def test_weights_are_read_as_transformers_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """And group by group, whether files have the module's own tensors or experts one by one."""
    folder = write_model(tmp_path / "model", family, weights=True)
    config = json.loads((folder / "config.json").read_text())
    model = trace(ModuleSource(config=config), dtype="bfloat16", seq_len=64)
    read = dict(loaded_module(folder, "bfloat16", "it").named_parameters())
    expected = dict(flat_groups(model, read))
    monkeypatch.setattr(module_folder, "loaded_module", None)
    found = dict(module_folder.read_module_parameters(folder, model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[group], expected[group]) for group in found)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen3_moe"])
def test_a_folder_is_written_as_transformers_writes_it(tmp_path: Path, family: str) -> None:
    """Group by group: the same tensors and config."""
    folder = write_model(tmp_path / "model", family, weights=True)
    config = json.loads((folder / "config.json").read_text())
    model = trace(ModuleSource(config=config), dtype="float32", seq_len=64)
    groups = dict(module_folder.read_module_parameters(folder, model))
    asked: list[str] = []

    def read(group: str) -> torch.Tensor:
        asked.append(group)
        return groups[group]

    written = tmp_path / "written"
    written.mkdir()
    ModuleOutline.of(model).write(written, read)
    assert asked == list(groups)
    before, after = (load_file(f / "model.safetensors") for f in (folder, written))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    said, wrote = (json.loads((f / "config.json").read_text()) for f in (folder, written))
    assert {**said, "use_cache": None} == {**wrote, "use_cache": None}
    loaded = AutoModelForCausalLM.from_pretrained(written)
    assert loaded.dtype == torch.float32


TOKEN_BY_TOKEN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        state, made = torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            state = torch.tanh(state * 0.5 + self.linear(x[:, token]))
            made.append(state)
        return x + torch.stack(made, dim=1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(260, 16), nn.Linear(16, 260)
        self.blocks = nn.ModuleList([Block()])
    def forward(self, input_ids):
        return self.head(self.blocks[0](self.embed(input_ids)))

def build(): return Model()
"""


def test_what_goes_token_by_token_is_measured_on_few_tokens(tmp_path: Path) -> None:
    """As many operations as tokens: two thousand would take minutes, and say the same."""
    (tmp_path / "own.py").write_text(TOKEN_BY_TOKEN)
    source = python_source(tmp_path / "own.py", "build")
    long, short = (trace(source, dtype="float32", seq_len=length) for length in (4096, 128))
    assert long.captured_size == short.captured_size
    assert long.kinds == short.kinds and long.values == short.values
    (tmp_path / "usual.py").write_text(OWN_MODEL)
    usual = trace(python_source(tmp_path / "usual.py", "layer_norm"), dtype="float32", seq_len=4096)
    assert usual.captured_size[1] > 128


def test_a_killed_run_goes_on_under_other_caps_to_the_same_bits(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gemma3_text", weights=True)
    killing = [sys.executable, "-m", "tests.training.killed_runs", str(tmp_path), "2", str(model)]
    done = subprocess.run(killing, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
