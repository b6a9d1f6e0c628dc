"""Ops as bars of a Gantt chart: one by one in a window, merged over a whole step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from twinstream.report.view import Span, View, stream_name
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import readable, seconds

MOST_OPS = 3000
MOST_MERGED = 2000


@dataclass(frozen=True)
class Bar:
    """One bar on a queue's row; `key` (a task kind or a role) decides its colour."""

    queue: str
    key: str
    start_ns: int
    end_ns: int
    text: str
    num_ops: int = 1


def op_bars(view: View, span: Span) -> list[Bar]:
    """A bar for every op that runs in the span."""
    return [
        Bar(
            stream_name(op),
            view.colour_key(op),
            int(view.start_ns[i]),
            int(view.end_ns[i]),
            _text(view, i, op),
        )
        for i, op in ((i, view.schedule.ops[i]) for i in view.within(span))
    ]


def shrunk(view: View, span: Span, most_ops: int = MOST_OPS) -> Span:
    """As much of a span as has at most so many ops, around its loss (else around its middle)."""
    middle = _middle_ns(view, span)
    window, lasting_ns = span, span.lasting_ns
    while len(view.within(window)) > most_ops and lasting_ns > 1:
        lasting_ns = lasting_ns * 9 // 10
        start_ns = min(max(middle - lasting_ns // 2, span.start_ns), span.end_ns - lasting_ns)
        window = Span(start_ns, start_ns + lasting_ns)
    return window


def _middle_ns(view: View, span: Span) -> int:
    losses = [
        int(view.start_ns[i])
        for i in view.within(span)
        if isinstance(op := view.schedule.ops[i], Compute) and op.label.kind == "head_loss"
    ]
    return losses[len(losses) // 2] if losses else (span.start_ns + span.end_ns) // 2


def merged_bars(view: View) -> list[Bar]:
    """The whole pass: ops in close succession of one kind and layer are one bar.

    Where these are too many, bars of equal length take their place, each with the colour of what
    takes most of it.
    """
    found: list[Bar] = []
    for queue in view.queues:
        mine = [i for i, op in enumerate(view.schedule.ops) if stream_name(op) == queue]
        groups = list(_runs(view, mine))
        if len(groups) > MOST_MERGED:
            groups = list(_slices(view, mine))
        found += [_merged(view, queue, group) for group in groups]
    return found


def _runs(view: View, positions: Sequence[int]) -> Iterator[list[int]]:
    """Ops in close succession of one kind and layer."""
    group: list[int] = []
    last: object = None
    close_ns = view.whole.lasting_ns // MOST_MERGED
    for i in positions:
        op = view.schedule.ops[i]
        key = (view.colour_key(op), *_place(op))
        if group and (key != last or view.start_ns[i] - view.end_ns[group[-1]] > close_ns):
            yield group
            group = []
        group.append(i)
        last = key
    if group:
        yield group


def _slices(view: View, positions: Sequence[int]) -> Iterator[list[int]]:
    """Ops that start in one of `MOST_MERGED` equal parts of the pass."""
    length_ns = max(1, view.whole.lasting_ns // MOST_MERGED)

    def part(i: int) -> int:
        return int(view.start_ns[i] - view.whole.start_ns) // length_ns

    for _, group in groupby(positions, part):
        yield list(group)


def _place(op: Op) -> tuple[int | None, int | None]:
    return (op.label.layer, op.label.round) if isinstance(op, Compute) else (None, None)


def _merged(view: View, queue: str, group: list[int]) -> Bar:
    busy: dict[str, int] = {}
    for i in group:
        key = view.colour_key(view.schedule.ops[i])
        busy[key] = busy.get(key, 0) + int(view.end_ns[i] - view.start_ns[i])
    key = max(busy, key=busy.__getitem__)
    start_ns, end_ns = int(view.start_ns[group[0]]), int(view.end_ns[group[-1]])
    share = sum(busy.values()) / max(1, end_ns - start_ns)
    parts = ", ".join(f"{readable(name)} {seconds(ns / 1e9)}" for name, ns in busy.items())
    layer, number = _place(view.schedule.ops[group[0]])
    where = "" if layer is None else f"<br>layer {layer}"
    where += "" if number is None else f", round {number + 1}"
    text = f"<b>{parts}</b>{where}<br>{len(group):,} ops, busy {share:.0%} of the bar"
    return Bar(queue, key, start_ns, end_ns, text, len(group))


def _text(view: View, position: int, op: Op) -> str:
    """Op, tensor, bytes, duration, what it waited for."""
    lines = [f"<b>{op.op_id}</b>"]
    if not isinstance(op, Compute | Communicate):
        lines.append(f"tensor {op.tensor} ({readable(view.roles[op.tensor])})")
    elif op.label.level:
        lines.append(f"from level {op.label.level}")
    lasting_s = (view.end_ns[position] - view.start_ns[position]) / 1e9
    moved = int(view.moved_bytes[position])
    rate = f", {moved / lasting_s / 1e9:,.1f} GB/s" if lasting_s > 0 else ""
    lines.append(f"{seconds(lasting_s)}, {gib(moved)} moved{rate}")
    idle = view.idle.get(op.op_id)
    if idle is not None:
        waited = seconds((idle.end_ns - idle.start_ns) / 1e9)
        what = idle.waited_for or "latency alone"
        lines.append(f"waited {waited} for {what}")
    return "<br>".join(lines)
