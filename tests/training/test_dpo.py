"""Runs that prefer one answer to another: what they compare with, what they learn, and resuming."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.executor.weights.small_models import random_model, save
from tests.traced.families import tiny_config
from tests.training.ranks.rank_runs import rank_options
from tests.training.small_runs import (
    WORDS,
    options,
    same_bits_after_a_stop,
    state_files,
    trained,
    write_config,
    write_rows,
)
from twinstream.data.chunk_stream import ChunkStream
from twinstream.data.data_error import DataError
from twinstream.data.packing import Chunk as DataChunk
from twinstream.log.run_files import RunFiles
from twinstream.planner.search.chunking import ChunkingError
from twinstream.report.run_folder import read_run_folder
from twinstream.report.run_page import run_html
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.options import TrainOptions
from twinstream.training.run.pairs import keys_of, pair_metrics
from twinstream.training.run.reference import Reference
from twinstream.training.trainer import Trainer

LN_2 = float(np.float32(np.log(2)))


def write_pairs(path: Path, count: int = 60, *, upper: bool = False) -> Path:
    """Of a few words each; the chosen one has fewer."""
    lines = []
    for number in range(count):
        words = [WORDS[(number * 5 + at) % 14] for at in range(9)]
        row = {
            "prompt": f"{number} " + " ".join(words[: 2 + number % 3]),
            "chosen": " " + " ".join(words[5 : 6 + number % 3]),
            "rejected": " " + " ".join(words[3:8]),
        }
        lines.append(json.dumps({k: v.upper() if upper else v for k, v in row.items()}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def with_dpo(folder: Path, **given: Any) -> TrainOptions:
    data = (str(write_pairs(folder / "pairs.jsonl")),)
    return options(folder, **{"data": data, "loss": "dpo", "dtype": "float32"} | given)


def with_base(folder: Path, **given: Any) -> TrainOptions:
    """From weights with a vocabulary of 97."""
    base = folder / "base"
    if not base.exists():
        save(random_model("llama", torch.float32), base)
    data = (str(write_pairs(folder / "upper.jsonl", upper=True)),)
    return with_dpo(folder, **{"model": str(base), "data": data} | given)


def reference_file(run: Path) -> dict[str, np.ndarray]:
    with np.load(run / "reference.npz") as found:
        return dict(found)


def by_key(run: Path) -> dict[bytes, tuple[float, ...]]:
    found = reference_file(run)
    pairs = zip(found["keys"], found["log_probs"].tolist(), strict=True)
    return {key.tobytes(): tuple(values) for key, values in pairs}


def test_a_run_begins_at_its_reference_and_moves_away_from_it(tmp_path):
    held_out = write_pairs(tmp_path / "held_out.jsonl", 7)
    result, seen = trained(with_dpo(tmp_path, eval_data=(str(held_out),), eval_every=10, steps=20))
    first, last = seen.steps[0], seen.steps[-1]
    assert first.loss == LN_2
    assert (first.preference.margin, first.preference.accuracy) == (0.0, 0.0)
    assert first.preference.chosen_loss > 4  # of 256 bytes, untrained: ln 256 is 5.5
    assert last.loss < 0.6
    assert last.preference.accuracy > 0.9
    assert last.preference.rejected_reward < 0 < last.preference.margin
    assert [one.step for one in seen.evals] == [10, 20]
    assert all(one.perplexity is None and one.preference.pairs == 7 for one in seen.evals)
    assert seen.evals[-1].loss < seen.evals[0].loss < LN_2
    page = run_html(read_run_folder(result.folder))
    assert "Rewards" in page and "Accuracy" in page and "over its pairs" in page
    kept = reference_file(result.folder)
    assert kept["log_probs"].shape == (60, 2)  # those held out are the first of the others
    assert (kept["log_probs"] < 0).all()


def test_nothing_is_dropped_where_a_pass_is_compared_with_the_reference(tmp_path):
    """TRL's `disable_dropout`, which is its default: losses are those of the model without any."""
    losses = []
    for rate in (0.5, 0.0):
        config = tiny_config("gpt2", vocab_size=260) | {"pad_token_id": None}
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate)
        folder = tmp_path / str(rate)
        torch.manual_seed(3)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        made.float().save_pretrained(folder / "model")
        _, seen = trained(with_dpo(folder, model=str(folder / "model"), steps=3))
        losses.append([step.loss for step in seen.steps])
    assert losses[0] == losses[1] and losses[0][0] == pytest.approx(LN_2, abs=1e-6)


def test_the_reference_is_what_transformers_says_of_the_base(tmp_path):
    """Of each answer behind its prompt, with the adapters that are gone on with left out."""
    from transformers import AutoModelForCausalLM

    first, _ = trained(with_base(tmp_path, lora="r=4", steps=20))
    wanted = with_base(tmp_path, adapter=first.model, output=tmp_path / "second", steps=20)
    _, seen = trained(wanted)
    assert seen.steps[0].loss != LN_2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = []
    for line in (tmp_path / "upper.jsonl").read_text().splitlines():
        row = json.loads(line)
        for answer in ("chosen", "rejected"):
            ids = torch.tensor(list((row["prompt"] + row[answer]).encode()))
            with torch.no_grad():
                rows = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
            behind = len(row["prompt"]) - 1
            found = rows[:-1].gather(1, ids[1:, None])[behind:]
            expected.append(found.sum().item())
    for run in ("run", "second"):
        found = reference_file(tmp_path / run)["log_probs"]
        assert sorted(found.flatten()) == pytest.approx(sorted(expected), abs=1e-4)


@pytest.mark.parametrize(
    "given", [{"dtype": "bfloat16"}, {"model": "base", "lora": "r=4"}], ids=["full", "adapters"]
)
def test_a_run_goes_on_under_another_policy_to_the_same_bits(tmp_path, given):
    def pairs(folder: Path) -> dict[str, Any]:
        more = {}
        if "model" in given:
            save(random_model("llama", torch.float32), folder / "base")
            more["model"] = str(folder / "base")
        data = write_pairs(folder / "pairs.jsonl", upper="model" in given)
        return {"loss": "dpo", "data": (str(data),)} | given | more

    same_bits_after_a_stop(tmp_path, {"policy": "streaming"}, **pairs(tmp_path))


def test_the_reference_is_kept_and_computed_anew_only_where_it_has_to_be(tmp_path):
    wanted = with_dpo(tmp_path, steps=20)
    _, seen = trained(wanted, stop_after=2)
    assert sum("computing the reference" in line for line in seen.lines) == 1
    path = RunFiles(wanted.output).reference
    before = path.read_bytes()
    _, seen = trained(wanted, resume=True, stop_after=8)
    assert not any("reference" in line for line in seen.lines)
    assert path.read_bytes() == before
    path.write_bytes(before[:100])  # damaged: of the model before training, not as it is now
    _, seen = trained(wanted, resume=True)
    assert any("computing the reference" in line for line in seen.lines)
    values = by_key(wanted.output)
    path.write_bytes(before)
    kept = by_key(wanted.output)
    assert len(values) > 9
    assert values.items() <= kept.items()


def test_a_model_that_changed_meanwhile_is_no_reference(tmp_path):
    """Neither is one that was only copied: its bytes count, not when it was written."""
    wanted = with_base(tmp_path, steps=20)
    trained(wanted, stop_after=2)
    weights = tmp_path / "base" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content)
    _, seen = trained(wanted, resume=True, stop_after=6)
    assert not any("reference" in line for line in seen.lines)
    weights.write_bytes(content[:-4] + b"\0\0\0\x3f")
    with pytest.raises(TwinstreamError, match="is not what it was when the run began"):
        trained(wanted, resume=True)


def test_bad_data_ends_the_run_with_a_checkpoint_where_it_comes(tmp_path, monkeypatch):
    """The reference is of what comes before it."""
    given = ChunkStream.__next__

    def failing(self: ChunkStream) -> DataChunk:
        if self._num_chunks == 8:
            raise DataError("row 9 is bad")
        return given(self)

    monkeypatch.setattr(ChunkStream, "__next__", failing)
    wanted = with_dpo(tmp_path, steps=20)
    each = Trainer(wanted).prepare().plan.chunks_per_step
    with pytest.raises(TwinstreamError, match=r"row 9 is bad.*All up to step"):
        trained(wanted)
    assert (wanted.output / f"checkpoint-{8 // each}").is_dir()
    assert not reference_file(wanted.output)["covers"].item()
    monkeypatch.setattr(ChunkStream, "__next__", given)
    result, _ = trained(wanted, resume=True)
    straight, _ = trained(with_dpo(tmp_path / "straight", steps=20))
    assert state_files(result.folder, 20) == state_files(straight.folder, 20)


def test_a_stop_while_the_reference_is_computed_keeps_what_is_known(tmp_path, monkeypatch):
    from twinstream.training.run import reference

    monkeypatch.setattr(reference, "_MOST_PASSES", 1)
    wanted = with_dpo(tmp_path)
    add = Reference.add

    def stopping(self: Reference, chunk: DataChunk, log_probs: np.ndarray) -> None:
        add(self, chunk, log_probs)
        trainer.stop()

    monkeypatch.setattr(Reference, "add", stopping)
    trainer = Trainer(wanted)
    with pytest.raises(TwinstreamError, match="pairs of the reference are kept"):
        trainer.train()
    known = len(reference_file(wanted.output)["keys"])
    assert 0 < known < 60
    monkeypatch.setattr(Reference, "add", add)
    result, _ = trained(wanted, resume=True)
    straight, _ = trained(with_dpo(tmp_path / "straight"))
    assert state_files(result.folder, 6) == state_files(straight.folder, 6)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_ranks_have_the_losses_of_one_device(tmp_path, layout):
    def wanted(folder: Path, **more: Any) -> TrainOptions:
        pairs = write_pairs(folder / "pairs.jsonl")
        given = {"loss": "dpo", "data": (str(pairs),), "chunk_tokens": 128, "steps": 4,
                 "eval_data": (str(write_pairs(folder / "held_out.jsonl", 9)),)}  # fmt: skip
        return rank_options(folder, **given | more)

    one, alone = trained(wanted(tmp_path / "one"))
    several, seen = trained(wanted(tmp_path / "several", ranks=2, **layout))
    if "pp" in layout:
        assert seen.losses == alone.losses
        assert state_files(several.folder, 4) == state_files(one.folder, 4)
        assert [one.preference for one in seen.steps] == [one.preference for one in alone.steps]
    assert seen.losses == pytest.approx(alone.losses, abs=1e-5)
    assert [s.preference.pairs for s in seen.steps] == [s.preference.pairs for s in alone.steps]
    assert seen.evals[-1].loss == pytest.approx(alone.evals[-1].loss, abs=1e-5)
    assert seen.evals[-1].preference.pairs == 9


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        ({"loss": "dpo,gamma=1"}, TwinstreamError, "dpo has no 'gamma'"),
        ({"loss": "dpoo"}, TwinstreamError, "write dpo, or FILE.py:FUNCTION"),
        ({"chunk_tokens": 64}, ChunkingError, "the nearest are 128"),
        ({"data": "text"}, DataError, r"a\.txt is text, and the loss is of pairs"),
        ({"data": "rows"}, DataError, "lacks `chosen` or `rejected`; it has text"),
    ],
    ids=["an unknown option", "an unknown loss", "a small chunk", "text", "rows without pairs"],
)
def test_what_cannot_be_is_refused(tmp_path, given, kind, why):
    if "data" in given:
        (tmp_path / "a.txt").write_text("text " * 99)
        rows = write_rows(tmp_path / "rows.jsonl")
        given = {"data": (str(tmp_path / "a.txt" if given["data"] == "text" else rows),)}
    with pytest.raises(kind, match=why):
        trained(with_dpo(tmp_path, **given))


def test_metrics_by_hand():
    lengths = (3, 4, 2, 5, 2)
    labels = np.full(16, -100, np.int32)
    for at in (1, 4, 5, 7, 10, 12):
        labels[at] = 5
    chunk = DataChunk(np.arange(16, dtype=np.int32), labels, lengths, 2, num_pairs=2)
    now = np.array([-1.0, -2.0, -4.0, -3.0, 0, 0], np.float32)
    before = np.array([[-2.0, -3.0], [-3.0, -3.0]], np.float32)
    found = pair_metrics([chunk], [now], [before], beta=0.5)
    assert found.pairs == 2
    assert found.chosen_reward == pytest.approx(0.5 * (1 - 1) / 2)
    assert found.rejected_reward == pytest.approx(0.5 * (1 + 0) / 2)
    assert found.margin == pytest.approx((0.5 * (1 - 1) + 0.5 * (-1 - 0)) / 2)
    assert found.accuracy == 0
    assert found.chosen_loss == pytest.approx((1 + 4) / 2)
    assert found.rejected_loss == pytest.approx((2 + 3) / 4)
    keys = keys_of(chunk)
    assert len(set(keys)) == 2
    other = DataChunk(chunk.ids, np.where(labels == 5, 6, labels), lengths, 2, num_pairs=2)
    assert not set(keys_of(other)) & set(keys)


def test_a_reference_of_another_model_is_not_read(tmp_path):
    path = tmp_path / "reference.npz"
    chunk = DataChunk(np.arange(4, dtype=np.int32), np.full(4, 1, np.int32), (2, 2), num_pairs=1)
    one = Reference(path, "one")
    one.add(chunk, np.array([-1.5, -2.5, 0, 0], np.float32))
    one.keep()
    assert Reference(path, "one").of(chunk).tolist() == [[-1.5], [-2.5]]
    assert Reference(path, "another").is_of_another
    with pytest.raises(TwinstreamError, match="does not know 1 of the 1 pairs"):
        Reference(path, "another").of(chunk)
    assert len(Reference(path, "one", ["of a file"])) == 0  # a weight that no sample of it shows
    content = path.read_bytes()
    for damaged in (b"", b"no file", content[:-1]):
        path.write_bytes(damaged)
        assert not len(Reference(path, "one"))
    for at in range(0, len(content), 7):
        flipped = bytes([content[at] ^ 1])
        path.write_bytes(content[:at] + flipped + content[at + 1 :])
        found = Reference(path, "one")
        assert not len(found) or found.of(chunk).tolist() == [[-1.5], [-2.5]]


@pytest.mark.parametrize("given", [{}, {"lora": "r=4,alpha=8"}], ids=["full", "adapters"])
def test_pairs_in_parts_have_one_set_of_bits_near_those_of_whole_blocks(tmp_path, given):
    """Losses, rewards and the reference of two ranks of tp, of one rank in two parts, and of one
    device."""
    heads = {"num_heads": 8, "num_kv_heads": 4, "vocab_size": 260}
    model = str(write_config(tmp_path / "m", num_layers=2, **heads))
    runs = {}
    for name, layout in (
        ("tp", {"ranks": 2, "tp": 2, "parts": 2}), ("parts", {"ranks": 1, "parts": 2}), ("one", {}),
    ):  # fmt: skip
        result, seen = trained(with_dpo(tmp_path / name, model=model, **given, **layout))
        folder = {path.name: path.read_bytes() for path in (result.folder / "model").iterdir()}
        rewards = [(one.loss, one.preference.margin) for one in seen.steps]
        runs[name] = rewards, by_key(result.folder), folder
    assert runs["tp"] == runs["parts"]
    assert runs["tp"][0][0] == (LN_2, 0.0)
    assert np.array(runs["tp"][0]) == pytest.approx(np.array(runs["one"][0]), rel=1e-4, abs=1e-6)


def test_pairs_on_ranks_that_share_experts_have_the_bits_of_replicas(tmp_path):
    experts = write_config(tmp_path / "m", "tiny-experts", vocab_size=260)
    given = {"model": str(experts), "max_grad_norm": 0.0, "ranks": 2, "dp": 2, "steps": 4}
    runs = []
    for name, layout in (("shared", {"ep": 2}), ("whole", {})):
        result, seen = trained(with_dpo(tmp_path / name, **given, **layout))
        rewards = [(one.loss, one.preference.margin) for one in seen.steps]
        folder = {path.name: path.read_bytes() for path in (result.folder / "model").iterdir()}
        runs.append((rewards, by_key(result.folder), folder))
    assert runs[0] == runs[1]
    assert runs[0][0][0][0] == pytest.approx(LN_2)
