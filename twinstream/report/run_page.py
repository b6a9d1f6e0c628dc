"""`twinstream report DIR`: a run as one page, while it trains or after."""

import math
from collections.abc import Sequence

from twinstream.log.run_files import OPTIONS, PLAN
from twinstream.measures.metrics import rate_text
from twinstream.measures.residence import residence
from twinstream.report.page import Card, Page, Section, Table, Text, html_of
from twinstream.report.ranks_part import RanksPart
from twinstream.report.run_figures import (
    FEW_STEPS,
    MOST_POINTS,
    accuracy_figure,
    loss_figure,
    memory_figure,
    norm_figure,
    rate_figure,
    reward_figure,
    speed_figure,
)
from twinstream.report.run_folder import RunFolder, RunSummary, run_summary
from twinstream.report.share_figures import traffic_figure
from twinstream.schedule.analysis.comparison import Comparison, Pair
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.files import real_path
from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline, Timeline
from twinstream.screens.live import duration
from twinstream.screens.tables import readable, seconds, workload_line

_NUM_NAMED = 5


def run_html(
    run: RunFolder,
    *,
    schedule: Schedule | None = None,
    predicted: Timeline | None = None,
    ranks: RanksPart | None = None,
) -> str:
    """One self-contained page about a run.

    Args:
        schedule: by which it trained, if known.
        predicted: of the schedule; without it memory is shown with one op after the other.
        ranks: that trained it, where it was no single device.

    Raises:
        TimelineMismatch: a timeline is not of its schedule.
    """
    summary = run_summary(run)
    sections = [_loss(run), *_of_steps(run)]
    if ranks is not None:
        sections += ranks.run_sections()
    if schedule is not None:
        line = None if predicted is None else predicted.only
        sections += _memory(schedule.only, line)
    sections.append(_checkpoints(run))
    if run.comparison is not None:
        sections.append(_compared(run.comparison))
    if run.options is not None:
        sections.append(Section("Options", f"As {OPTIONS} has them.", Text(run.options)))
    name, model = real_path(run.path).name, schedule.only.model.name if schedule else None
    if ranks is not None:
        model = str(ranks.schedule.model["name"])
    return html_of(
        Page(
            title=f"{model}: {name}" if model else name,
            subtitle=_subtitle(run, schedule, ranks),
            cards=[*_cards(run, summary, schedule), *([] if ranks is None else ranks.run_cards())],
            sections=sections,
            footer="Made by twinstream report. A figure is zoomed by dragging along it, and reset "
            "by a double click; a click on the legend hides, a double click isolates.",
        )
    )


def _subtitle(run: RunFolder, schedule: Schedule | None, ranks: RanksPart | None) -> str:
    told = [f"A run in {run.path}"]
    if run.events:
        first, last = (event.at[:19].replace("T", " ") for event in (run.events[0], run.events[-1]))
        told.append(f"events from {first} to {last} UTC")
    if ranks is not None:
        return f"{', '.join(told)}. {ranks.told}"
    if schedule is None:
        return f"{', '.join(told)}. It has no {PLAN}."
    work = schedule.workload
    return (
        f"{', '.join(told)}. {work.tokens_per_step:,} tokens a step: {workload_line(work)}. "
        f"Planned for {schedule.machine.name}, policy {schedule.policy}."
    )


def _cards(run: RunFolder, summary: RunSummary, schedule: Schedule | None) -> list[Card]:
    cards: list[Card] = []
    if run.steps:
        last = run.steps[-1]
        epoch = f"{last.epoch:,.2f} epochs"
        since = f"{_loss_text(run.steps[0].loss)} at step {run.steps[0].step:,}"
        cards += [
            Card("steps", f"{last.step:,}", epoch),
            Card("loss", _loss_text(last.loss), f"of the last step; {since}"),
        ]
    if run.evals:
        last_eval = run.evals[-1]
        note = last_eval.text.partition(", ")[2]
        if summary.best_eval_step is not None:
            best = f"{_loss_text(summary.best_eval_loss)} at step {summary.best_eval_step:,}"
            note += f"; best {best}"
        cards.append(Card("evaluation loss", _loss_text(last_eval.loss), note))
    if summary.tokens_per_s is not None:
        cards += [
            Card("trained tokens", f"{summary.tokens:,}", "without padding"),
            Card("throughput, tokens/s", rate_text(summary.tokens_per_s), _predicted(summary)),
            Card("time in steps", duration(summary.seconds), _beside(run)),
        ]
    if schedule is not None:
        for tier, cap in (
            ("device", schedule.caps.device_bytes),
            ("host", schedule.caps.host_bytes),
        ):
            taken = _taken_bytes(schedule.only, tier)
            note = "no cap" if cap is None else f"cap {gib(cap)}"
            cards.append(Card(f"{tier} memory", gib(taken), f"planned; {note}"))
    if run.checkpoints:
        newest = run.checkpoints[-1]
        note = f"the newest of step {newest.step:,}, {gib(newest.bytes)}"
        cards.append(Card("checkpoints", f"{len(run.checkpoints):,}", note))
    return cards


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _predicted(summary: RunSummary) -> str:
    """The median step's prediction and its error."""
    predicted, measured = summary.predicted_tokens_per_s, summary.tokens_per_s
    if predicted is None or not measured:
        return "of the median step"
    return f"median; predicted {rate_text(predicted)}, {predicted / measured - 1:+.1%}"


def _beside(run: RunFolder) -> str:
    evals = sum(one.seconds for one in run.evals)
    held = sum(one.device_held_s for one in run.checkpoints)
    return f"evaluations took {duration(evals)}, checkpoints held the device {duration(held)}"


def _taken_bytes(schedule: RankSchedule, tier: str) -> int:
    ends = [s.offset_bytes + s.size_bytes for s in schedule.slots if s.tier.kind == tier]
    return max(ends, default=0) + (schedule.caps.outside_arena_bytes if tier == "device" else 0)


def _loss(run: RunFolder) -> Section:
    if not run.steps and not run.evals:
        return Section("Loss", "No step has been done yet.", None)
    is_of_pairs = any(step.preference is not None for step in run.steps)
    text = f"Of each step, the mean over its {'pairs' if is_of_pairs else 'targets'}."
    if len(run.steps) >= FEW_STEPS:
        text += " Smoothed is the running mean of about a fiftieth of the steps."
    if len(run.steps) > MOST_POINTS:
        text += (
            f" Of {len(run.steps):,} steps the least and the greatest of each "
            f"{MOST_POINTS // 2:,}th of the run are drawn."
        )
    if not run.evals:
        text += " There was no evaluation."
    bad = [f"{step.step:,}" for step in run.steps if not math.isfinite(step.loss)]
    if bad:
        more = ", ..." if len(bad) > _NUM_NAMED else ""
        text += f" Steps without a finite loss: {len(bad):,} ({', '.join(bad[:_NUM_NAMED])}{more})."
    return Section("Loss", text, loss_figure(run.steps, run.evals))


def _of_steps(run: RunFolder) -> list[Section]:
    if not run.steps:
        return []
    norms = norm_figure(run.steps)
    found = [
        Section("Learning rate", "", rate_figure(run.steps), half=True),
        Section("Gradient norm", "Of all gradients, before clipping.", norms, half=True)
        if norms.data
        else Section("Gradient norm", "It was not computed.", None, half=True),
    ]
    if any(step.preference is not None for step in run.steps):
        text = "How much likelier than by the reference: chosen less rejected answers, and each."
        found += [
            Section("Rewards", text, reward_figure(run.steps), half=True),
            Section("Accuracy", "Pairs whose chosen answer gained more.",
                    accuracy_figure(run.steps), half=True),
        ]  # fmt: skip
    predicted = any(step.predicted_tokens_per_s is not None for step in run.steps)
    text = "Trained tokens by the wall time of each step; padding is not counted."
    text += "" if predicted else " Nothing was predicted."
    return [*found, Section("Speed", text, speed_figure(run.steps))]


def _memory(schedule: RankSchedule, predicted: RankTimeline | None) -> list[Section]:
    found = residence(schedule, predicted or _one_by_one(schedule))
    caps = (("device", schedule.caps.device_bytes), ("host", schedule.caps.host_bytes))
    told = ", ".join(
        f"the {tier} has {'no cap' if cap is None else f'a cap of {gib(cap)}'}"
        for tier, cap in caps
    )
    when = "as predicted" if predicted else "one op after the other in the plan's order"
    text = f"At the fullest moment of a step, {when}; {told}."
    traffic = traffic_figure(schedule, found)
    copied = Section("Bytes copied in one step", "Nothing is copied.", None, half=True)
    if traffic.data:
        text_copied = "By direction and role of the tensor."
        copied = Section("Bytes copied in one step", text_copied, traffic, half=True)
    return [
        Section("Memory by role", text, memory_figure(schedule, found), half=True),
        copied,
    ]


def _one_by_one(schedule: RankSchedule) -> RankTimeline:
    """Every op after the one issued before it, which each schedule allows; a ns each."""
    count = len(schedule.ops)
    spans = PassSpans(start_ns=tuple(range(count)), end_ns=tuple(range(1, count + 1)))
    return RankTimeline(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=(spans,),
        cold=spans,
        step_ns=float(count),
        provenance=Provenance(kind="simulated", where="no machine"),
    )


def _checkpoints(run: RunFolder) -> Section:
    if not run.checkpoints:
        return Section("Checkpoints", "None has been written.", None)
    rows = [
        (one.path, f"{one.step:,}", gib(one.bytes), seconds(one.seconds),
         f"{one.bytes / one.seconds / 1e9:,.2f}" if one.seconds else "-",
         seconds(one.device_held_s))
        for one in run.checkpoints
    ]  # fmt: skip
    columns = "checkpoint", "step", "size", "written in", "GB/s", "device held"
    return Section("Checkpoints", "Those that retention has removed since are listed, too.",
                   Table(columns, rows))  # fmt: skip


def _compared(found: Comparison) -> Section:
    step = ("step", "", found.step_ns)
    groups = [(_words(one.name), f"{one.num_ops:,}", one.busy_ns) for one in found.kinds]
    rows = [_pair_row(*row) for row in (step, *groups)]
    return Section(
        "Predicted against measured",
        "The step, and the busy time of each kind of op in it; the error is predicted / measured "
        f"- 1. {found.disturbed or ''}".rstrip(),
        Table(("", "ops", "predicted", "measured", "error"), rows),
    )


def _words(name: str) -> str:
    return " ".join(map(readable, name.split(" ")))


def _pair_row(name: str, num_ops: str, pair: Pair) -> Sequence[str]:
    error = f"{pair.error:+.1%}" if pair.measured else "-"
    return name, num_ops, seconds(pair.predicted / 1e9), seconds(pair.measured / 1e9), error
