"""`plan --ranks`, `run` of what it writes, and predicted against measured of all ranks."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from tests.helpers.ports import free_port
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document, write_document
from twinstream.schedule.timeline import Timeline

CUT = ("--chunk-tokens", 64, "--chunks-per-round", 1)


@dataclass(frozen=True)
class Ran:
    """A pipeline of two ranks with offload: its files, and what `plan` and `run --json` said."""

    plan: Path
    measured: Path
    planned: dict[str, object]
    told: dict[str, object]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ranks")
    plan, measured = folder / "plan.json", folder / "measured.json"
    cap = ("--device-mem", "7MiB")
    wanted = ("plan", *TINY_STEP, *CUT, "--machine", "cpu", "--ranks", 2, "--pp", 2, *cap)
    planned = call(*wanted, "-o", plan, "--json").json()
    told = call("run", plan, "--steps", 3, "-o", measured, "--json").json()
    return Ran(plan, measured, planned, told)


@pytest.fixture(scope="module")
def profile(ran: Ran) -> Path:
    """Of this machine and its processes, fitted to that run, however busy the machine was."""
    path = ran.plan.with_name("here.toml")
    fitted = call(
        "calibrate", "--base", "cpu", "--schedule", ran.plan, "--timeline", ran.measured,
        "-o", path, "--anyway",
    )  # fmt: skip
    assert fitted.code == 0, fitted.err
    return path


def test_ranks_have_the_losses_of_one_device(ran, tmp_path):
    plan = tmp_path / "plan.json"
    assert call("plan", *TINY_STEP, *CUT, "--machine", "cpu", "-o", plan).code == 0
    alone = call("run", plan, "--steps", 3, "--backend", "cpu", "--json").json()
    assert ran.told["losses"] == alone["losses"]
    assert ran.told["ranks"] == 2


def test_caps_are_of_one_rank_and_what_does_not_fit_is_copied(ran):
    document = read_document(Schedule, ran.plan)
    state = {
        tensor.tensor_id: tensor.size_bytes
        for part in document.schedules.values()
        for tensor in part.tensors
        if tensor.parent is None and tensor.role in ("parameter", "optimizer_state", "gradient")
    }
    assert sum(state.values()) > 7 * 2**20
    for part in document.schedules.values():
        assert part.caps.device_bytes == 7 * 2**20
        assert any(op.kind == "copy" and op.stream.queue == "d2h" for op in part.ops)


def test_the_schedule_is_proven_to_be_the_models_step(ran, tmp_path):
    assert "exactly the training step of tiny" in call("verify", ran.plan).out
    document = read_document(Schedule, ran.plan)
    other, other_order = (
        document.model | {"num_layers": 5},
        {"pipeline": "gpipe", "virtual_stages": 1},
    )
    for wrong in (
        document.model_copy(update={"model": other}),
        document.model_copy(update={"layout": document.layout | other_order}),
    ):
        path = tmp_path / "wrong.json"
        write_document(wrong, path)
        found = call("verify", path)
        assert found.code == 2
        assert "class 'stage" in found.out
        assert "class 'stage" in error_of("run", path, "--backend", "cpu")


def test_what_ranks_measured_is_one_document(ran):
    timeline = read_document(Timeline, ran.measured)
    assert timeline.provenance.kind == "measured"
    assert list(timeline.classes) == ["stage 0", "stage 1"]
    assert timeline.step_ns == pytest.approx(1e9 * ran.told["step_time_s"])
    assert timeline.clock_error_ns == ran.told["clock_error_ns"] > 0


def test_a_prediction_is_compared_with_what_each_rank_measured(ran, profile, tmp_path):
    compared = ("compare", ran.plan, "--measured", ran.measured, "--cluster", profile)
    found = call(*compared, "--json").json()
    assert [one["name"] for one in found["ranks"]] == ["stage 0", "stage 1"]
    measured = read_document(Timeline, ran.measured)
    assert found["step_ns"]["measured"] == measured.step_ns
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    for name in ("block_forward", "said", "waited for others"):
        assert kinds[name]["busy_ns"]["measured"] > 0
    assert kinds["block_forward"]["num_ops"] == 4 * 4
    assert "Clocks of ranks are right within" in call(*compared).out
    predicted = tmp_path / "predicted.json"
    assert call("simulate", ran.plan, "--cluster", profile, "-o", predicted).code == 0
    both = call("compare", ran.plan, predicted, ran.measured, "--json").json()
    assert both["step_ns"] == found["step_ns"]


def test_the_page_shows_ranks_as_they_ran(ran, profile, tmp_path):
    page = tmp_path / "page.html"
    where = ("--cluster", profile, "--measured", ran.measured)
    assert call("report", ran.plan, *where, "-o", page).code == 0
    html = page.read_text(encoding="utf-8")
    assert "The whole step, as measured" in html
    assert "Predicted against measured" in html


def test_ranks_are_planned_with_the_prediction_that_their_run_has(ran):
    assert ran.planned["predicted"] == ran.told["predicted"]
    assert ran.planned["assumed"] == ran.told["assumed"]
    assert "links of 1 GB/s" in ran.planned["assumed"]


def test_ranks_are_planned_for_a_cluster(profile):
    planned = call("plan", *TINY_STEP, "--cluster", profile, "--ranks", 2, "--json").json()
    assert planned["predicted"]["num_gpus"] == 2
    assert prod(planned["layout"][axis] for axis in ("pp", "dp", "tp")) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pp", 3), "pp 3 are 3 ranks, and there are 2"),
        (("--pipeline", "zero_bubble"), "'zero_bubble' is none that ranks run"),
        (
            ("--optimizer", "auto"),
            "--optimizer auto: updates on the host are planned for one device",
        ),
        (("--sequence-parallel", "--tp", 1), "of one part (give --tp N or --parts N)"),
        (("--reduction", "fast"), "--reduction 'fast' is unknown; known: rank_order, library"),
        (
            ("--virtual-stages", 2, "--pipeline", "gpipe"),
            "'gpipe' has no virtual stages: 2 a rank need",
        ),
        (("--cp", 2, "--cp-parts", 2, "--cp-exchange", "ring"), "a ring of 2 parts of a sequence"),
        (("--tp", 3), "tp 3 are 3 ranks, and there are 2"),
        (("--policy", "resident"), "--policy is not of ranks that run"),
        (("--device-mem", "1MiB"), "stage 0 does not fit 1.00 MiB of device memory"),
        (("--cluster", "nowhere"), "unknown cluster 'nowhere'"),
    ],
)
def test_what_ranks_cannot_be_is_said_in_one_message(flags, said):
    assert said in error_of("plan", *TINY_STEP, "--machine", "cpu", "--ranks", 2, *flags)


@pytest.mark.parametrize("flags", [("--tp", 2), ("--cp", 2), ("--cp", 2, "--cp-exchange", "ring")])
def test_ranks_with_parts_are_planned_by_our_kernels_and_run(flags, tmp_path):
    plan, split = tmp_path / "plan.json", ("--gpus", 2, *flags)
    axis = flags[0].strip("-")
    wanted = (*TINY_STEP, *CUT, "--machine", "cpu")
    planned = call("plan", *wanted, *split, "-o", plan, "--json").json()
    assert planned["layout"][axis] == 2 and planned["runs_here"]
    assert planned["recipe"]["kernels"]["vector"] == "eager"
    assert planned["layout"].get("cp_exchange") == ("ring" if "ring" in flags else None)
    ran = call("run", plan, "--steps", 2, "--json").json()
    alone = tmp_path / "alone.json"
    call("plan", *wanted, "-o", alone)
    one = call("run", alone, "--steps", 2, "--backend", "cpu", "--json").json()
    assert ran["losses"] == pytest.approx(one["losses"], rel=1e-6)


def test_parts_are_not_of_layouts_that_are_priced():
    flags = ("--cluster", "h100_dgx", "--gpus", 2)
    for flag, value in (("--parts", 2), ("--cp-exchange", "ring")):
        said = error_of("plan", *TINY_STEP, *flags, flag, value)
        assert f"{flag} is of ranks that run" in said


def test_a_predicted_layout_is_not_run(cluster_file):
    said = error_of("run", cluster_file, "--backend", "cpu")
    assert "the kernel set megatron is priced" in said


def test_the_library_sums_where_it_is_asked_to(tmp_path):
    wanted = (*TINY_STEP, *CUT, "--ranks", 2, "--dp", 2)
    plan, wrong = tmp_path / "plan.json", tmp_path / "wrong.json"
    planned = call("plan", *wanted, "--machine", "cpu", "--reduction", "library", "-o", plan)
    assert planned.code == 0, planned.err
    document = read_document(Schedule, plan)
    sums = [op for op in document.schedules["stage 0"].ops if op.op_id.startswith("reduce.")]
    assert {op.reduction for op in sums} == {"library"}
    other = document.layout | {"reduction": "rank_order"}
    write_document(document.model_copy(update={"layout": other}), wrong)
    assert "'reduce.0' is not what its stage says" in call("verify", wrong).out


def test_people_see_the_prediction_beside_what_was_measured(ran, profile):
    told = call("run", ran.plan, "--steps", 3, "--cluster", profile).out
    predicted = call("simulate", ran.plan, "--cluster", profile, "--json").json()
    (speed,) = (line for line in told.splitlines() if line.lstrip().startswith("throughput"))
    assert f"{1e3 * predicted['step_time_s']:.2f} ms" in told
    assert speed.rstrip().endswith("%") and "loss of 3 steps" in told
    assert "Assumed" not in told and "stage 1" in told


def test_ranks_on_the_cpu_have_no_graphs(ran):
    said = error_of("run", ran.plan, "--graphs", "on", "--backend", "cpu")
    assert "CUDA graphs need CUDA, and this runs on the backend 'cpu'" in said


def test_torchruns_ranks_have_one_output(ran, tmp_path):
    measured = tmp_path / "measured.json"
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0",
         "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "twinstream", "run",
         str(ran.plan), "--steps", "3", "--json", "-o", str(measured)],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["losses"] == ran.told["losses"]
    assert read_document(Timeline, measured).step_ns > 0


def test_torchruns_ranks_with_other_texts_are_refused(ran, tmp_path):
    port, started = free_port(), []
    for rank in range(2):
        text = tmp_path / f"{rank}.txt"
        text.write_text(f"Rank {rank} reads this. " * 50, encoding="utf-8")
        where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
        command = [sys.executable, "-m", "twinstream", "run", str(ran.plan), "--text", str(text)]
        started.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | where)
        )
    for one in started:
        error = one.communicate(timeout=120)[1]
        assert one.returncode == 2
        assert "rank 1 has a text of hash " in error
        assert "all ranks need the same" in error
        assert "Traceback" not in error
