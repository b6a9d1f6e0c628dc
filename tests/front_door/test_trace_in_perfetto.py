"""The trace in Perfetto's own UI, asked in SQL what its trace processor has read."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.helpers.perfetto_page import TraceInPerfetto, trace_in_perfetto
from twinstream.report.trace import trace_of, write_trace
from twinstream.report.view import View, memory_samples, stream_name
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.screens.tables import readable

SLICES = """
    select process.pid, thread.name, slice.name, slice.ts, slice.dur, slice.depth
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid)"""

FLOWS = """
    select process.pid, source.name, target.name
    from flow join slice as source on flow.slice_out = source.id
    join slice as target on flow.slice_in = target.id
    join thread_track on target.track_id = thread_track.id
    join thread using (utid) join process using (upid)"""

PEAKS = """
    select pid, max(total) from (
        select process.pid, sum(counter.value) as total
        from counter join process_counter_track as track on counter.track_id = track.id
        join process using (upid) where track.name like '{memory} memory, GiB%'
        group by process.pid, counter.ts)
    group by pid"""


@pytest.fixture(scope="module")
def perfetto(meshes, tmp_path_factory) -> Iterator[TraceInPerfetto]:
    path = tmp_path_factory.mktemp("perfetto") / "trace.json.gz"
    write_trace(trace_of(meshes), path)
    with trace_in_perfetto(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def events(meshes):
    return trace_of(meshes)["traceEvents"]


def lasting_waits(view: View) -> list[tuple[str, str]]:
    """Each wait of an op that takes time for another that does."""
    ops = view.schedule.ops
    lasting = {op.op_id for i, op in enumerate(ops) if view.end_ns[i] > view.start_ns[i]}
    waits = [(wait, op.op_id) for op in ops for wait in op.waits]
    return [pair for pair in waits if lasting.issuperset(pair)]


def test_nothing_is_lost_or_wrong_in_reading(perfetto):
    errors = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert perfetto.rows(errors) == []


def test_processes_are_the_timelines(perfetto, views):
    found = perfetto.rows("select pid, name from process where pid > 0 order by pid")
    provenances = [(view.name, view.timeline.provenance) for view in views]
    assert found == [
        (pid, f"{name}: {of.kind} on {of.where}")
        for pid, (name, of) in enumerate(provenances, start=1)
    ]


def test_each_track_has_the_ops_of_its_stream_side_by_side(perfetto, views):
    found = perfetto.rows(SLICES)
    wanted = Counter(
        (pid, readable(stream_name(op)))
        for pid, view in enumerate(views, start=1)
        for op in view.schedule.ops
    )
    assert Counter((pid, thread) for pid, thread, *_ in found) == wanted
    assert {depth for *_, depth in found} == {0}  # what overlaps is stacked


def test_slices_have_their_times_to_the_ns(perfetto, events):
    found = {(pid, name): (start, took) for pid, _, name, start, took, _ in perfetto.rows(SLICES)}
    assert found == {
        (e["pid"], e["name"]): (round(e["ts"] * 1000), round(e["dur"] * 1000))
        for e in events
        if e["ph"] == "X"
    }


def test_each_wait_is_an_arrow_between_its_ops(perfetto, views):
    wanted = [
        (pid, *pair) for pid, view in enumerate(views, start=1) for pair in lasting_waits(view)
    ]
    assert len(wanted) > 0
    assert sorted(perfetto.rows(FLOWS)) == sorted(wanted)


@pytest.mark.parametrize(("name", "tier"), [("device", DEVICE), ("host", HOST)])
def test_memory_counters_of_all_roles_together_reach_the_peak(perfetto, views, name, tier):
    peaks_gib = dict(perfetto.rows(PEAKS.format(memory=name)))
    for pid, view in enumerate(views, start=1):
        inside = [s for s in memory_samples(view, tier) if s.start_ns <= view.whole.end_ns]
        peak_bytes = max(s.total_bytes for s in inside if s.start_ns >= view.whole.start_ns)
        assert peaks_gib[pid] == pytest.approx(peak_bytes / 2**30, abs=1e-5)


def test_the_ui_draws_both_timelines_and_does_not_complain(perfetto, views):
    page = perfetto.opened.page
    for view in views:
        page.get_by_text(f"{view.name}: ").first.wait_for()
    assert perfetto.complaints() == []
