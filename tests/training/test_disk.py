"""Runs whose frozen weights are in part at home on a disk: where they lie, or in copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.front_door.command_line import call
from tests.helpers.tiny_chains import small
from tests.training.small_runs import Seen, options, there_and_back, trained, write_config
from tests.training.test_adapters import adapters
from tests.training.test_dpo import write_pairs
from twinstream.executor.weights.errors import WeightsError
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_document
from twinstream.training.options import TrainOptions
from twinstream.training.trainer import Trainer, TrainResult

CAPS = (("900KiB", "150KiB"), ("800KiB", "250KiB"))
CAPS_OF_HALF = (("600KiB", "100KiB"), ("450KiB", "250KiB"))  # of bfloat16
# the cut of the step decides its bits, too
LORA = {"lora": "r=4", "dtype": "float32", "chunk_tokens": 128, "chunks_per_round": 1}


def with_base(folder: Path, **given: Any) -> TrainOptions:
    """A run beside a folder's base of six narrow layers, in float32."""
    base = folder / "base"
    if not base.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**to_hf_config(small("tiny", num_layers=6)))
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
    return options(folder, **({"model": str(base), **LORA} | given))


def with_disk(wanted: TrainOptions, disk: Path, caps: tuple[str, str], run: Path) -> TrainOptions:
    return wanted.model_copy(
        update={
            "disk": disk, "disk_bandwidth": "1GB/s", "device_mem": caps[0], "host_mem": caps[1],
            "output": run,
        }
    )  # fmt: skip


def num_reads(result: TrainResult) -> int:
    plan = read_document(Schedule, result.folder / "plan.json")
    return sum(op.stream.queue == "disk_read" for op in plan.ops)


def same_as_without(tmp_path: Path, steps: int = 3, **given: Any) -> None:
    rows = ["a quick brown fox", "jumps over", "the lazy dog in the rain"]
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("\n\n".join(rows).upper())
    wanted = with_base(tmp_path, steps=steps, eval_data=(str(held_out),), save_every="2", **given)
    whole, straight = trained(wanted)
    for number, caps in enumerate(CAPS if "dtype" not in given else CAPS_OF_HALF):
        run = tmp_path / f"disk-{number}"
        result, seen = trained(with_disk(wanted, tmp_path, caps, run))
        assert num_reads(result) > 0, caps
        assert seen.losses == straight.losses
        assert [one.loss for one in seen.evals] == [one.loss for one in straight.evals]
        assert adapters(result.folder, steps) == adapters(whole.folder, steps)


def test_weights_are_read_where_they_lie_to_the_same_bits(tmp_path: Path) -> None:
    """With evaluations and clipping, under two pairs of caps; nothing is written beside runs."""
    same_as_without(tmp_path)
    assert not list(tmp_path.glob("twinstream-weights-*"))


@pytest.mark.parametrize("given", [{"dtype": "bfloat16"}, {"base": "nf4", "dtype": "bfloat16"}])
def test_weights_of_other_values_are_copied_once(tmp_path: Path, given: dict[str, str]) -> None:
    same_as_without(tmp_path, **given)
    (copies,) = tmp_path.glob("twinstream-weights-*")
    before = {path: path.stat().st_mtime_ns for path in copies.iterdir()}
    again = with_disk(
        with_base(tmp_path, steps=2, **given), tmp_path, CAPS_OF_HALF[0], tmp_path / "again"
    )
    _, seen = trained(again)
    assert not [line for line in seen.lines if line.startswith("writing")]
    assert {path: path.stat().st_mtime_ns for path in copies.iterdir()} == before
    damaged = next(copies.glob("*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _, mended = trained(again.model_copy(update={"output": tmp_path / "mended"}))
    assert mended.losses == seen.losses
    assert [line for line in mended.lines if line.startswith("writing")]


def test_random_weights_are_written_where_the_user_says(tmp_path: Path) -> None:
    config = write_config(tmp_path / "m", num_layers=6)
    given = LORA | {"steps": 2, "model": str(config)}
    _, straight = trained(options(tmp_path, **given))
    place = tmp_path / "drive"
    place.mkdir()
    wanted = with_disk(options(tmp_path, **given), place, CAPS[0], tmp_path / "b")
    result, seen = trained(wanted)
    assert num_reads(result) > 0 and seen.losses == straight.losses
    assert len(list(place.glob("twinstream-weights-*/*.bin"))) > 0


def test_a_run_goes_on_from_a_disk_to_none_and_back(tmp_path: Path) -> None:
    whole, straight = trained(with_base(tmp_path, steps=8))
    plain = with_base(tmp_path, steps=8, output=tmp_path / "b")
    disk = with_disk(plain, tmp_path, CAPS[0], tmp_path / "b")
    result, losses = there_and_back(disk, plain)
    assert losses == straight.losses
    assert adapters(result.folder, 8) == adapters(whole.folder, 8)


def test_the_reference_of_pairs_is_read_from_the_disk_too(tmp_path: Path) -> None:
    pairs = str(write_pairs(tmp_path / "pairs.jsonl"))
    wanted = with_base(tmp_path, steps=2, loss="dpo", data=(pairs,))
    _, straight = trained(wanted)
    result, seen = trained(with_disk(wanted, tmp_path, ("1300KiB", "150KiB"), tmp_path / "disk"))
    assert num_reads(result) > 0
    assert seen.losses == straight.losses


class Touching(Seen):
    """Rewrites the base's file after a step."""

    def __init__(self, path: Path, after: int) -> None:
        super().__init__()
        self._path, self._after = path, after

    def on_step(self, metrics: Any) -> None:
        super().on_step(metrics)
        if metrics.step == self._after:
            self._path.write_bytes(self._path.read_bytes())


def test_a_file_that_changes_under_a_run_ends_it_and_nothing_is_lost(tmp_path: Path) -> None:
    _, straight = trained(with_base(tmp_path, steps=8))
    plain = with_base(tmp_path, steps=8, save_every="2")
    wanted = with_disk(plain, tmp_path, CAPS[0], tmp_path / "b")
    seen = Touching(tmp_path / "base" / "model.safetensors", after=3)
    with pytest.raises(WeightsError, match="has changed since the run began") as ended:
        Trainer(wanted, callbacks=[seen]).train()
    assert "\n" not in str(ended.value)
    done = seen.checkpoints[-1].step
    assert done >= 2
    _, rest = trained(wanted, resume=True)
    assert seen.losses[:done] + rest.losses == straight.losses


def test_what_a_disk_cannot_be_is_said(tmp_path: Path) -> None:
    wanted = with_base(tmp_path)
    for wrong, why in (
        ({"disk_mem": "1GiB"}, "disk_mem needs disk"),
        ({"disk_bandwidth": "1GB/s"}, "disk_bandwidth needs disk"),
        ({"disk": tmp_path / "rows.jsonl"}, "is no folder"),
        ({"disk": tmp_path, "ranks": 2, "hosts": 2}, "ranks of several machines have none yet"),
        ({"disk": tmp_path, "lora": None, "disk_bandwidth": "1GB/s"}, "all are trained here"),
        ({"disk": tmp_path, "policy": "streaming", "disk_bandwidth": "1GB/s"}, "homes of its own"),
    ):
        with pytest.raises(TwinstreamError, match=why):
            trained(wanted.model_copy(update=wrong))


def test_without_a_rate_the_drive_is_measured(tmp_path: Path) -> None:
    """And said; the model is too small to measure by, so that a file is written, and removed."""
    caps = ("900KiB", "600KiB")  # what is read ahead takes more of the host, the faster the drive
    wanted = with_disk(with_base(tmp_path, steps=1), tmp_path, caps, tmp_path / "run")
    before = {path for path in tmp_path.rglob("*") if "run" not in path.parts}
    _, seen = trained(wanted.model_copy(update={"disk_bandwidth": None}))
    assert any(line.startswith("measuring the drive of") for line in seen.lines)
    assert before == {p for p in tmp_path.rglob("*") if "run" not in p.relative_to(tmp_path).parts}


def test_a_schedule_with_a_disk_is_run_with_a_folder_on_it_alone(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    told = call(
        "plan", "--model", "tiny", "--machine", "cpu", "--seq-len", "64", "--lora", "r=4",
        "--device-mem", "5MiB", "--host-mem", "2MiB", "--tokens-per-step", "256", "--disk-mem",
        "1GiB", "--disk-bandwidth", "1GB/s", "-o", plan,
    )  # fmt: skip
    assert told.code == 0 and "disk" in told.out, told.err
    drive = tmp_path / "machine.toml"
    drive.write_text('base = "cpu"\ndisk_read_bytes_per_s = 1e9\ndisk_latency_ns = 1e5\n')
    refused = call("run", plan, "--backend", "cpu", "--machine", drive)
    assert refused.code == 2 and "at home on a disk" in refused.err
    assert call("run", plan, "--backend", "cpu", "--disk", plan).code == 2
    done = call(
        "run", plan, "--backend", "cpu", "--machine", drive, "--steps", 2, "--disk", tmp_path
    )
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "machine.toml"}
