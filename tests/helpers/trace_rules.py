"""What the Trace Event Format asks of a trace, checked on its JSON."""

from itertools import pairwise
from typing import Any

_KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
}


def faults(trace: dict[str, Any]) -> list[str]:
    """Everything that a viewer would drop, misplace or draw wrongly."""
    events = trace["traceEvents"]
    found = [f"{event} lacks keys" for event in events if not _KEYS[event["ph"]] <= event.keys()]
    found += [f"{e} is before 0" for e in events if e["ph"] in "XsfC" and e["ts"] < 0]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], end))
    for thread, spans in slices.items():
        spans.sort()
        found += [
            f"slices of {thread} overlap at {after[0]}"
            for before, after in pairwise(spans)
            if after[0] < before[1] - 1e-6
        ]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    found += [f"thread {thread} has no name" for thread in slices if thread not in named]
    return found + _flow_faults(events, slices)


def _flow_faults(
    events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]
) -> list[str]:
    found = []
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    if starts.keys() != ends.keys():
        found.append("a flow lacks its start or its end")
    for event in (*starts.values(), *ends.values()):
        spans = slices[event["pid"], event["tid"]]
        if not any(start <= event["ts"] < end for start, end in spans):
            found.append(f"{event} is in no slice")
    found += [f"flow {i} runs back" for i, e in starts.items() if e["ts"] > ends[i]["ts"]]
    for event in events:
        if event["ph"] == "C" and not all(isinstance(v, float) for v in event["args"].values()):
            found.append(f"{event} is no number")
    return found
