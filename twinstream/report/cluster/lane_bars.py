"""Lanes as few enough bars: one by one in a window, merged over a whole step."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from twinstream.report.bars import Bar
from twinstream.report.cluster.lanes import COMPUTE, ClassLanes, is_said
from twinstream.report.view import Span
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import readable, seconds

MOST_OPS = 3000
MOST_BARS = 6000  # on all compute lanes together, and as many on all others
WAITING = "waiting"  # the key of a bar's colour


def op_bars(classes: Sequence[ClassLanes], span: Span) -> dict[str, list[Bar]]:
    """By class a bar for every op that runs in the span."""
    return {
        one.name: [_of_op(one, at) for at in one.within(span) if one.end_ns[at] > one.start_ns[at]]
        for one in classes
    }


def merged_bars(classes: Sequence[ClassLanes], span: Span) -> dict[str, list[Bar]]:
    """By class bars of all ops in the span, those of a colour that are close as one.

    Where these are too many, there is one for each of equal parts of the span, in the colour of
    what takes most of it. A bar of several ops is as long as they together.
    """
    others = sum(len(one.lanes) - 1 for one in classes)
    most_compute = max(50, MOST_BARS // max(1, len(classes)))
    most_others = max(50, MOST_BARS // max(1, others))
    found: dict[str, list[Bar]] = {}
    for one in classes:
        by_lane: dict[str, list[int]] = {}
        for at in one.within(span):
            if one.end_ns[at] > one.start_ns[at]:
                by_lane.setdefault(one.lane[at], []).append(at)
        found[one.name] = [
            bar
            for lane, mine in by_lane.items()
            for bar in _lane(one, mine, span, most_compute if lane == COMPUTE else most_others)
        ]
    return found


def waiting_bars(classes: Sequence[ClassLanes], span: Span) -> dict[str, list[Bar]]:
    """By class, bars from when it comes to an exchange until all its other sides have come.

    Of too many the longest are left, which are all that can be seen.
    """
    lanes = sum(len(one.lanes) - 1 for one in classes)
    most = max(50, MOST_BARS // max(1, lanes))
    found: dict[str, list[Bar]] = {}
    for one in classes:
        began = one.start_ns - one.waited_ns
        mine = [
            int(at)
            for at in np.flatnonzero(one.waited_ns)
            if began[at] < span.end_ns and one.start_ns[at] > span.start_ns
        ]
        longest = sorted(mine, key=lambda at: (-int(one.waited_ns[at]), at))[:most]
        found[one.name] = [_of_wait(one, at, span) for at in sorted(longest)]
    return found


def _of_wait(one: ClassLanes, at: int, span: Span) -> Bar:
    waited_s = int(one.waited_ns[at]) / 1e9
    text = f"<b>{one.ops[at].op_id}</b><br>{one.name} waits {seconds(waited_s)} for the others"
    start_ns = max(span.start_ns, int(one.start_ns[at] - one.waited_ns[at]))
    return Bar(one.lane[at], WAITING, start_ns, int(one.start_ns[at]), text)


def shrunk(classes: Sequence[ClassLanes], span: Span, most_ops: int = MOST_OPS) -> Span:
    """As much of a span as has at most so many ops, around its middle."""
    middle, lasting_ns, window = (span.start_ns + span.end_ns) // 2, span.lasting_ns, span
    while lasting_ns > 1 and sum(len(one.within(window)) for one in classes) > most_ops:
        lasting_ns = lasting_ns * 9 // 10
        start_ns = max(span.start_ns, middle - lasting_ns // 2)
        window = Span(start_ns, start_ns + lasting_ns)
    return window


def _lane(one: ClassLanes, mine: Sequence[int], span: Span, most: int) -> Iterator[Bar]:
    if len(mine) <= most:
        yield from (_of_op(one, at) for at in mine)
        return
    groups = list(_runs(one, mine, span.lasting_ns // most))
    if len(groups) > most:
        length_ns = -(-span.lasting_ns // most)
        parts = groupby(mine, lambda at: max(0, int(one.start_ns[at]) - span.start_ns) // length_ns)
        groups = [list(group) for _, group in parts]
    yield from (_merged(one, group) for group in groups)


def _runs(one: ClassLanes, mine: Sequence[int], longest_ns: int) -> Iterator[list[int]]:
    """Ops of one colour that begin within that time of one another."""
    group: list[int] = []
    for at in mine:
        if group and (
            one.key[at] != one.key[group[0]]
            or one.start_ns[at] - one.start_ns[group[0]] > longest_ns
        ):
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def _merged(one: ClassLanes, group: Sequence[int]) -> Bar:
    if len(group) == 1:
        return _of_op(one, group[0])
    busy: dict[str, int] = {}
    for at in group:
        lasting_ns = int(one.end_ns[at] - one.start_ns[at])
        busy[one.key[at]] = busy.get(one.key[at], 0) + lasting_ns
    start_ns, last_ns = int(one.start_ns[group[0]]), int(one.end_ns[list(group)].max())
    end_ns = min(last_ns, start_ns + sum(busy.values()))
    parts = ", ".join(f"{readable(name)} {seconds(ns / 1e9)}" for name, ns in busy.items())
    text = (
        f"<b>{one.name}</b>: {parts}<br>{len(group):,} ops in {seconds((last_ns - start_ns) / 1e9)}"
    )
    key = max(busy, key=busy.__getitem__)
    return Bar(one.lane[group[0]], key, start_ns, end_ns, text, len(group))


def _of_op(one: ClassLanes, at: int) -> Bar:
    """One op; hover says what it is, how long it takes, which bytes, and who was waited for."""
    op, start_ns, end_ns = one.ops[at], int(one.start_ns[at]), int(one.end_ns[at])
    lasting_s = (end_ns - start_ns) / 1e9
    told = f"<b>{op.op_id}</b><br>{one.name}, {seconds(lasting_s)}"
    if isinstance(op, Communicate):
        told += f", {readable(op.collective)} over {', '.join(op.axes)}"
    if isinstance(op, Compute):
        told += f", {readable(op.label.kind)}"
    if is_said(one.key[at]):
        told += f"<br>{gib(one.size_bytes[at])}"
    if one.waited_ns[at]:
        told += f", waited {seconds(int(one.waited_ns[at]) / 1e9)} for the others"
    return Bar(one.lane[at], one.key[at], start_ns, end_ns, told)
