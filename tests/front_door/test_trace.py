"""The Perfetto trace: every op, wait and byte of the timelines, by the rules of the format."""

import gzip
import json

import pytest

from tests.front_door.command_line import call
from tests.helpers.trace_rules import faults
from twinstream.report.trace import trace_of


@pytest.fixture(scope="module")
def trace(meshes):
    return trace_of(meshes)


def events_of(trace, phase, pid=1):
    return [event for event in trace["traceEvents"] if (event["ph"], event["pid"]) == (phase, pid)]


def test_the_trace_keeps_the_rules_of_the_format(trace):
    assert faults(trace) == []


def test_predicted_and_measured_are_processes_with_a_thread_per_stream(trace, views):
    for pid, view in enumerate(views, start=1):
        names = {e["name"]: e["args"] for e in events_of(trace, "M", pid)}
        assert names["process_name"]["name"].startswith(view.name)
        threads = [e for e in events_of(trace, "M", pid) if e["name"] == "thread_name"]
        assert len(threads) == len(view.streams)


def test_both_steps_begin_at_the_same_time(trace, views):
    begins = set()
    for pid, view in enumerate(views, start=1):
        first = min(event["ts"] * 1000 for event in events_of(trace, "X", pid))
        begins.add(round(view.whole.start_ns - (view.start_ns.min() - first)))
    assert len(begins) == 1


def test_a_long_timeline_is_cut_to_a_window_and_says_so(views, meshes):
    cut = trace_of(meshes, most_ops=30)
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
