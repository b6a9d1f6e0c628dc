"""A run that stops, or is killed, goes on to the very bits of one that did not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.front_door.command_line import call
from tests.training.small_runs import options, state_files, trained, write_config, write_rows
from twinstream.data.data_error import DataError
from twinstream.log.metrics import StepMetrics, events_of_kind, read_metrics
from twinstream.log.run_files import RunFiles
from twinstream.models.lowering import declarations
from twinstream.models.lowering.optimizer_tasks import state_parts
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.files import DocumentError, only_writer
from twinstream.training.checkpoints import (
    CheckpointError,
    Checkpoints,
    DataPosition,
    TrainingState,
)
from twinstream.training.options import (
    OptionsError,
    TrainOptions,
    fixed_options,
    read_options,
    write_options,
)
from twinstream.training.trainer import Trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_under_another_cap_policy_and_recompute(tmp_path: Path, dtype: str) -> None:
    whole, straight = trained(options(tmp_path / "a", dtype=dtype))
    wanted = options(tmp_path / "b", dtype=dtype)
    stopped, before = trained(wanted, stop_after=3)
    done = stopped.step
    assert stopped.stopped and 3 <= done < 6
    again = wanted.model_copy(update={"policy": "full_recompute", "host_mem": "1GiB"})
    result, after = trained(again, resume=True)
    assert result.model is not None and result.step == 6
    assert before.losses[:done] + after.losses == straight.losses
    assert state_files(wanted.output, 6) == state_files(whole.folder, 6)
    logged = events_of_kind(read_metrics(wanted.output / "metrics.jsonl"), StepMetrics)
    assert [step.step for step in logged] == [1, 2, 3, 4, 5, 6]
    assert [step.loss for step in logged] == straight.losses


def test_the_folder_alone_says_how_to_go_on(tmp_path: Path) -> None:
    wanted = options(tmp_path, learning_rate=None, warmup="20%")
    trained(wanted, stop_after=2)
    kept = read_options(wanted.output / "run.toml")
    assert kept["learning_rate"] == 3e-4 and kept["steps"] == 6 and kept["dtype"] == "float32"
    result, _ = trained(type(wanted).of(kept), resume=True)
    assert result.step == 6
    result, _ = trained(wanted.model_copy(update={"steps": 4}), resume=True)
    assert result.step == 6 and not result.stopped  # none of four are left


def test_other_data_is_refused(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    trained(wanted, stop_after=2)
    write_rows(tmp_path / "rows.jsonl", 121)
    for _ in range(2):  # it is remembered what there was
        with pytest.raises(DataError, match="has changed where this run has read it"):
            trained(wanted, resume=True)
    other = write_rows(tmp_path / "other.jsonl", 120)
    wanted = wanted.model_copy(update={"data": (str(tmp_path / "rows.jsonl"), str(other))})
    with pytest.raises(DataError, match="not that of the checkpoint"):
        trained(wanted, resume=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta2", 0.9), ("seed", 1), ("dtype", "bfloat16"), ("tokens_per_step", 512), ("lora", "r=4"),
     ("optimizer_state", "8bit"), ("max_grad_norm", 2.0), ("model", "tiny")],
)  # fmt: skip
def test_what_decides_the_bits_cannot_change(name: str, value: object, tmp_path: Path) -> None:
    wanted = options(tmp_path)
    wanted.output.mkdir()
    write_options(wanted, wanted.output)
    with pytest.raises(OptionsError, match=name):
        Trainer(wanted.model_copy(update={name: value}), resume=True)
    Trainer(wanted.model_copy(update={"device_mem": "1GiB", "steps": 9}), resume=True)


def test_a_run_that_failed_before_its_first_step_may_be_begun_anew(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    wanted.output.mkdir()
    write_options(wanted.model_copy(update={"kernels": "triton"}), wanted.output)
    RunFiles(wanted.output).metrics.touch()
    trained(wanted, stop_after=2)
    assert read_options(wanted.output / "run.toml").get("kernels") != "triton"
    with pytest.raises(OptionsError, match="has a run already"):
        trained(wanted)


def test_a_profile_of_another_kind_of_device_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    told = call("train", "tiny", rows, "-o", tmp_path / "run", "--machine", "h100", "--steps", 1)
    assert told.code == 2 and "'h100' is the profile of a cuda device" in told.err
    nowhere = call("train", "-o", tmp_path / "nowhere", "--resume")
    assert nowhere.code == 2 and "has no run to go on with" in nowhere.err


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    trained(wanted, stop_after=2)
    with pytest.raises(OptionsError, match="has a run already: go on with it"):
        trained(wanted)
    with pytest.raises(OptionsError, match="has no run to go on with"):
        trained(options(tmp_path, output=tmp_path / "none"), resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(OptionsError, match="is not an empty folder"):
        trained(options(tmp_path, output=tmp_path / "full"))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    wanted = options(tmp_path, save_every="2", keep=3)
    trained(wanted, stop_after=5)
    *_, before, last = Checkpoints(wanted.output).complete()
    weights = last / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors is \d+ bytes, and was"):
        trained(wanted, resume=True)
    (last / "COMPLETE").write_text("")
    with pytest.raises(CheckpointError, match="COMPLETE has no longer the digest"):
        trained(wanted, resume=True)
    (last / "COMPLETE").unlink()
    theirs = [
        wanted.output / name for name in ("checkpoint-notes", "checkpoint-7", "model.x.partial")
    ]
    for folder in theirs:
        folder.mkdir()
        (folder / "mine.txt").touch()
    result, seen = trained(wanted, resume=True)
    assert all((folder / "mine.txt").exists() for folder in theirs)
    assert result.step == 6 and f"checkpoint-{seen.steps[0].step - 1}" == before.name


def test_a_flipped_bit_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """Of weights, of the optimizer's state, and of what the run is."""
    wanted = options(tmp_path)
    trained(wanted, stop_after=2)
    (checkpoint,) = Checkpoints(wanted.output).complete()
    for name in ("model.safetensors", "optimizer/opt.0.bin", "training.json"):
        path = checkpoint / name
        content = path.read_bytes()
        at = content.index(b'"step":') + 7 if name == "training.json" else len(content) // 2
        changed = bytes([content[at] ^ 1])
        path.write_bytes(content[:at] + changed + content[at + 1 :])
        with pytest.raises(CheckpointError, match=f"{path} has other bytes than when"):
            Trainer(wanted, resume=True)
        path.write_bytes(content)
    Trainer(wanted, resume=True)


def test_an_edited_run_toml_is_refused_by_name(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    prepared = Trainer(wanted).prepare()
    wanted.output.mkdir()
    write_options(prepared.options, wanted.output)
    state = TrainingState(
        step=2, num_steps=6, seed=0, fingerprint="", position=DataPosition(),
        recipe=prepared.recipe, spec=prepared.model.spec, workload=prepared.plan.workload,
        options=fixed_options(prepared.options),
    )  # fmt: skip
    Checkpoints(wanted.output).write(state, Path.mkdir)
    path = wanted.output / "run.toml"
    Trainer(TrainOptions.of(read_options(path)), resume=True)
    lines = path.read_text().splitlines()
    edits = {
        "weight_decay": "0.5", "max_grad_norm": "2.0", "optimizer_state": '"8bit"', "seed": "7",
        "tokens_per_step": "512", "chunk_tokens": "64",
    }  # fmt: skip
    for name, value in edits.items():
        others = [line for line in lines if not line.startswith(f"{name} =")]
        path.write_text("\n".join([*others, f"{name} = {value}"]))
        with pytest.raises(OptionsError, match=rf"run.toml says {name} = .* was trained with"):
            Trainer(TrainOptions.of(read_options(path)), resume=True)


def test_another_model_is_refused(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    trained(wanted, stop_after=2)
    write_config(tmp_path / "model", norm_eps=1e-3)
    with pytest.raises(CheckpointError, match=r"model's norm_eps is 0\.001"):
        trained(wanted, resume=True)


def test_layers_in_parts_give_the_same_bits_and_are_not_read_in_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = trained(options(tmp_path / "a"))
    wanted = options(tmp_path / "b")
    with monkeypatch.context() as patched:
        patched.setattr(declarations, "_LARGEST_PART_BYTES", 4 << 10)
        result, before = trained(wanted, stop_after=3)
        assert before.losses == whole.losses[: len(before.losses)] and result.step < 6
        latest = Checkpoints(wanted.output).latest()
        assert latest is not None and (latest.state.state_parts or {})["0"] > 1
    with pytest.raises(CheckpointError, match=r"of group \w+ in \d+ parts, and .* has it in"):
        trained(wanted, resume=True)
    monkeypatch.setattr(declarations, "_LARGEST_PART_BYTES", 4 << 10)
    _, after = trained(wanted, resume=True)
    assert [*before.losses, *after.losses] == whole.losses


def test_checkpoints_that_do_not_tell_parts_had_embedding_and_head_alone_in_some(tmp_path: Path):
    spec = load_preset("8b")  # its embedding has the bytes of three layers
    own = state_parts(spec, Recipe())
    assert own == state_parts(spec, Recipe(), earlier=True) and set(own) == {"embedding", "head"}
    large = load_preset("llama3-405b")  # a layer has 5.9 GiB, its embedding 3.9
    for update in ("adamw", "muon"):
        recipe = Recipe(update=update)
        assert state_parts(large, recipe)["embedding"] == 2
        assert state_parts(large, recipe, earlier=True) == {}
    assert state_parts(large, Recipe(update="lion")) == {}


def test_what_a_kill_leaves_before_a_run_begins_is_not_in_its_way(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    wanted.output.mkdir()
    leftover = wanted.output / f"run.toml.{'0f' * 16}.partial"
    leftover.touch()
    trained(wanted, resume=True, stop_after=1)  # as a supervisor that always says --resume
    assert not leftover.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.partial").touch()  # someone's own
    with pytest.raises(OptionsError, match=r"not an empty folder \(notes.partial is in it\)"):
        trained(options(tmp_path, output=tmp_path / "other"))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    wanted = options(tmp_path)
    trained(wanted, stop_after=2)
    late = Trainer(wanted, resume=True)
    with (
        only_writer(wanted.output),
        pytest.raises(DocumentError, match=f"process {os.getpid()} is writing into .*run: wait"),
    ):
        Trainer(wanted, resume=True)
    fresh = Trainer(options(tmp_path, output=tmp_path / "fresh"))
    with only_writer(tmp_path / "fresh"), pytest.raises(DocumentError, match="is writing into"):
        fresh.train()
    trained(wanted, resume=True)
    with pytest.raises(OptionsError, match=r"another process has trained in .* meanwhile"):
        late.train()


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    wanted = options(tmp_path, save_every="1", keep=2)
    trained(wanted)
    names = [path.name for path in Checkpoints(wanted.output).complete()]
    assert names == ["checkpoint-5", "checkpoint-6"]


def command(folder: Path, *more: str) -> list[str]:
    """The command line of a run."""
    wanted = options(folder)
    return [
        sys.executable, "-m", "twinstream", "train", wanted.model, *wanted.data, "-o",
        str(wanted.output), "--seq-len", "64", "--tokens-per-step", "256", "--steps", "12",
        "--machine", "cpu", "--backend", "cpu", "--save-every", "1", "--data-workers", "0",
        "--learning-rate", "1e-2", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("model", [(), ("tiny-experts",)], ids=["dense", "experts"])
def test_killed_runs_go_on_to_the_same_bits(tmp_path: Path, model: tuple[str, ...]) -> None:
    killing = [sys.executable, "-m", "tests.training.killed_runs", str(tmp_path), "2", *model]
    done = subprocess.run(killing, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sigterm_leaves_a_checkpoint(tmp_path: Path) -> None:
    wanted = [*command(tmp_path, "--no-tensorboard"), "--steps", "100000", "--save-every", "never"]
    process = subprocess.Popen(wanted, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and (not log.exists() or not log.stat().st_size):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, told
    assert "to go on: twinstream train -o" in told
    steps = events_of_kind(read_metrics(log), StepMetrics)
    names = [path.name for path in Checkpoints(tmp_path / "run").complete()]
    assert names == [f"checkpoint-{steps[-1].step}"]
