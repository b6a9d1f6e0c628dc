"""The report's figures hold the numbers that the library computes."""

import pytest

from tests.front_door.small_schedule import small_schedule, timeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.explanation import explain
from twinstream.measures.residence import residence
from twinstream.report.palette import ROLE_COLOURS, TASK_COLOURS
from twinstream.report.share_figures import (
    critical_path_figure,
    idle_figure,
    kinds_figure,
    recompute_figure,
    traffic_figure,
)
from twinstream.report.timeline_figure import Shown, timeline_figure
from twinstream.report.view import view_of
from twinstream.schedule.analysis.comparison import compare_rank
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Label
from twinstream.schedule.sizes import parse_bytes
from twinstream.schedule.timeline import Timeline


def test_idle_shares_are_those_of_the_explanation(views):
    data = {trace.name: trace.x for trace in idle_figure(views).data}
    for number, view in enumerate(views):
        idle = explain(
            Schedule.of_rank(view.schedule), Timeline.of_rank(view.timeline), load_machine("cpu")
        ).compute_idle_fraction
        drawn = sum(shares[number] for shares in data.values())
        assert drawn == pytest.approx(100 * sum(idle.values()))
        assert data["H2D"][number] == pytest.approx(100 * idle.get("h2d", 0.0))


def test_the_critical_path_is_the_whole_step(views):
    figure = critical_path_figure(views)
    for number in range(len(views)):
        assert sum(trace.x[number] for trace in figure.data) == pytest.approx(100)
    assert "block backward" in {trace.name for trace in figure.data}


def test_copied_bytes_are_those_of_the_copies(views):
    view = views[0]
    found = residence(view.schedule, view.timeline)
    figure = traffic_figure(view.schedule, found)
    for direction, total in (
        (0, sum(role.h2d_bytes for role in found.roles)),
        (1, sum(role.d2h_bytes for role in found.roles)),
    ):
        drawn = sum(trace.x[direction] for trace in figure.data)
        assert drawn * 2**20 == pytest.approx(total)
        assert total > 0


def test_kinds_show_predicted_measured_and_the_error(views):
    comparison = compare_rank(views[0].schedule, views[0].timeline, views[1].timeline)
    figure = kinds_figure(views, comparison)
    for trace in figure.data:
        drawn = dict(zip(trace.y, trace.x, strict=True))
        busy = next(k for k in comparison.kinds if k.name == "block_backward").busy_ns
        assert drawn["block backward"] * 1e6 == pytest.approx(getattr(busy, trace.name))
    predicted = next(trace for trace in figure.data if trace.name == "predicted")
    texts = dict(zip(predicted.y, predicted.text, strict=True))
    assert f"({busy.error:+.0%})" in texts["block backward"]


def test_recompute_is_a_share_of_the_blocks_of_its_layer():
    schedule = small_schedule()
    ops = []
    for op in schedule.ops:  # forwards of layers 0 and 1, one of layer 0 done again
        if op.kind == "compute":
            layer = 1 if op.op_id == "last" else 0
            label = Label(**{**op.label.model_dump(), "layer": layer})
            op = op.model_copy(update={"label": label})
        ops.append(op)
    (bars,) = recompute_figure(schedule.model_copy(update={"ops": tuple(ops)})).data
    assert (bars.name, list(bars.x), list(bars.y)) == ("from INPUT", [0, 1], [100.0, 0.0])


def test_the_use_of_links_is_a_share_of_what_the_machine_reaches():
    machine = load_machine("cpu")
    view = view_of("predicted", small_schedule(), timeline(100, 50, 10, 40, 20, 80))
    figure = timeline_figure([Shown(view, view.whole, [])], machine)
    strips = next(trace for trace in figure.data if trace.type == "heatmap")
    shares = dict(zip(strips.y, strips.z, strict=True))
    # The schedule's compute begins at 100 ns; from 150 to 160 ns 512 bytes go to the device.
    rate = 512 / 10 / (machine.rate("pcie_h2d_bytes_per_s") / 1e9)
    assert max(shares["H2D"]) == pytest.approx(100 * rate, rel=1e-3)
    busy = sum(share > 0 for share in shares["H2D"]) / len(shares["H2D"])
    assert busy == pytest.approx(10 / view.whole.lasting_ns, abs=0.01)


def test_the_strips_of_a_slower_measurement_reach_to_its_own_end():
    machine = load_machine("cpu")
    fast, slow = (100, 50, 10, 40, 20, 80), (100, 100, 20, 80, 40, 160)
    both = [
        view_of(name, small_schedule(), timeline(*ns)) for name, ns in (("p", fast), ("m", slow))
    ]
    figure = timeline_figure([Shown(view, view.whole, []) for view in both], machine)
    strips = next(trace for trace in figure.data if trace.type == "heatmap")
    of = dict(zip(strips.y, strips.z, strict=True))
    # From the first compute on, 200 and 400 ns; ``x` goes back until 120 and 240 ns.
    assert strips.dx * len(of["D2H, m"]) * 1e6 == pytest.approx(400)
    for name, moved_until_ns in (("p", 120), ("m", 240)):
        last = max(i for i, share in enumerate(of[f"D2H, {name}"]) if share > 0)
        assert (last + 1) * strips.dx * 1e6 == pytest.approx(moved_until_ns, abs=2)
    drawn = [share == share for share in of["D2H, p"]]
    assert drawn == [True] * (len(drawn) // 2) + [False] * (len(drawn) // 2)


def test_memory_is_named_in_the_unit_that_it_is_drawn_in(views):
    figure = timeline_figure([Shown(v, v.whole, []) for v in views], load_machine("cpu"))
    titles = [note.text for note in figure.layout.annotations]
    assert "<b>Device memory, MiB</b>" in titles and "<b>Host memory, MiB</b>" in titles


def test_memory_is_drawn_against_its_cap(views):
    view = views[0]
    figure = timeline_figure([Shown(view, view.whole, [])], load_machine("cpu"))
    notes = [note.text for note in figure.layout.annotations]
    assert any("cap 6.00 MiB" in note for note in notes)
    stacks = [t for t in figure.data if t.type == "scatter" and t.stackgroup == "memory2"]
    peak = max(sum(levels) for levels in zip(*(t.y for t in stacks), strict=True))
    assert 0 < peak * 2**20 <= parse_bytes("6MiB")


def test_no_two_tasks_and_no_two_roles_share_a_colour():
    for colours in (TASK_COLOURS, ROLE_COLOURS):
        assert len(set(colours.values())) == len(colours)
