"""The timeline of a run from when its passes ended and what was timed of them."""

from dataclasses import replace
from statistics import pstdev

import pytest

from tests.helpers.sketches import op, sketch
from twinstream.executor.backends.protocol import MeasuredPass
from twinstream.executor.program.options import choose_graphs
from twinstream.executor.replay.dispatch import Passes
from twinstream.executor.replay.host_cost import CostMeter
from twinstream.executor.run.measured import measured_timeline
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import PassSpans, Provenance

SCHEDULE = sketch([op("a", "compute")])
HERE = Provenance(kind="measured", where="here")


def passes(*ends: tuple[int, bool]) -> Passes:
    """(end of the pass, whether it was timed); its only op took 5 ns."""
    return Passes(
        tuple(
            MeasuredPass(end, PassSpans(start_ns=(end - 5,), end_ns=(end,)) if timed else None)
            for end, timed in ends
        ),
        host_cost=None,
    )


def test_passes_that_are_not_timed_alone_give_the_step_time():
    found = passes((100, True), (150, False), (210, False), (300, True))
    timeline = measured_timeline(SCHEDULE, found, HERE)
    assert timeline.step_ns == 55
    assert timeline.spread_ns == pstdev([50, 60])
    assert [spans.end_ns for spans in timeline.passes] == [(300,)]
    assert timeline.cold.end_ns == (100,)
    assert timeline.provenance.timed_passes == 2


def test_where_all_are_timed_all_after_the_first_count():
    timeline = measured_timeline(SCHEDULE, passes((100, True), (150, True), (210, True)), HERE)
    assert timeline.step_ns == 55
    assert len(timeline.passes) == 2


def test_a_rest_is_of_no_step():
    found = replace(passes((100, True), (150, True), (950, True)), rests_ns={2: 740})
    assert measured_timeline(SCHEDULE, found, HERE).step_ns == 55


def test_a_rest_that_the_host_says_was_longer_makes_no_negative_step():
    found = replace(passes((100, True), (150, True), (950, True)), rests_ns={1: 10**6, 2: 10**6})
    assert measured_timeline(SCHEDULE, found, HERE).step_ns > 0


def test_of_many_passes_the_last_sixteen_count():
    ends = [0]
    for step in [1000] * 5 + [10] * 16:
        ends.append(ends[-1] + step)
    found = passes(*((end + 5, i == 0) for i, end in enumerate(ends)))
    assert measured_timeline(SCHEDULE, found, HERE).step_ns == 10


# --- host cost


def test_the_hosts_cost_is_a_mean_over_the_passes_after_the_first():
    meter = CostMeter()
    meter.add("compute", 10**9)
    meter.end_pass(waited_ns=10**9, timed=False)
    for spent in (100, 300):
        meter.add("compute", spent)
        meter.add("compute", spent)
        meter.add("copy", 50)
        meter.end_pass(waited_ns=40, timed=False)
    cost = meter.result(num_ops=3)
    assert cost is not None
    assert cost.num_passes == 2
    assert cost.ns_per_op == (100 + 100 + 50 + 300 + 300 + 50) / 2 / 3
    assert cost.ns_per_call == {"compute": 200, "copy": 50}
    assert cost.calls_per_pass == {"compute": 2, "copy": 1}
    assert cost.waited_ns_per_pass == 40
    assert not cost.ops_timed


def test_passes_that_were_timed_op_by_op_count_only_where_there_are_no_others():
    meter = CostMeter()
    for timed, spent in ((True, 10**9), (False, 100), (True, 400)):
        meter.add("graph" if spent == 100 else "compute", spent)
        meter.end_pass(waited_ns=spent, timed=timed)
    plain = meter.result(num_ops=2)
    assert plain is not None
    assert (plain.ns_per_op, plain.waited_ns_per_pass, plain.ops_timed) == (50, 100, False)
    assert plain.calls_per_pass == {"graph": 1}
    only_timed = CostMeter()
    for spent in (10**9, 400):
        only_timed.add("compute", spent)
        only_timed.end_pass(waited_ns=0, timed=True)
    found = only_timed.result(num_ops=2)
    assert found is not None and (found.ns_per_op, found.ops_timed) == (200, True)


# --- the choice of graphs


@pytest.mark.parametrize("name", ["auto", "on", "off"])
def test_graphs_are_as_asked_for_on_cuda(name):
    assert choose_graphs(name, "cuda") == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("on", "CUDA graphs need CUDA"),
        ("yes", "unknown choice of graphs 'yes'; known: auto, on, off"),
    ],
)
def test_graphs_without_cuda_and_unknown_choices_are_refused(name, message):
    with pytest.raises(TwinstreamError, match=message):
        choose_graphs(name, "cpu")
    assert choose_graphs("auto", "cpu") == "auto"
