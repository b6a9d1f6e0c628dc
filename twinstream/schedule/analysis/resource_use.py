"""The use of links and memories over time, by the ends that a timeline gives the ops."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.timeline import RankTimeline

Floats = NDArray[np.float64]
RESOURCES = ("h2d", "d2h", "hbm", "host_dram")


def bytes_by_op(schedule: RankSchedule) -> dict[str, NDArray[np.int64]]:
    """Bytes that each op moves over each of `RESOURCES`, in the schedule's op order.

    A copy between the memories uses its direction of the link, HBM and host DRAM; one inside the
    device reads and writes HBM; what the host fills or takes uses host DRAM; a task uses what its
    kernels' cost says.
    """
    access_map = AccessMap(schedule.tensors, schedule.slots)
    kinds = {slot.slot_id: slot.tier.kind for slot in schedule.slots}
    moved = {name: np.zeros(len(schedule.ops), np.int64) for name in RESOURCES}
    for i, op in enumerate(schedule.ops):
        if op.kind == "compute":
            cost = schedule.calls[op.call].cost
            moved["hbm"][i] = sum(work.hbm_bytes for work in cost)
            moved["host_dram"][i] = sum(work.host_dram_bytes for work in cost)
            continue
        if op.kind == "communicate":
            moved["hbm"][i] = sum(access_map.tensors[o.tensor].size_bytes for o in op.operands)
            continue
        low, high = access_map.extent(op.tensor, op.num_parts if op.kind == "copy" else None)
        if op.kind == "copy" and kinds[op.source] == kinds[op.destination] == "device":
            moved["hbm"][i] = 2 * (high - low)
            continue
        moved["host_dram"][i] = high - low
        if op.kind == "copy":
            moved["hbm"][i] = high - low
            direction = "h2d" if kinds[op.destination] == "device" else "d2h"
            moved[direction][i] = high - low
    return moved


def use_over_time(
    schedule: RankSchedule, timeline: RankTimeline, edges_ns: Sequence[float] | Floats
) -> dict[str, Floats]:
    """Bytes per ns over each resource, mean between each two edges; all passes of the timeline.

    An op's bytes are spread evenly from its start to its end. An op that takes no time adds
    nothing.
    """
    edges = np.asarray(edges_ns, np.float64)
    start = np.concatenate([np.asarray(spans.start_ns, np.float64) for spans in timeline.passes])
    end = np.concatenate([np.asarray(spans.end_ns, np.float64) for spans in timeline.passes])
    lasting = np.flatnonzero(end > start)
    found: dict[str, Floats] = {}
    for name, amounts in bytes_by_op(schedule).items():
        amount = np.tile(amounts, len(timeline.passes))[lasting]
        rate = amount / (end[lasting] - start[lasting])
        found[name] = np.diff(_drawn_until(edges, start[lasting], end[lasting], rate))
        found[name] /= np.diff(edges)
    return found


def _drawn_until(moments: Floats, start: Floats, end: Floats, rate: Floats) -> Floats:
    """Amounts drawn up to each moment by flows of constant rates from start to end."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    level = np.cumsum(np.concatenate([rate, -rate])[order])
    if not len(times):
        return np.zeros_like(moments)
    drawn = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))])
    result: Floats = np.interp(moments, times, drawn)
    return result
