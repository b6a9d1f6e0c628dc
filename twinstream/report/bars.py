"""Ops as bars on lanes: one by one in a window, merged over a whole step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from twinstream.report.palette import WAITING
from twinstream.report.view import COMPUTE, Span, View
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import readable, seconds

MOST_OPS = 3000
MOST_MERGED = 2000  # on a lane
MOST_BARS = 6000  # on all compute lanes of a figure together, and as many on all others
_LEAST_BARS = 50


@dataclass(frozen=True)
class Bar:
    """One bar on a lane; `key` decides its colour."""

    queue: str
    key: str
    start_ns: int
    end_ns: int
    text: str
    num_ops: int = 1


def op_bars(view: View, span: Span) -> list[Bar]:
    """A bar for every op that runs in the span."""
    return [
        Bar(view.lane[i], view.key[i], int(view.start_ns[i]), int(view.end_ns[i]), _text(view, i))
        for i in view.within(span)
    ]


def shrunk(views: Sequence[View], span: Span, most_ops: int = MOST_OPS) -> Span:
    """Return the part of a span around its loss (else its middle) that has at most `most_ops`."""
    middle = _middle_ns(views, span)
    window, lasting_ns = span, span.lasting_ns
    while lasting_ns > 1 and sum(len(view.within(window)) for view in views) > most_ops:
        lasting_ns = lasting_ns * 9 // 10
        start_ns = min(max(middle - lasting_ns // 2, span.start_ns), span.end_ns - lasting_ns)
        window = Span(start_ns, start_ns + lasting_ns)
    return window


def _middle_ns(views: Sequence[View], span: Span) -> int:
    losses = [
        int(view.start_ns[i])
        for view in views
        for i in view.within(span)
        if isinstance(op := view.ops[i], Compute) and op.label.kind == "head_loss"
    ]
    return losses[len(losses) // 2] if losses else (span.start_ns + span.end_ns) // 2


def merged_bars(view: View, span: Span | None = None, num_classes: int = 1) -> list[Bar]:
    """All ops of a span (by default of the pass): those of a colour, layer and round in close
    succession are one bar, as long as they together.

    Where these are too many, bars of equal parts of the span take their place, each with the colour
    of what takes most of it. Of a figure of several classes each has its share of bars.
    """
    within = range(len(view.ops)) if span is None else view.within(span)
    span = span or view.whole
    by_lane: dict[str, list[int]] = {}
    for i in within:
        by_lane.setdefault(view.lane[i], []).append(i)
    found: list[Bar] = []
    for lane in view.lanes:
        mine = sorted(by_lane.get(lane, ()), key=lambda i: (int(view.start_ns[i]), i))
        most = _most_bars(view, num_classes, lane)
        groups = list(_runs(view, mine, span.lasting_ns // most))
        if len(groups) > most:
            groups = list(_slices(view, mine, span, most))
        found += [_merged(view, lane, group) for group in groups]
    return found


def waiting_bars(view: View, span: Span, num_classes: int = 1) -> list[Bar]:
    """Bars from when a class comes to an exchange until all its other sides have come.

    Of too many the longest are left, which are all that can be seen.
    """
    began = view.start_ns - view.waited_ns
    mine = [
        int(i)
        for i in np.flatnonzero(view.waited_ns)
        if began[i] < span.end_ns and view.start_ns[i] > span.start_ns
    ]
    most = _most_bars(view, num_classes, "")
    longest = sorted(mine, key=lambda i: (-int(view.waited_ns[i]), i))[:most]
    return [_waiting(view, i, span) for i in sorted(longest)]


def _most_bars(view: View, num_classes: int, lane: str) -> int:
    lanes = num_classes * (1 if lane == COMPUTE else max(1, len(view.lanes) - 1))
    return min(MOST_MERGED, max(_LEAST_BARS, MOST_BARS // lanes))


def _waiting(view: View, i: int, span: Span) -> Bar:
    waited_s = int(view.waited_ns[i]) / 1e9
    text = f"<b>{view.ops[i].op_id}</b><br>{view.name} waits {seconds(waited_s)} for the others"
    start_ns = max(span.start_ns, int(view.start_ns[i] - view.waited_ns[i]))
    return Bar(view.lane[i], WAITING, start_ns, int(view.start_ns[i]), text)


def _runs(view: View, positions: Sequence[int], close_ns: int) -> Iterator[list[int]]:
    """Ops in close succession of one colour, layer and round; exchanges within that time."""
    group: list[int] = []
    last: object = None
    for i in positions:
        op = view.ops[i]
        key = (view.key[i], *_place(op))
        if group:
            said = isinstance(op, Communicate)
            since_ns = view.start_ns[group[0]] if said else view.end_ns[group[-1]]
            if key != last or view.start_ns[i] - since_ns > close_ns:
                yield group
                group = []
        group.append(i)
        last = key
    if group:
        yield group


def _slices(view: View, positions: Sequence[int], span: Span, most: int) -> Iterator[list[int]]:
    """Ops that start in one of so many equal parts of the span."""
    length_ns = max(1, -(-span.lasting_ns // most))

    def part(i: int) -> int:
        return max(0, int(view.start_ns[i]) - span.start_ns) // length_ns

    for _, group in groupby(positions, part):
        yield list(group)


def _place(op: Op) -> tuple[int | None, int | None]:
    return (op.label.layer, op.label.round) if isinstance(op, Compute) else (None, None)


def _merged(view: View, lane: str, group: list[int]) -> Bar:
    if len(group) == 1:
        i = group[0]
        return Bar(lane, view.key[i], int(view.start_ns[i]), int(view.end_ns[i]), _text(view, i))
    busy: dict[str, int] = {}
    for i in group:
        busy[view.key[i]] = busy.get(view.key[i], 0) + int(view.end_ns[i] - view.start_ns[i])
    start_ns, last_ns = int(view.start_ns[group[0]]), int(view.end_ns[group].max())
    parts = ", ".join(f"{readable(name)} {seconds(ns / 1e9)}" for name, ns in busy.items())
    layer, number = _place(view.ops[group[0]])
    where = "" if view.is_device else f", {view.name}"
    where += "" if layer is None else f", layer {layer}"
    where += "" if number is None else f", round {number + 1}"
    text = f"<b>{parts}</b>{where}<br>{len(group):,} ops in {seconds((last_ns - start_ns) / 1e9)}"
    key = max(busy, key=busy.__getitem__)
    return Bar(lane, key, start_ns, min(last_ns, start_ns + sum(busy.values())), text, len(group))


def _text(view: View, i: int) -> str:
    """Op, tensor, bytes, duration, what or whom it waited for."""
    op = view.ops[i]
    lines = [f"<b>{op.op_id}</b>" if view.is_device else f"<b>{op.op_id}</b>, {view.name}"]
    moved = int(view.moved_bytes[i])
    if isinstance(op, Communicate):
        lines.append(f"{readable(op.collective)} over {', '.join(op.axes)}")
        moved = view.said_bytes(op)
    elif isinstance(op, Compute):
        level = f", from level {op.label.level}" if op.label.level else ""
        lines.append(f"{readable(op.label.kind)}{level}")
    else:
        lines.append(f"tensor {op.tensor} ({readable(view.roles[op.tensor])})")
    lasting_s = int(view.end_ns[i] - view.start_ns[i]) / 1e9
    rate = f", {moved / lasting_s / 1e9:,.1f} GB/s" if lasting_s > 0 and moved else ""
    lines.append(f"{seconds(lasting_s)}, {gib(moved)} moved{rate}")
    idle = view.idle.get(op.op_id)
    if view.waited_ns[i]:
        lines.append(f"waited {seconds(int(view.waited_ns[i]) / 1e9)} for the others")
    elif idle is not None:
        waited = seconds((idle.end_ns - idle.start_ns) / 1e9)
        lines.append(f"waited {waited} for {idle.waited_for or 'latency alone'}")
    return "<br>".join(lines)
