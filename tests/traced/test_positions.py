"""How long sequences may be by a module's positions: tables of them, rotary ones that change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.traced.executed import Step, loss_and_gradients, planned
from tests.traced.families import tiny_config
from tests.training.small_runs import options, trained
from twinstream.cli import app
from twinstream.executor.modules.building import build_module
from twinstream.executor.modules.positions.tables import position_limit
from twinstream.executor.modules.tracing import trace
from twinstream.models.presets import load_preset
from twinstream.models.providers.model import chunk_refusal
from twinstream.models.providers.traced import ModuleSource, TracedModel
from twinstream.training.options import OptionsError, TrainOptions

SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.6, 3.4, 4.4], [2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0, 40.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG,
            "original_max_position_embeddings": 64}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def rotary(family: str, told: dict[str, Any]) -> dict[str, Any]:
    more = {"max_position_embeddings": 512 if told is LONGROPE else 64}
    if family == "phi3":
        more["original_max_position_embeddings"] = 64
    return tiny_config(family, rope_parameters=dict(told), **more)


@pytest.mark.parametrize(
    ("family", "told"), [("phi3", LONGROPE), ("llama", LONGROPE), ("llama", DYNAMIC)]
)
def test_rotary_frequencies_that_long_sequences_change_are_those_of_short_ones(
    family: str, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trace(ModuleSource(config=rotary(family, told)), dtype="float32", seq_len=512)
    assert model.positions is not None and model.positions.tokens == 64
    step = Step.of(model)
    found, _ = loss_and_gradients(monkeypatch, model, planned(model), step)
    own = transformers_own(model)
    with torch.no_grad():
        expected = own(input_ids=step.ids, labels=step.ids).loss.item()
        own.model.rotary_emb.original_inv_freq.mul_(1.5)  # other frequencies are another loss
        own.model.rotary_emb.inv_freq.mul_(1.5)
        other = own(input_ids=step.ids, labels=step.ids).loss.item()
    assert found == pytest.approx(expected, rel=1e-6) and abs(other - expected) > 1e-5


LENGTHS = (100, 40, 64, 65, 130, 113)  # of documents; 64 is the last that is short


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_each_document_has_the_frequencies_that_it_has_alone(tmp_path: Path, family: str) -> None:
    """Long and short ones in one chunk: as transformers computes each in a forward of its own."""
    config = AutoConfig.for_model(**rotary(family, LONGROPE))
    torch.manual_seed(0)
    with torch.no_grad():
        own = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in own.parameters():
            parameter.normal_(0.0, 0.3)
    own.save_pretrained(tmp_path / "model")
    ids = [torch.randint(3, config.vocab_size, (length,)).tolist() for length in LENGTHS]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in ids))
    more = {"seq_len": 256, "tokens_per_step": 512, "chunk_tokens": 512, "steps": 2}
    more |= {"save_every": "1", "learning_rate": 1e-4, "keep": 2}
    given = options(tmp_path, model=str(tmp_path / "model"), data=(str(rows),), **more)
    result, seen = trained(given)
    for step, folder in enumerate((tmp_path / "model", result.folder / "checkpoint-1")):
        expected = loss_of_each_alone(folder, ids)
        assert seen.losses[step] == pytest.approx(expected, rel=1e-5)
    packed = torch.tensor([[token for one in ids for token in one]])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():  # of a batch transformers has one length, which is another loss
        logits = module(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    starts = (positions[0] == 0).nonzero()[:, 0]
    labels = packed[0].roll(-1).index_fill(0, (starts - 1) % 512, -100)
    together = torch.nn.functional.cross_entropy(logits, labels).item()
    assert abs(together - seen.losses[0]) > 3e-4


def loss_of_each_alone(folder: Path, documents: list[list[int]]) -> float:
    """Of a folder by transformers, a forward for each document."""
    total, count = 0.0, 0
    for ids in documents:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        given = torch.tensor([ids])
        with torch.no_grad():
            loss = module(input_ids=given, labels=given, use_cache=False).loss.item()
        total, count = total + loss * (len(ids) - 1), count + len(ids) - 1
    return total / count


def test_dynamic_frequencies_and_rows_that_are_not_packed_end_where_they_change(
    tmp_path: Path,
) -> None:
    """`dynamic` ones follow from the longest document that transformers has met before."""
    for told, is_packed in ((DYNAMIC, True), (LONGROPE, False)):
        source = ModuleSource(config=rotary("llama", told))
        model = trace(source, dtype="float32", seq_len=256, is_packed=is_packed, longest=256)
        assert "takes sequences of up to 64 tokens" in str(chunk_refusal(model, 256, 256))


def transformers_own(model: TracedModel) -> Any:
    """As transformers itself makes it, frequencies included, with the weights of seed 0."""
    from transformers import CONFIG_MAPPING

    assert model.source.config is not None
    config = CONFIG_MAPPING[model.model_type].from_dict(model.source.config)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("family", ["gpt2", "opt", "roberta", "gptj", "bart", "xglm"])
def test_a_table_of_positions_has_as_many_as_transformers_takes(family: str) -> None:
    config = tiny_config(family, **{"is_decoder": True} if family == "roberta" else {})
    config |= {"max_position_embeddings": 40, "n_positions": 40}
    module = build_module(ModuleSource(config=config), torch.float32, None)
    limit = position_limit(module)
    assert limit is not None
    own = AutoModelForCausalLM.from_config(module.config).eval()
    ids = torch.full((1, limit.tokens), 3)
    assert own(input_ids=ids).logits.shape[1] == limit.tokens
    if family != "xglm":  # which makes its table longer
        with pytest.raises((IndexError, RuntimeError)):
            own(input_ids=torch.full((1, limit.tokens + 1), 3))


OWN = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__(); self.layer = nn.Linear(32, 32)
    def forward(self, x): return x + torch.tanh(self.layer(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__(); self.tokens = nn.Embedding(260, 32)
        self.positions = nn.Parameter(torch.zeros(1, 48, 32))
        self.blocks = nn.ModuleList(Block() for _ in range(3)); self.head = nn.Linear(32, 260)
    def forward(self, ids):
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        for block in self.blocks: x = block(x)
        return self.head(x)
def build(): return Model()
"""
TOLD = "takes sequences of up to 48 tokens, not 64: its table 'positions' has 48 rows; --seq-len 48"


def test_sequences_longer_than_a_table_are_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model, document = f"{tmp_path / 'own.py'}:build", tmp_path / "model.json"
    run = CliRunner().invoke

    def said(*arguments: object) -> str:
        found = run(app, [str(one) for one in arguments])
        return " ".join(f"{found.output} {found.exception}".split())

    assert TOLD in said("trace", model, "-o", document, "--seq-len", 64)
    assert "up to 48 tokens: its table 'positions'" in said("trace", model, "-o", document)
    step = ["--machine", "cpu", "--seq-len", 64, "--tokens-per-step", 128]
    assert TOLD in said("plan", "--model", document, *step)
    with pytest.raises(OptionsError, match="--seq-len 48"):
        trained(options(tmp_path, model=model))
    wanted = options(tmp_path, model=model, tokens_per_step=192)
    given = wanted.model_dump(exclude_unset=True, exclude={"seq_len"})
    _, seen = trained(TrainOptions.of(given))
    assert len(seen.losses) == 6
    assert any("up to 48 tokens, not 2,048" in line for line in seen.lines)


def test_learned_positions_of_a_preset_end_where_its_table_does() -> None:
    assert chunk_refusal(load_preset("gpt3-175b"), 2048, 2048) is None
    assert "2,048 rows" in str(chunk_refusal(load_preset("gpt3-175b"), 4096, 4096))
