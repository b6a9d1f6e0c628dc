"""Runs on ranks beside a drive: the bits of runs in memory, whatever happens."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import is_running
from tests.training.ranks.rank_runs import STEPS, one_device, rank_options
from tests.training.ranks.test_context_parallel import in_slices
from tests.training.ranks.test_expert_parallel import with_experts
from tests.training.ranks.test_resume import Signals
from tests.training.small_runs import state_files, trained
from tests.training.test_adapters import adapters
from tests.training.test_disk import with_base
from twinstream.models.layouts.layout import LayoutError
from twinstream.planner.choices import ChoiceError
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import read_document
from twinstream.training.checkpoints import Checkpoints
from twinstream.training.options import OptionsError, TrainOptions
from twinstream.training.trainer import Trainer

TWO = {"ranks": 2, "pp": 2, "virtual_stages": 1, "dtype": "float32", "max_grad_norm": 0.0}
REPLICAS = {"ranks": 2, "pp": 1, "dp": 2, "dtype": "float32", "max_grad_norm": 0.0}


def with_drive(
    wanted: TrainOptions, place: Path, caps: tuple[str, str], rates: str = "1GB/s,500MB/s"
) -> TrainOptions:
    place.mkdir(exist_ok=True)
    return wanted.model_copy(
        update={
            "disk": place, "disk_bandwidth": rates, "device_mem": caps[0], "host_mem": caps[1],
        }
    )  # fmt: skip


def num_copies(run: Path, queue: str) -> int:
    """Of all stages."""
    plan = read_document(Schedule, run / "cluster.json")
    return sum(op.stream.queue == queue for part in plan.schedules.values() for op in part.ops)


def test_a_run_goes_on_from_ranks_with_a_drive_to_one_without_and_back(tmp_path: Path) -> None:
    """With an evaluation between its steps."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("THE LAZY DOG\n\nJUMPS OVER A FOX")
    same = {"dtype": "float32", "max_grad_norm": 0.0, "eval_data": (str(held_out),)}
    state, losses = one_device(tmp_path / "one", **same)
    memory = rank_options(tmp_path / "b", **(TWO | same))
    wanted = with_drive(memory, tmp_path / "drive", ("500KiB", "350KiB"))
    begun, one = trained(wanted, stop_after=2)
    assert num_copies(begun.folder, "disk_write") > 5
    alone = memory.model_copy(update={"ranks": 1, "pp": 1})
    further, two = trained(alone, resume=True, stop_after=begun.step + 1)
    _, three = trained(wanted, resume=True)
    assert begun.step < further.step < STEPS
    done = [*one.losses[: begun.step], *two.losses[: further.step - begun.step], *three.losses]
    assert done == losses
    assert state_files(wanted.output, STEPS) == state
    assert not list((tmp_path / "drive").iterdir())


@pytest.mark.parametrize(
    ("make", "layout", "caps"),
    [
        (rank_options, {"zero": 1}, ("600KiB", "200KiB")),
        (rank_options, {"zero": 3}, ("600KiB", "200KiB")),
        (rank_options, {"dp": 1, "tp": 2}, ("500KiB", "250KiB")),
        (in_slices, {"dp": 1, "cp": 2}, ("300KiB", "200KiB")),
        (with_experts, {"ep": 2, "zero": 1}, ("1500KiB", "800KiB")),
    ],
    ids=["zero1", "zero3", "tp2", "cp2", "ep2"],
)
def test_other_layouts_have_their_bits_too(
    tmp_path: Path,
    make: Callable[..., TrainOptions],
    layout: dict[str, Any],
    caps: tuple[str, str],
) -> None:
    given = REPLICAS | layout | {"steps": 3}
    whole, straight = trained(make(tmp_path / "a", **given))
    wanted = with_drive(make(tmp_path / "b", **given), tmp_path / "drive", caps)
    result, seen = trained(wanted)
    assert num_copies(result.folder, "disk_write") > 5
    assert seen.losses == straight.losses
    assert state_files(result.folder, 3) == state_files(whole.folder, 3)


@pytest.mark.parametrize(
    ("layout", "caps", "rates"),
    [
        (TWO | {"tokens_per_step": 128}, ("550KiB", "300KiB"), "1GB/s"),
        (REPLICAS | {"zero": 3}, ("750KiB", "200KiB"), "1GB/s"),
        (REPLICAS | {"dp": 1, "tp": 2}, ("500KiB", "60KiB"), "1GB/s,1GB/s"),
    ],
    ids=["pp2", "zero3", "tp2"],
)
def test_a_frozen_base_is_read_where_it_lies_or_cut_into_files_of_ranks(
    tmp_path: Path, layout: dict[str, Any], caps: tuple[str, str], rates: str
) -> None:
    given = {"steps": 3, "tokens_per_step": 512, "chunk_tokens": 64} | layout
    base = with_base(tmp_path, **given)
    whole, straight = trained(base)
    wanted = base.model_copy(update={"output": tmp_path / "disk"})
    result, seen = trained(with_drive(wanted, tmp_path, caps, rates))
    assert num_copies(result.folder, "disk_read") > 0
    assert seen.losses == straight.losses
    assert adapters(result.folder, 3) == adapters(whole.folder, 3)
    assert not list(tmp_path.glob("twinstream-*"))


def test_a_rank_that_is_killed_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    state, _ = one_device(tmp_path / "one", dtype="float32", max_grad_norm=0.0)
    memory = rank_options(tmp_path / "b", **TWO, save_every="1", keep=9)
    wanted = with_drive(memory, tmp_path / "drive", ("500KiB", "350KiB"))
    seen = Signals(signal.SIGKILL, 3)
    seen.ranks = Trainer(wanted, callbacks=[seen])
    with pytest.raises(TwinstreamError, match=r"rank 1 was killed by signal 9") as ended:
        seen.ranks.train()
    assert "\n" not in str(ended.value)
    assert seen.pids and not any(is_running(pid) for pid in seen.pids)
    assert not list((tmp_path / "drive").iterdir())
    assert Checkpoints(wanted.output).complete()
    leftover = tmp_path / "drive" / "twinstream-state-of_a_kill"  # before it had lost its name
    leftover.touch()
    trained(wanted, resume=True)
    assert not leftover.exists()
    assert state_files(wanted.output, STEPS) == state


def test_what_ranks_with_a_drive_cannot_be_is_said(tmp_path: Path) -> None:
    memory = rank_options(tmp_path, **TWO)
    caps = ("500KiB", "350KiB")
    for wrong, kind, why in (
        ({"hosts": 2}, OptionsError, "ranks of several machines have none yet"),
        ({"disk_bandwidth": "1GB/s"}, ChoiceError, "all are trained here"),
        ({"disk_mem": "1KiB"}, LayoutError, "does not fit"),
    ):
        wanted = with_drive(memory, tmp_path / "drive", caps).model_copy(update=wrong)
        with pytest.raises(kind, match=why):
            trained(wanted)
    assert not list((tmp_path / "drive").iterdir())
