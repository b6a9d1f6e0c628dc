"""Plans of a cell: the whole step, and short ones cut the same way."""

from dataclasses import replace

import pytest

from benchmarks.gpu.cells import plans
from benchmarks.gpu.cells.measured_cell import expected_s, runs_of, whole_run_of
from benchmarks.gpu.cells.plans import PlannedCell, PlanPool, PlanRequest, Refused, extended_s
from benchmarks.gpu.device.measuring import MeasuringSession
from benchmarks.gpu.jobs.campaign import campaign_of
from benchmarks.gpu.tests.stand_ins import MACHINE
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import RankTimeline

CELL = campaign_of("tiny", None).cells[0]


@pytest.fixture
def request_of(tmp_path):
    return lambda cell: PlanRequest(cell, MACHINE, Recipe(), tmp_path)


@pytest.fixture
def planned(request_of) -> PlannedCell:
    found = plans.plan_cell(request_of(CELL))
    assert isinstance(found, PlannedCell)
    return found


def test_short_plans_are_cut_as_the_whole_step(planned):
    whole = planned.workload
    assert whole.tokens_per_step == CELL.tokens_per_step
    for short, rounds in zip(planned.shorts, CELL.short_rounds, strict=True):
        schedule = read_document(RankSchedule, short.schedule)
        predicted = read_document(RankTimeline, short.predicted)
        assert schedule.workload == whole.model_copy(update={"rounds_per_step": rounds})
        assert schedule.caps.device_bytes == CELL.device_bytes
        assert predicted.step_ns / 1e9 == short.step_s


def test_the_prediction_and_its_extension_are_of_the_same_step(planned):
    assert planned.bound_step_s <= planned.predicted_step_s
    assert planned.predicted_extended_s == pytest.approx(planned.predicted_step_s, rel=0.05)


def test_what_is_run_is_the_short_plans_and_by_itself_the_whole_step(planned):
    files = [short.schedule for short in planned.shorts]
    assert runs_of(planned).runs == tuple((path, 5) for path in files)
    assert planned.whole is not None
    assert whole_run_of(planned.whole).runs == ((planned.whole.schedule, 2),)


def test_long_passes_are_run_fewer_times_and_the_time_is_told_before(planned):
    few, more = planned.shorts
    long = replace(planned, shorts=(replace(few, step_s=10.0), replace(more, step_s=15.0)))
    assert [passes for _, passes in runs_of(long).runs] == [2, 2]
    assert expected_s(runs_of(long), long.shorts, "cuda") == pytest.approx(1.15 * 50.0 + 2 * 9.0)


def test_the_recipe_with_its_kernels_is_planned_for(tmp_path):
    recipe = Recipe(kernels=KernelChoice(vector="eager", attention="sdpa_cpu"))
    cell = replace(CELL, key="other kernels")
    planned = plans.plan_cell(PlanRequest(cell, MACHINE, recipe, tmp_path))
    assert isinstance(planned, PlannedCell)
    schedule = read_document(RankSchedule, planned.shorts[0].schedule)
    attention = {
        c.attributes["attention"] for c in schedule.calls.values() if "attention" in c.attributes
    }
    assert attention == {"sdpa_cpu"}


def test_a_cell_that_fits_nowhere_is_refused(request_of):
    found = plans.plan_cell(request_of(replace(CELL, device_bytes=2000)))
    assert isinstance(found, Refused)
    assert "--device-mem" in found.reason


def test_processes_plan_in_the_order_asked(request_of, monkeypatch):
    monkeypatch.undo()  # a process can be given only what has a name
    second = replace(CELL, key="second", device_bytes=1000)
    requests = [request_of(CELL), request_of(second)]
    with PlanPool(requests, 1) as pool:
        assert isinstance(pool.get("second"), Refused)
        assert pool.is_ready(CELL.key)
        assert isinstance(pool.get(CELL.key), PlannedCell)


@pytest.mark.parametrize(
    ("rounds", "short", "seconds", "step_s"),
    [
        (32, (2, 4), (3.0, 5.0), 33.0),
        (8, (1, 2), (10.0, 19.0), 73.0),
        (2, (2, 4), (3.0, 5.0), 3.0),
    ],
)
def test_a_step_is_extended_linearly(rounds, short, seconds, step_s):
    assert extended_s(rounds, short, seconds) == pytest.approx(step_s)


def test_a_bug_met_in_planning_is_told_apart_from_a_cell_that_does_not_fit(request_of, monkeypatch):
    def broken(request, cell):
        raise AssertionError("seven")

    monkeypatch.setattr(plans, "_planned", broken)
    found = plans.plan_cell(request_of(replace(CELL, key="met a bug")))
    assert found == Refused("planning broke: AssertionError: seven", broke=True)


def test_a_short_lease_has_adapters_a_base_in_few_bits_experts_and_long_sequences():
    plan = campaign_of("short", 100 * 2**30, "cuda")
    kernels = KernelChoice(vector="triton", attention="cudnn_sliced")
    recipes = {cell.key: cell.recipe(kernels) for cell in plan.cells}
    assert list(recipes) == [
        "8b S8192 24 GiB", "8b S1024 40 GiB", "7b_1b S4096 40 GiB", "8b S8192 24 GiB lora",
        "8b S8192 24 GiB nf4 lora", "8b S65536 24 GiB",
    ]  # fmt: skip
    assert all(recipe.kernels == kernels for recipe in recipes.values())
    assert recipes["8b S8192 24 GiB"] == Recipe(kernels=kernels)
    adapters, few_bits = recipes["8b S8192 24 GiB lora"], recipes["8b S8192 24 GiB nf4 lora"]
    assert adapters.lora is not None and adapters.lora.rank == 16 and adapters.base == "model"
    assert few_bits == adapters.model_copy(update={"base": "nf4"})


@pytest.mark.parametrize(
    ("only", "jobs"),
    [
        (("8b S1024 40 GiB",), ["8b S1024 40 GiB"]),
        (("8b S1024 40 GiB whole",), ["8b S1024 40 GiB whole"]),
        (("fsdp", "65536"), ["8b S65536 24 GiB", "fsdp_offload 8b S8192", "fsdp_offload 8b S1024"]),
    ],
)
def test_whole_steps_and_peers_of_a_short_lease_are_done_by_name(only, jobs):
    plan = campaign_of("short", None, "cuda")
    assert [job.key for job in plan.asked(only)] == jobs
    assert plan.asked(()) == plan.cells
    beside = {cell.key for cell in plan.cells}
    assert all(peer.beside in beside for peer in plan.peers)


@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters_on_a_frozen_base_are_planned_filled_and_run(request_of, base):
    """Only adapters have a state of the optimizer."""
    cell = replace(CELL, key=f"lora {base}", lora="r=4", base=base, device_bytes=None, whole=False)
    planned = plans.plan_cell(replace(request_of(cell), recipe=cell.recipe(KernelChoice())))
    assert isinstance(planned, PlannedCell), planned
    schedule = read_document(RankSchedule, planned.shorts[0].schedule)
    with MeasuringSession("cpu") as session:
        losses = session.measure(schedule, 2).losses
    assert len(losses) == 2 and all(4.0 < loss < 7.0 for loss in losses)  # ln 256 = 5.5
    moments = {t.tensor_id for t in schedule.tensors if t.role == "optimizer_state"}
    assert moments and all("lora." in name for name in moments)
