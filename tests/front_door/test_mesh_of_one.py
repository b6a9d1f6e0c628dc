"""One device is a mesh of one rank: its figures, comparison and trace are those of the mesh."""

import pytest

import twinstream as ts
from tests.front_door.small_schedule import small_schedule, timeline
from tests.helpers.cluster_sketches import cluster, cluster_timeline, talk
from tests.helpers.sketches import op
from tests.helpers.trace_rules import faults
from twinstream.hardware_profiles.loader import load_machine_text
from twinstream.report.trace import trace_of
from twinstream.report.view import MeshView
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.document import THE_DEVICE, Axis, Mesh, RankClass
from twinstream.schedule.proof.violations import UnsafeSchedule

MACHINE = load_machine_text(
    'name = "made up"\ndevice = "cpu"\npeak_fp32_flop_per_s = 1e9\npeak_bf16_flop_per_s = 1e9'
)
RANK = "rank 0"
OF_ONE_DEVICE = ("lower_bound_s", "gap", "gap_family", "plan_seconds", "uncertainty")


@pytest.fixture
def both():
    return small_schedule(), timeline(100, 200, 300, 400, 500, 600, step_ns=2000.0)


def laid_out(schedule: ts.Schedule) -> ts.Schedule:
    """The same as the one rank of a layout."""
    one = RankClass(name=RANK, schedule=RANK, cells={})
    return schedule.model_copy(update={"classes": (one,), "schedules": {RANK: schedule.only}})


def of_layout(line: ts.Timeline) -> ts.Timeline:
    return line.model_copy(update={"classes": {RANK: line.only}})


def test_the_summary_of_a_device_is_that_of_its_mesh(both):
    schedule, line = both
    alone = ts.summarize(schedule, line, MACHINE)
    mesh = ts.summarize(laid_out(schedule), of_layout(line), MACHINE)
    told = [one.model_dump_json(exclude=set(OF_ONE_DEVICE)) for one in (alone, mesh)]
    assert told[0].replace(THE_DEVICE, RANK) == told[1]
    assert alone.device_peak_bytes == sum(alone.memory_bytes[THE_DEVICE].values())
    assert by_rank(schedule, line) == (schedule, line)


def test_the_comparison_of_a_mesh_of_one_has_the_errors_of_the_device(both):
    schedule, line = both
    slower = timeline(100, 200, 300, 800, 500, 600, step_ns=2500.0)
    alone = ts.compare(schedule, line, slower)
    mesh = ts.compare(laid_out(schedule), of_layout(line), of_layout(slower))
    assert (mesh.step_ns, mesh.cold_ns) == (alone.step_ns, alone.cold_ns)
    (rank,) = mesh.ranks
    assert rank.comparison.kinds == alone.kinds
    assert [one.op_id for one in mesh.worst_ops] == [one.op_id for one in alone.worst_ops]
    assert {one.rank for one in mesh.worst_ops} == {RANK}
    assert {one.rank for one in alone.worst_ops} == {""}


def test_a_trace_of_a_mesh_of_one_is_the_device_s(both):
    schedule, line = both
    alone = trace_of([MeshView("predicted", schedule, line)])
    mesh = trace_of([MeshView("predicted", laid_out(schedule), of_layout(line))])["traceEvents"]
    shown = [[e for e in events if e["ph"] == "X"] for events in (mesh, alone["traceEvents"])]
    assert shown[0] == shown[1] != []


def test_ranks_have_waits_and_counters_in_a_trace_and_the_worst_of_all_are_told():
    ops = [op("load", "h2d"), op("a", "compute", ("load",)), talk("sum", "tp", ("a",))]
    schedule = cluster({"x": ops, "y": ops}, [("x", "sum"), ("y", "sum")])
    line = cluster_timeline(
        schedule,
        {"x": [[(0, 10), (10, 20), (20, 50)]], "y": [[(0, 30), (30, 40), (40, 50)]]},
        step_ns=50.0,
    )
    trace = trace_of([MeshView("predicted", schedule, line)])
    assert faults(trace) == []
    waits = [(e["pid"], e["ts"]) for e in trace["traceEvents"] if e.get("cat") == "wait"]
    # From the last ns of what is waited for to when the class comes to the op that waits.
    assert waits == [
        (1, 0.009), (1, 0.01), (1, 0.019), (1, 0.02),
        (2, 0.029), (2, 0.03), (2, 0.039), (2, 0.04),
    ]  # fmt: skip
    assert {e["pid"] for e in trace["traceEvents"] if e["ph"] == "C"} == {1, 2}
    late = cluster_timeline(
        schedule,
        {"x": [[(0, 10), (10, 20), (20, 90)]], "y": [[(0, 30), (30, 80), (80, 90)]]},
        step_ns=90.0,
    )
    found = ts.compare(schedule, line, late)
    assert (found.worst_ops[0].rank, found.worst_ops[0].op_id) == ("x", "sum")
    assert (found.worst_ops[1].rank, found.worst_ops[1].op_id) == ("y", "a")


def test_python_writes_the_page_of_a_mesh_from_its_prediction(both, tmp_path):
    schedule, line = laid_out(both[0]), of_layout(both[1])
    path = tmp_path / "mesh.html"
    with pytest.raises(UnsafeSchedule, match="will not be run"):  # a sketch of a schedule
        ts.write_report(path, schedule, MACHINE)
    ts.write_report(path, schedule, MACHINE, predicted=line)
    assert "toy on 1 rank of here" in path.read_text("utf-8")


def test_of_several_ranks_the_flops_of_all_count_against_the_peak_of_all(both):
    schedule, line = both
    alone = ts.summarize(schedule, line, MACHINE)
    four = Mesh(axes=(Axis(name="dp", size=4),), ranks_per_node=4)
    mesh = schedule.model_copy(update={"mesh": four})
    found = ts.summarize(mesh, line, MACHINE)
    assert found.num_gpus == 4
    assert found.hfu == pytest.approx(alone.hfu)  # each executes what one does
    assert found.mfu == pytest.approx(alone.mfu / 4)  # the model's FLOPs are of the whole step
    assert found.recompute_fraction == alone.recompute_fraction
