"""What a run does between its first and its last step."""

import errno
import json
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.plans import recompute_levels
from tests.training.small_runs import (
    Seen,
    options,
    state_files,
    trained,
    write_config,
    write_rows,
)
from twinstream.data.data_error import DataError
from twinstream.executor.weights.checkpoint_files import CheckpointFiles
from twinstream.executor.weights.errors import WeightsError
from twinstream.log.metrics import StepMetrics
from twinstream.log.tensorboard import TensorBoardMissingError
from twinstream.planner import planner
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.callbacks import Callback
from twinstream.training.checkpoints import Checkpoints
from twinstream.training.model_opening import open_model
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.preparing import open_data
from twinstream.training.run.run_folder import RunEndedError
from twinstream.training.run.steps import LossError, StepBatches, StepData
from twinstream.training.trainer import Trainer, TrainResult


def test_the_loss_falls_and_the_model_is_there(tmp_path: Path) -> None:
    result, seen = trained(options(tmp_path, steps=12))
    assert seen.losses[-1] < seen.losses[0] - 0.5
    assert result.model == tmp_path / "run" / "model" and result.measured is not None
    assert sorted(path.name for path in result.model.iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    assert result.fill > 0.9
    for name in ("plan.json", "comparison.json", "run.toml", "machine.toml"):
        assert (result.folder / name).exists(), name


def test_tokens_and_targets_are_those_of_the_data(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 30)
    texts = [json.loads(line)["text"].encode() for line in rows.read_text().splitlines()]
    wanted = options(tmp_path, data=(str(rows),), seq_len=256, tokens_per_step=1024, steps=20)
    _, seen = trained(wanted)
    in_epoch = [step for step in seen.steps if step.epoch <= 1.02]
    total = sum(map(len, texts))
    assert sum(step.tokens for step in in_epoch) == pytest.approx(total, rel=0.25)
    assert all(step.targets < step.tokens <= 1024 for step in seen.steps)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    wanted = options(
        tmp_path, learning_rate=1e3, warmup="3", steps=40, save_every="1", max_grad_norm=0.0,
        dtype="bfloat16", weight_decay=900.0,
    )  # fmt: skip
    with pytest.raises(LossError, match=r"loss of step \d+ is (nan|inf)"):
        trained(wanted)
    latest = Checkpoints(wanted.output).latest()
    assert latest is not None and latest.state.step >= 1


def test_a_full_disk_is_told_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = options(tmp_path, save_every="2", keep=5)
    free: Any = shutil._ntuple_diskusage
    real = shutil.disk_usage

    def usage(path: Path) -> Any:
        return free(1, 1, 0) if path.name == "checkpoint-4.partial" else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    result, seen = trained(wanted)
    assert [line for line in seen.lines if "no checkpoint after step 4" in line]
    assert "too little room" in "".join(seen.lines)
    names = [path.name for path in Checkpoints(wanted.output).complete()]
    assert names == ["checkpoint-2", "checkpoint-6"] and result.model is not None


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wanted = options(tmp_path)
    monkeypatch.setattr(CheckpointFiles, "write", refuse)
    with pytest.raises(RunEndedError, match="No space left on device") as ended:
        trained(wanted)
    assert not list(wanted.output.glob("checkpoint-*"))
    result = ended.value.result
    assert isinstance(result, TrainResult) and (result.model, result.step) == (None, 0)
    assert result.loss is not None and result.measured is not None
    assert (wanted.output / "comparison.json").exists()


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, seen, free = options(tmp_path), Seen(), shutil._ntuple_diskusage
    trainer = Trainer(wanted, callbacks=[seen])
    prepared = trainer.prepare()
    needed = prepared.plan.checkpoint_bytes
    room = "room for .*2 checkpoints with one that is being written"
    for free_bytes, is_told in ((3 * needed, False), (3 * needed - 1, True), (needed - 1, True)):
        found = free(1, 1, free_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, found=found: found)
        assert any(re.search(room, note) for note in prepared.notes) == is_told
    with pytest.raises(WeightsError, match=rf"too little room; it needs {needed} bytes"):
        trainer.train()
    assert not seen.steps
    monkeypatch.undo()
    result, _ = trained(wanted)  # what the refused one made is not in the way
    written = sum(
        path.stat().st_size for path in Checkpoints(result.folder).complete()[0].rglob("*")
    )
    assert needed <= written < 1.3 * needed


def test_data_that_fails_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth step has none: the first three are kept, and gone on from to the same bits."""
    whole, straight = trained(options(tmp_path / "a"))
    wanted = options(tmp_path / "b")
    step = StepBatches.step

    def failing(self: StepBatches, number: int) -> StepData:
        if number == 4:
            raise DataError("rows.jsonl:17: no text")
        return step(self, number)

    monkeypatch.setattr(StepBatches, "step", failing)
    with pytest.raises(RunEndedError, match=r"rows.jsonl:17.*up to step 3.*--resume") as ended:
        trained(wanted)
    assert ended.value.result.step == 3
    monkeypatch.undo()
    result, seen = trained(wanted, resume=True)
    assert seen.losses == straight.losses[3:]
    assert state_files(result.folder, 6) == state_files(whole.folder, 6)


def test_the_model_and_the_run_may_go_while_it_trains(tmp_path: Path) -> None:
    """Someone removes MODEL after the first step, and DIR; the trained model has all it needs."""
    wanted = options(tmp_path)
    model = Path(wanted.model).parent
    (model / "tokenizer_config.json").write_text('{"eos_token": "x"}')

    class Removes(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            shutil.rmtree(model, ignore_errors=True)
            shutil.rmtree(wanted.output, ignore_errors=True)

    result = Trainer(wanted, callbacks=[Removes()]).train()
    assert result.model is not None
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= {
        path.name for path in result.model.iterdir()
    }
    assert (wanted.output / "run.toml").exists() and (wanted.output / "checkpoint-6").exists()


def test_an_index_that_lacks_a_tensor_is_refused_before_the_first_step(tmp_path: Path) -> None:
    first, _ = trained(options(tmp_path / "first", steps=1, warmup="0"))
    assert first.model is not None
    found = load_file(first.model / "model.safetensors")
    (first.model / "model.safetensors").unlink()
    save_file(found, first.model / "model-1.safetensors", {"format": "pt"})
    listed = {name: "model-1.safetensors" for name in found if name != "model.norm.weight"}
    index = first.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    refused(
        tmp_path, WeightsError, "does not say in which file model.norm.weight is",
        model=str(first.model),
    )  # fmt: skip


def test_what_a_callback_raises_ends_the_run_and_nothing_runs_afterwards(tmp_path: Path) -> None:
    class Raises(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            raise KeyError(metrics.step)

    threads = threading.active_count()
    with pytest.raises(KeyError, match="1"):
        Trainer(options(tmp_path), callbacks=[Raises()]).train()
    assert threading.active_count() == threads
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    result, _ = trained(options(tmp_path), resume=True)
    assert result.step == 6


def test_what_is_resolved_is_told_before_anything_is_written(tmp_path: Path) -> None:
    trainer = Trainer(options(tmp_path, steps=None, epochs=2.0, learning_rate=None))
    prepared = trainer.prepare()
    assert not (tmp_path / "run").exists()
    wanted = round(2 * prepared.data.epoch_tokens / 256)
    assert abs(prepared.num_steps - wanted) <= 1
    assert prepared.options.learning_rate == 3e-4 and prepared.options.backend == "cpu"


def test_tensorboard_that_is_missing_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    refused(tmp_path, TensorBoardMissingError, "twinstream.tensorboard", tensorboard=True)


def refused(folder: Path, kind: type[TwinstreamError], match: str, **given: Any) -> None:
    wanted = options(folder, **given)
    with pytest.raises(kind, match=match):
        trained(wanted)
    assert not (folder / "run").exists()


def test_bad_input_is_one_message_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    refused(tmp_path, DataError, r"bad\.jsonl:2", data=(str(tmp_path / "bad.jsonl"),))
    (tmp_path / "empty.jsonl").touch()
    refused(tmp_path, DataError, "nothing to train on", data=(str(tmp_path / "empty.jsonl"),))
    other = write_rows(tmp_path / "other.jsonl", 3, body="none of the known")
    refused(tmp_path, DataError, "body", data=(str(other),))
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"prompt": "why?", "completion": ""}) + "\n")
    refused(tmp_path, DataError, "has a token to learn", data=(str(chat),))
    refused(tmp_path, TwinstreamError, "cannot read nowhere.txt", data=("nowhere.txt",))
    refused(tmp_path, TwinstreamError, "unknown model", model="tinny")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "none"}')
    refused(tmp_path, TwinstreamError, "no model type 'none'", model=str(strange / "config.json"))
    refused(tmp_path, WeightsError, "has neither", model=str(write_config(tmp_path / "m").parent))


def test_options_survive_their_file(tmp_path: Path) -> None:
    from twinstream.training.options import read_options, write_options

    wanted = options(tmp_path, eval_data=("a", "b=2"), chat_template='x\\y"z', epochs=0.5)
    write_options(wanted, tmp_path)
    path = tmp_path / "run.toml"
    assert TrainOptions.of(read_options(path)) == wanted
    path.write_text(path.read_text() + "fp32_tail = 0\n")  # as an older run has it
    assert TrainOptions.of(read_options(path)) == wanted
    path.write_text(path.read_text().replace("fp32_tail = 0", "fp32_tail = 2"))
    with pytest.raises(OptionsError, match="no option fp32_tail"):
        TrainOptions.of(read_options(path))


def test_evaluations_are_of_the_weights_and_change_nothing(tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 17)
    plain, before = trained(options(tmp_path / "plain"))
    result, seen = trained(
        options(tmp_path, eval_data=(str(held_out),), eval_every=2, save_every="4", keep=1)
    )
    assert seen.losses == before.losses
    assert state_files(result.folder, 6) == state_files(plain.folder, 6)
    assert [found.step for found in seen.evals] == [2, 4, 6]
    assert seen.evals[0].loss > seen.evals[-1].loss == result.eval_loss
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    assert seen.evals[0].tokens == sum(map(len, texts))
    assert seen.evals[-1].loss == pytest.approx(loss_by_transformers(result.model, texts), abs=1e-5)
    best = min(seen.evals, key=lambda found: found.loss).step
    kept = {path.name for path in Checkpoints(result.folder).complete()}
    assert kept == {"checkpoint-6"} | {f"checkpoint-{best}"} & {"checkpoint-4"}


def test_where_the_next_step_updates_evaluations_and_checkpoints_are_of_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 17)
    more = {"eval_data": (str(held_out),), "eval_every": 2, "save_every": "3", "keep": 9}
    found = {}
    for place in ("device_after_backward", "device_before_next_use"):
        monkeypatch.setattr(planner, "ON_DEVICE", ("device", place))
        result, seen = trained(options(tmp_path / place, **more))
        latest = Checkpoints(result.folder).latest()
        assert latest is not None and latest.state.recipe.optimizer == place
        states = [state_files(result.folder, step) for step in (3, 6)]
        found[place] = seen.losses, [step.grad_norm for step in seen.steps], states
        found[place] += ([one.loss for one in seen.evals],)
    assert found["device_after_backward"] == found["device_before_next_use"]


def loss_by_transformers(folder: Path | None, texts: list[str]) -> float:
    """The mean over all tokens but the first of each document, cut as for training."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    total = count = 0.0
    for text in texts:
        for at in range(0, len(text), 64):
            ids = torch.tensor([list(text[at : at + 64].encode())])
            if ids.shape[1] > 1:
                found = model(input_ids=ids, labels=ids).loss.item()
                total, count = total + found * (ids.shape[1] - 1), count + ids.shape[1] - 1
    return total / count


def test_few_data_make_small_steps(tmp_path: Path) -> None:
    wanted = options(tmp_path, steps=None, tokens_per_step=None)
    prepared = Trainer(wanted).prepare()
    assert 20 <= prepared.num_steps <= 40 and prepared.tokens_per_step % 64 == 0
    fixed = Trainer(options(tmp_path / "b", steps=2, tokens_per_step=None)).prepare()
    assert fixed.tokens_per_step > prepared.tokens_per_step


def test_given_weights_need_their_tokenizer_or_to_be_told_that_they_read_bytes(
    tmp_path: Path,
) -> None:
    """Random weights may read bytes, given ones were trained on something; ids need neither."""
    first, _ = trained(options(tmp_path / "first", steps=1))
    folder, rows = str(first.model), str(write_rows(tmp_path / "rows.jsonl"))
    ids = tmp_path / "ids.bin"
    ids.write_bytes(bytes(byte for low in range(100) for byte in (low, 0)) * 100)  # uint16
    given = {"model": folder, "seq_len": 64}

    def opened(**more: Any) -> None:
        wanted = options(tmp_path, **given | {"tokenizer": None, "data": (rows,)} | more)
        open_data(wanted, open_model(wanted, weights=True), None)

    with pytest.raises(DataError, match=r"has no tokenizer\.json\. Make one with transformers"):
        opened()
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        opened(data=(str(ids), rows))
    opened(data=(str(ids),))
    opened(tokenizer="bytes")
    opened(model=str(write_config(tmp_path / "random")))
    for name in ("tokenizer.model", "merges.txt"):
        (tmp_path / "random" / name).write_bytes(b"of a slow tokenizer")
    with pytest.raises(DataError, match=r"only tokenizer\.model, merges\.txt, which are"):
        opened(model=str(tmp_path / "random" / "config.json"))


@pytest.mark.parametrize(("word", "level"), [("full", "INPUT"), ("attention", "ATTENTION")])
def test_levels_of_recompute_have_the_words_that_plan_has(
    tmp_path: Path, word: str, level: str
) -> None:
    plan = Trainer(options(tmp_path, recompute=word)).prepare().plan
    assert recompute_levels(plan.schedule) == {level}
