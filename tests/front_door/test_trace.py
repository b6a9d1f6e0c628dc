"""The Perfetto trace: every op, wait and byte of the timelines, by the rules of the format."""

import gzip
import json

import pytest

from tests.front_door.command_line import call
from tests.helpers.trace_rules import faults
from twinstream.report.memory import memory_samples
from twinstream.report.trace import trace_of
from twinstream.schedule.tensors import DEVICE


@pytest.fixture(scope="module")
def trace(views):
    return trace_of(views)


def events_of(trace, phase, pid=1):
    return [event for event in trace["traceEvents"] if (event["ph"], event["pid"]) == (phase, pid)]


def test_the_trace_keeps_the_rules_of_the_format(trace):
    assert faults(trace) == []


def test_predicted_and_measured_are_processes_with_a_thread_per_stream(trace, views):
    for pid, view in enumerate(views, start=1):
        names = {e["name"]: e["args"] for e in events_of(trace, "M", pid)}
        assert names["process_name"]["name"].startswith(view.name)
        threads = [e for e in events_of(trace, "M", pid) if e["name"] == "thread_name"]
        assert len(threads) == len(view.queues)


def test_every_op_is_a_slice_with_its_times_to_the_ns(trace, views):
    for pid, view in enumerate(views, start=1):
        slices = {event["name"]: event for event in events_of(trace, "X", pid)}
        compute = next(i for i, op in enumerate(view.schedule.ops) if op.kind == "compute")
        origin_ns = view.start_ns[compute] - slices[view.schedule.ops[compute].op_id]["ts"] * 1000
        for i, op in enumerate(view.schedule.ops):
            event = slices[op.op_id]
            assert round(event["ts"] * 1000 + origin_ns) == view.start_ns[i]
            assert round(event["dur"] * 1000) == view.end_ns[i] - view.start_ns[i]


def test_both_steps_begin_at_the_same_time(trace, views):
    begins = set()
    for pid, view in enumerate(views, start=1):
        first = min(event["ts"] * 1000 for event in events_of(trace, "X", pid))
        begins.add(round(view.whole.start_ns - (view.start_ns.min() - first)))
    assert len(begins) == 1


def test_every_wait_of_ops_that_take_time_is_an_arrow(trace, views):
    view = views[0]
    lasting = {
        op.op_id for i, op in enumerate(view.schedule.ops) if view.end_ns[i] > view.start_ns[i]
    }
    wanted = sum(
        wait in lasting for op in view.schedule.ops if op.op_id in lasting for wait in op.waits
    )
    assert len(events_of(trace, "s")) == wanted > 0


def test_the_memory_counter_reaches_the_peak(trace, views):
    counters = [e for e in events_of(trace, "C") if e["name"] == "device memory, GiB"]
    view = views[0]
    inside = (s for s in memory_samples(view, DEVICE) if s.start_ns <= view.whole.end_ns)
    peak_bytes = max(s.total_bytes for s in inside if s.start_ns >= view.whole.start_ns)
    assert max(sum(e["args"].values()) for e in counters) == pytest.approx(
        peak_bytes / 2**30, abs=1e-5
    )


def test_a_long_timeline_is_cut_to_a_window_and_says_so(views):
    cut = trace_of(views, most_ops=30)
    assert 0 < len(events_of(cut, "X")) <= 30
    assert faults(cut) == []
    num_ops = len(views[0].schedule.ops)
    assert f"{len(events_of(cut, 'X'))} of {num_ops} ops" in cut["otherData"]["predicted"]


def test_the_command_writes_a_compressed_trace(files, tmp_path):
    path = tmp_path / "trace.json.gz"
    told = call("trace", files.schedule, "--measured", files.measured, "-o", path, "--json").json()
    written = json.loads(gzip.decompress(path.read_bytes()))
    assert told["num_events"] == len(written["traceEvents"])
    assert faults(written) == []
