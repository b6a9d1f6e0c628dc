"""Scores and logits are transformers', whatever the memory; by our kernels and by own code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.front_door.command_line import call, error_of
from tests.training.small_runs import options, trained, write_rows
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.scoring import logits, score

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "head_dim": 16,
    "initializer_range": 0.1,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "tie_word_embeddings": False},
}
HERE: dict[str, Any] = {"tokenizer": "bytes", "machine": "cpu", "backend": "cpu",
                        "data_workers": 0, "seq_len": 64}  # fmt: skip
LONG = "-" * 150


def folder_of(name: str, path: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SIZES | MODELS[name]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def by_transformers(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_under_every_cap(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "model")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, length).tolist() for length in (40, 7, 23)]
    given = {key: HERE[key] for key in ("machine", "backend")}
    ample = logits(folder, sequences, **given)
    for found, ids in zip(ample, sequences, strict=True):
        wanted = by_transformers(folder, ids).numpy()
        assert found.shape == (len(ids), 256)
        scale = float(np.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * scale)
    small = logits(folder, sequences, **given, device_mem="600KiB")
    assert all(np.array_equal(a, b) for a, b in zip(small, ample, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_scores_are_the_log_probabilities_of_each_document(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", 30)
    found = score(folder, rows, **HERE)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    assert [(Path(one.file).name, one.row) for one in found] == [
        ("rows.jsonl", number) for number in range(1, 31)
    ]
    for one, text in zip(found, texts, strict=True):
        ids = list(text.encode())
        assert one.parts == -(-one.tokens // 64)
        if one.parts > 1:
            continue
        wanted = torch.log_softmax(by_transformers(folder, ids[: one.tokens]), -1)
        each = wanted[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
        np.testing.assert_allclose(one.log_probs[: len(each)], each, rtol=1e-5, atol=1e-5)
        assert one.log_prob == pytest.approx(float(one.log_probs.astype(np.float64).sum()))
    assert sum(one.parts == 1 for one in found) > 5


def test_a_score_is_the_loss_of_training_before_its_first_step(tmp_path: Path) -> None:
    """Over one chunk of the same documents, to float32's rounding of the sum."""
    folder = folder_of("llama", tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", 10)
    given = {"seq_len": 256, "tokens_per_step": 1024, "learning_rate": 0.0, "dtype": "float32"}
    _, seen = trained(options(tmp_path, model=str(folder), data=(str(rows),), steps=1, **given))
    found = score(folder, rows, **(HERE | {"seq_len": 256, "chunk_tokens": 1024}))
    targets = sum(one.targets for one in found)
    assert seen.steps[0].targets == targets
    assert seen.losses[0] == pytest.approx(-sum(one.log_prob for one in found) / targets, rel=1e-6)


def test_scores_with_an_adapter_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, rows = folder_of("llama", tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", 6)
    given = {"seq_len": 256, "tokens_per_step": 512, "learning_rate": 0.05, "dtype": "float32"}
    run = options(tmp_path, model=str(folder), data=(str(rows),), steps=2, lora="r=4", **given)
    result, _ = trained(run)
    first = score(folder, rows, **(HERE | {"seq_len": 256, "adapter": result.model}))[0]
    ids = list(json.loads(rows.read_text().splitlines()[0])["text"].encode())
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, result.model).eval()
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    each = wanted[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    np.testing.assert_allclose(first.log_probs[: len(each)], each, rtol=1e-5, atol=1e-5)


def test_the_command_writes_a_line_for_each_document(tmp_path: Path) -> None:
    folder, rows = folder_of("llama", tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", 6)
    flags = ("--tokenizer", "bytes", "--machine", "cpu", "--seq-len", 256, "--data-workers", 0)
    out = tmp_path / "scores.jsonl"
    told = call("score", folder, rows, *flags, "-o", out, "--each-token", "--json").json()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert told["documents"] == len(lines) == 6
    for line in lines:
        assert line["targets"] == len(line["log_probs"])
        assert line["log_prob"] == pytest.approx(sum(line["log_probs"]))
    assert told["log_prob"] == pytest.approx(sum(line["log_prob"] for line in lines))
    mean = told["log_prob"] / told["targets"]
    assert told["perplexity"] == pytest.approx(float(np.exp(-mean)))
    shown = call("score", folder, rows, *flags, "--dry-run").out
    assert "it fits" in shown and "tokens/s" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("score", "tiny"), "MODEL and DATA are to be given"),
        (("score", "tiny", "no.jsonl", "--tokenizer", "bytes"), "no.jsonl"),
        (("score", "no-model", "no.jsonl"), "no-model"),
    ],
)
def test_what_cannot_be_scored_is_told(given: tuple[str, ...], said: str) -> None:
    assert said in error_of(*given)


def test_options_of_training_are_none_of_scoring() -> None:
    with pytest.raises(TwinstreamError, match="no option 'steps' of scoring"):
        score("tiny", "rows.jsonl", steps=3)
    with pytest.raises(TwinstreamError, match="shortest of 1"):
        logits("tiny", [[1]])
