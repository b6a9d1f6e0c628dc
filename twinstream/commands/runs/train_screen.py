"""What `train` shows before the first step and after the last, on one device and on ranks."""

from collections.abc import Iterator

from rich.console import Group, RenderableType

from twinstream.measures.explanation import Explanation, explain
from twinstream.measures.metrics import rate_text
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import brief
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.live import duration
from twinstream.screens.plan_screen import WIDTH, residence_table
from twinstream.screens.tables import (
    SHARES,
    SPEEDS,
    headline_table,
    readable,
    seconds,
    workload_line,
)
from twinstream.training.planning import DevicePlan
from twinstream.training.preparing import Prepared
from twinstream.training.ranks.planning import Plan, RanksPlan
from twinstream.training.run.run_folder import TrainResult


def train_screen(prepared: Prepared, done: int) -> Group:
    """What a run will do: that it fits, how fast, how long, what limits it, what is where.

    Args:
        done: steps that are behind.
    """
    plan, machine = prepared.plan, prepared.here.machine
    explanation = None
    if isinstance(plan, DevicePlan):
        explanation = explain(plan.schedule, plan.predicted, machine)
    ranks = f"{plan.num_ranks} ranks of " if plan.num_ranks > 1 else ""
    table = FittedTable(box=None, show_header=False, width=WIDTH, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("data", prepared.data_line)
    step = f"{prepared.tokens_per_step:,} tokens: {workload_line(plan.workload)}"
    table.add_row("a step", f"{step}, {_contents(prepared)}")
    if not done and (kept := _kept_by(prepared)):
        table.add_row("other caps", f"the same steps with {kept}")
    left = max(0, prepared.num_steps - done)
    of = f" of {prepared.num_steps:,}" if done else ""
    for name, text in (
        *_predicted(plan),
        *(() if done else _reference(prepared)),
        ("to the end", f"{duration(left * plan.step_s)}: {left:,}{of} steps"),
        *_limits(plan, explanation),
        *(() if (memory := prepared.process_memory) is None else (("memory", memory.text),)),
        ("checkpoint", brief(plan.checkpoint_bytes)),
        ("planned in", seconds(prepared.plan_seconds)),
    ):
        table.add_row(name, text)
    shown: list[RenderableType] = [f"{prepared.what} on {ranks}{machine.name}: it fits", table]
    if isinstance(plan, DevicePlan) and explanation is not None:
        shown.append(residence_table(explanation.residence, plan.schedule.caps))
    return Group(*shown)


def _contents(prepared: Prepared) -> str:
    """How many documents of the data, or pairs, a step has about."""
    each = float(prepared.data.lengths().mean()) * prepared.recipe.loss.sides
    return f"about {prepared.tokens_per_step / each:,.0f} {prepared.data.unit}"


def _kept_by(prepared: Prepared) -> str:
    """The flags that another plan needs to pack the same documents into each step, if any."""
    work, options = prepared.plan.workload, prepared.options
    chosen = {"chunk_tokens": work.chunk_tokens, "chunks_per_round": work.chunks_per_round}
    open_ones = [name for name in chosen if getattr(options, name) is None]
    told = {"tokens_per_step": prepared.tokens_per_step} | chosen
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in told.items())
    return flags if open_ones else ""


def _reference(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """The loss, and what it does before the first step."""
    text, reference_s = prepared.recipe.loss.text, prepared.reference_s
    if text is not None:
        yield "loss", text
    if reference_s is not None:
        yield "reference", f"{duration(reference_s)} once, before the first step: forward passes"


def _predicted(plan: Plan) -> Iterator[tuple[str, str]]:
    """How fast, and of several ranks in which layout and why."""
    speed = f"{rate_text(plan.tokens_per_s)} tokens/s, {seconds(plan.step_s)} a step"
    if isinstance(plan, RanksPlan):
        yield "layout", f"{plan.choice.chosen}, {plan.choice.why}"
        for other in plan.choice.others:
            yield "", f"not {other}"
        yield "predicted", speed
        yield "assumed", plan.choice.assumed
    elif isinstance(plan, DevicePlan):
        dtype = plan.schedule.model["dtype"]
        yield "predicted", f"{speed} ({uncertainty_of(plan.machine, plan.schedule).short})"
        yield "MFU", f"{plan.summary().mfu:.1%} of the {dtype} peak"


def _limits(plan: Plan, explanation: Explanation | None) -> Iterator[tuple[str, str]]:
    """What limits one device, or what each of several ranks takes."""
    if explanation is not None:
        yield "limited by", ", ".join(map(readable, explanation.limits)) or "-"
    if isinstance(plan, RanksPlan):
        for name, device_bytes, host_bytes in _arenas(plan):
            yield name, f"{brief(device_bytes)} device, {brief(host_bytes)} host a rank"


def trained_screen(result: TrainResult, curve: str, lines: list[str]) -> list[RenderableType]:
    """The curve of the loss, predicted beside measured, and what is where."""
    shown: list[RenderableType] = [curve]
    predicted, measured = result.predicted, result.measured
    if measured is None:
        shown.append(_speeds_line(result))
    else:
        shown.append(headline_table(predicted, measured, (*SPEEDS, *SHARES)))
    return [*shown, *([result.disturbed] if result.disturbed else []), *lines]


def _speeds_line(result: TrainResult) -> str:
    """Predicted beside measured."""
    line = f"predicted {rate_text(result.predicted_tokens_per_s)} tokens/s"
    measured = result.measured_tokens_per_s
    if measured is None:
        return line
    ratio = measured / result.predicted_tokens_per_s - 1.0
    return f"{line}, measured {rate_text(measured)} ({ratio:+.0%}; median of steps)"


def predicted_json(prepared: Prepared) -> dict[str, object]:
    """What is predicted, for programs."""
    plan, found = prepared.plan, prepared.summary.model_dump()
    if isinstance(plan, RanksPlan):
        memory = {name: {"device": d, "host": h} for name, d, h in _arenas(plan)}
        found |= {
            "layout": plan.layout,
            "candidates": [str(one) for one in plan.candidates],
            "memory_bytes": memory,
        }
    process = prepared.process_memory
    return found | {
        "process_bytes": None if process is None else process.total_bytes,
        "num_steps": prepared.num_steps,
        "tokens_per_step": prepared.tokens_per_step,
        "epoch_tokens": prepared.data.epoch_tokens,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "reference_seconds": prepared.reference_s,
        "options": prepared.options,
    }


def _arenas(plan: RanksPlan) -> list[tuple[str, int, int]]:
    """By stage, the arenas of a rank."""
    schedules = plan.schedule.schedules
    return [(name, arena_bytes(s, DEVICE), arena_bytes(s, HOST)) for name, s in schedules.items()]
