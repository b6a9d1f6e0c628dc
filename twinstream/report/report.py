"""`twinstream report`: prediction and measurement of a schedule on one page."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import Explanation, explain
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import prediction_notes
from twinstream.report.bars import merged_bars, op_bars, shrunk
from twinstream.report.page import Card, Page, Section, Table, html_of
from twinstream.report.ranks_part import RanksPart
from twinstream.report.share_figures import (
    critical_path_figure,
    idle_figure,
    kinds_figure,
    recompute_figure,
    traffic_figure,
)
from twinstream.report.timeline_figure import Shown, timeline_figure
from twinstream.report.view import View, round_name, view_of
from twinstream.schedule.analysis.comparison import Comparison, compare
from twinstream.schedule.analysis.idle import BUBBLE, IdleInterval
from twinstream.schedule.document import Schedule
from twinstream.schedule.sizes import gib, rate_text
from twinstream.schedule.timeline import Timeline
from twinstream.screens.ranks_screen import mesh_text
from twinstream.screens.tables import cause_name, readable, seconds, workload_line

_NUM_WAITS = 8
_HOW_TO_ZOOM = (
    "A figure is zoomed by dragging along it, and reset by a double click; a click on the legend "
    "hides, a double click isolates."
)
_WORTH_NAMING = 0.05  # tokens/s


def report_html(
    schedule: Schedule,
    machine: Machine,
    *,
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    notes: Sequence[str] = (),
) -> str:
    """One self-contained page about a schedule and its timelines.

    Args:
        machine: whose rates and peaks count; of a mesh the profile of a node.
        predicted, measured: at least one of them; of a mesh the prediction.
        notes: sentences about the prediction.

    Raises:
        TimelineMismatch: a timeline is not of this schedule.
        MissingNumberError: the machine lacks a number that a figure needs.
    """
    if schedule.is_one_device:
        return html_of(_page_of_device(schedule, machine, predicted, measured, notes))
    assert predicted is not None, "a page of ranks has the prediction"
    part = RanksPart(schedule, predicted, machine, measured, notes=notes)
    return html_of(_page_of_ranks(part))


def _page_of_device(
    schedule: Schedule,
    machine: Machine,
    predicted: Timeline | None,
    measured: Timeline | None,
    notes: Sequence[str],
) -> Page:
    given = {"predicted": predicted, "measured": measured}
    lines = {name: line for name, line in given.items() if line is not None}
    assert lines, "a report needs a timeline"
    views = [view_of(name, schedule, line) for name, line in lines.items()]
    summaries = {name: summarize(schedule, line, machine) for name, line in lines.items()}
    explanation = explain(schedule, next(iter(lines.values())), machine)
    both = compare(schedule, predicted, measured) if predicted and measured else None
    told = [] if predicted is None else prediction_notes(schedule, machine, predicted)
    work, model = schedule.workload, schedule.only.model
    return Page(
        title=f"{model.name} on {machine.name}",
        subtitle=f"{work.tokens_per_step:,} tokens a step: {workload_line(work)}. "
        f"Policy {schedule.policy}. {' '.join((_provenance(lines), *notes, *told))}",
        cards=[
            *_headlines(summaries, f"the {model.spec['dtype']} peak"),
            *_cards(schedule, next(iter(summaries)), summaries, explanation),
        ],
        sections=_sections(views, machine, explanation, both),
        footer="Made by twinstream report. Times are of the last pass of each timeline, from the "
        f"end of compute in the pass before. {_details(lines)}. {_HOW_TO_ZOOM}",
    )


def _page_of_ranks(part: RanksPart) -> Page:
    lines = {"predicted": part.predicted, "measured": part.measured}
    known = {name: line for name, line in lines.items() if line is not None}
    summary = part.summary
    found = {"predicted": summary} | ({} if part.ran is None else {"measured": part.ran})
    error = [] if summary.uncertainty is None else [summary.uncertainty.sentence]
    name = part.schedule.model.get("name", "a model")
    where = part.predicted.provenance.where
    return Page(
        title=f"{name} on {summary.counted} of {where}",
        subtitle=f"{mesh_text(part.schedule)}; {summary.tokens_per_step:,} tokens a step, "
        f"{part.layout_told}. {' '.join((_provenance(known), *part.notes, *error))}",
        cards=[
            *_headlines(found, f"the peak of all {summary.devices}"),
            *_cards_of_ranks(summary, part.ran),
        ],
        sections=part.sections(),
        footer="Made by twinstream report. Lanes show the last simulated pass; shares of a class's "
        "step are of its own pass, from the end of compute in the pass before to its own. "
        f"{_HOW_TO_ZOOM}",
    )


def _provenance(lines: Mapping[str, Timeline]) -> str:
    return " ".join(
        f"{name.capitalize()}: {line.provenance.description}." for name, line in lines.items()
    )


def _details(lines: Mapping[str, Timeline]) -> str:
    return "; ".join(f"{name}: {line.provenance.detail}" for name, line in lines.items())


def _headlines(found: Mapping[str, Summary], peak: str) -> list[Card]:
    """Speed and use of compute: predicted, and how far off where it was measured, too."""
    world, main = next(iter(found.items()))

    def also(shown: Callable[[Summary], str], field: str) -> str:
        if len(found) < 2:
            error = "" if main.uncertainty is None else f", {main.uncertainty.short}"
            return f"{world}{error}"
        before, after = found.values()
        error = getattr(before, field) / getattr(after, field) - 1
        return f"measured {shown(after)}; the prediction is {error:+.1%}"

    cold = f"the first, cold one {seconds(main.cold_step_time_s)}"
    return [
        Card("throughput, tokens/s", _rate(main), also(_rate, "tokens_per_s")),
        Card("step time", _time(main), f"{also(_time, 'step_time_s')}; {cold}"),
        Card("MFU", f"{main.mfu:.1%}", f"of {peak}"),
        Card("HFU", f"{main.hfu:.1%}", f"{main.recompute_fraction:.1%} of the FLOPs are redone"),
    ]


def _cards(
    schedule: Schedule, world: str, found: Mapping[str, Summary], explanation: Explanation
) -> list[Card]:
    """What limits one device, what it takes, what would help."""
    main, bound, cards = found[world], schedule.bound, []
    if bound is not None and main.gap is not None:
        family = "" if main.gap_family is None else f"; {main.gap_family:.1%} over any chunking's"
        cards.append(
            Card("above the lower bound", f"{main.gap:.1%}", f"{seconds(bound.step_s)}{family}")
        )
        limits = ", ".join(readable(name) for name in explanation.limits)
        cards.append(Card("limited by", limits or "-", "without these the bound would be lower"))
    caps = schedule.caps
    for name, peak, cap in (
        ("device memory", main.device_peak_bytes, caps.device_bytes),
        ("host memory", main.host_peak_bytes, caps.host_bytes),
    ):
        cards.append(Card(name, gib(peak), "no cap" if cap is None else f"cap {gib(cap)}"))
    idle = sum(explanation.compute_idle_fraction.values())
    cards.append(Card("compute waits", f"{idle:.2%}", f"of the step, {world}"))
    prices = [price for price in explanation.prices if price.adds_tokens_per_s >= _WORTH_NAMING]
    for price in sorted(prices, key=lambda p: -p.adds_tokens_per_s)[:1]:
        unit, _, thing = price.what.partition(" of ")
        text = f"+{price.adds_tokens_per_s:,.1f} tokens/s"
        note = f"one more {unit} of {readable(thing)}, by the bound"
        cards.append(Card("worth buying", text, note))
    return cards


def _cards_of_ranks(summary: Summary, ran: Summary | None) -> list[Card]:
    """How many there are, what the fullest takes, and what compute waits for."""
    has = "" if summary.device_bytes is None else f" of {gib(summary.device_bytes)}"
    if summary.missing_bytes:
        has += f": {gib(summary.missing_bytes)} are missing"
    waits = {name: share for name, share in summary.mean_fraction.items() if name != "compute"}
    cards = [
        Card(summary.devices, f"{summary.num_gpus:,}", f"{len(summary.exposed)} classes of ranks"),
        Card("device memory", gib(summary.device_peak_bytes),
             f"class '{summary.fullest}', the fullest{has}"),
        Card("compute waits", f"{sum(waits.values()):.1%}", "of the step, mean of ranks"),
    ]  # fmt: skip
    if ran is not None:
        idle = 1.0 - ran.mean_fraction.get("compute", 0.0)
        note = "of the last step, mean of ranks"
        cards.append(Card("measured: compute waits", f"{idle:.1%}", note))
    if summary.host_peak_bytes:
        note = "of the rank that takes most"
        cards.append(Card("host memory", gib(summary.host_peak_bytes), note))
    if BUBBLE in waits:
        cards.append(Card("bubble", f"{waits.pop(BUBBLE):.1%}", "of the step, mean of ranks"))
    if waits:
        cause = max(waits, key=waits.__getitem__)
        cards.append(Card("exposed most", cause_name(cause), f"{waits[cause]:.1%} of the step"))
    return cards


def _rate(summary: Summary) -> str:
    return rate_text(summary.tokens_per_s)


def _time(summary: Summary) -> str:
    return seconds(summary.step_time_s)


def _sections(
    views: Sequence[View], machine: Machine, explanation: Explanation, both: Comparison | None
) -> list[Section]:
    schedule = views[0].schedule
    return [
        _one_round(views, machine),
        Section(
            "The whole step",
            "Ops next to each other of one kind and layer are one bar; where these are too many, "
            "a bar is 1/2,000 of the step in the colour of what takes most of it. Memory is shown "
            "at the fullest moment of each 1/500 of the step, links as means over it.",
            timeline_figure(
                [Shown(view, view.whole, merged_bars(view)) for view in views], machine
            ),
        ),
        _if_any(
            "Idle time of the compute stream, by cause",
            "What compute waited for when it had nothing to run; copies are hatched.",
            idle_figure(views), "Compute never waited.",
        ),
        Section(
            "The critical path",
            "What the step's length is made of: each op on it was released by the one before. "
            "Copies are hatched.",
            critical_path_figure(views), half=True,
        ),
        _if_any(
            "Bytes copied in one step", "By direction and role of the tensor.",
            traffic_figure(schedule, explanation.residence), "Nothing is copied.",
        ),
        _if_any(
            "Recompute by layer",
            "Share of the layer's blocks (a block is a layer of one chunk) made again before "
            "backward, by the level that was saved.",
            recompute_figure(schedule), "Nothing is recomputed: all that backward needs is saved.",
        ),
        Section("The longest waits of compute", "One row per op, predicted first.",
                _waits_table(views)),
        Section(
            "Busy time by kind of op",
            "Predicted beside measured; in brackets predicted / measured - 1."
            if both else "Mean of the passes, all rounds of one step.",
            kinds_figure(views, both),
        ),
    ]  # fmt: skip


def _if_any(title: str, text: str, figure: go.Figure, otherwise: str) -> Section:
    """Half a row with the figure; where it would be empty, what that means."""
    if not figure.data:
        return Section(title, otherwise, None, half=True)
    return Section(title, text, figure, half=True)


def _one_round(views: Sequence[View], machine: Machine) -> Section:
    """A middle round op by op; of a long one the time around its loss."""
    rounds = views[0].schedule.workload.rounds_per_step
    number = rounds // 2
    shown, cut = [], False
    for view in views:
        span = view.round_span(number)
        window = shrunk([view], span)
        cut = cut or window != span
        shown.append(Shown(view, window, op_bars(view, window)))
    whole = views[0].round_span(number)
    name = round_name(number, rounds)
    text = f"{name[0].upper()}{name[1:]}, op by op; hover says op, tensor, bytes and wait."
    if rounds > 2:
        text += " It stands for all rounds but the first and the last."
    if cut:
        window = shown[0].span
        text = (
            f"A window of {seconds(window.lasting_ns / 1e9)} around the loss of {name}, "
            f"which lasts {seconds(whole.lasting_ns / 1e9)}, op by op; hover says op, tensor, "
            "bytes and wait."
        )
    return Section("One round", text, timeline_figure(shown, machine))


def _waits_table(views: Sequence[View]) -> Table:
    rows: list[tuple[str, ...]] = []
    for view in views:
        mine = [view.idle[op.op_id] for op in view.schedule.ops
                if op.stream.queue == "compute" and op.op_id in view.idle]  # fmt: skip
        longest = sorted(mine, key=lambda found: found.start_ns - found.end_ns)
        rows += [_wait_row(view.name, found) for found in longest[: _NUM_WAITS // len(views)]]
    return Table(("", "op", "waited for", "tensor", "waited"), rows, num_left=4)


def _wait_row(world: str, found: IdleInterval) -> tuple[str, ...]:
    lasting = seconds((found.end_ns - found.start_ns) / 1e9)
    return world, found.before, found.waited_for or "latency", found.tensor or "-", lasting
