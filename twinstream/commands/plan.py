"""`plan`: decide where every tensor lives, and predict what that yields."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import checked_schedule
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan_screens import generation_screen, tell
from twinstream.models.layouts.layout import LayoutError
from twinstream.options.option_group import MEMORY, WHERE
from twinstream.options.plan_options import ClusterOptions, PlanOptions, TaskOptions
from twinstream.planner.generation import TextGeneration
from twinstream.planner.warm_start import WarmStartError
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.files import write_document
from twinstream.study.answer import Answer
from twinstream.study.generating import generations
from twinstream.study.query import Query
from twinstream.study.questions import asked_by, notes_of

Ranks = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Plan a pipeline (--pp) and replicas of it (--dp) that so many processes run "
        "(`run`); caps are of one of them, tokens per step of all.",
        rich_help_panel=WHERE,
    ),
]


_OF_TRAINING = (
    *("--seq-len", "--tokens-per-step", "--chunks-per-round", "--optimizer-overhead", "--loss"),
    *("--freeze", "--clips", "--optimizer", "--optim", "--gradients", "--optimizer-state"),
)


@grouped("model")
def plan(  # noqa: PLR0913
    wanted: PlanOptions,
    task: TaskOptions,
    asked: ClusterOptions,
    charged: RunOptions,
    warm_start: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A schedule of the same step, for less memory or a slower machine, that is the "
            "answer where nothing faster is found: without it more memory may give a slower plan, "
            "by at most the gap that is printed. May be given again.",
            rich_help_panel=MEMORY,
            hidden=True,
        ),
    ] = None,
    ranks: Ranks = None,
    output: Annotated[Path | None, output_option("Write the schedule here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training step within memory caps and predict its speed.

    On one device of a --machine or --cluster, or on --gpus N of them: with --cluster all layouts
    are searched, with --machine (or --ranks N) those that twinstream runs. With --task inference
    it is generating text that is planned.
    """
    if (generation := task.generation()) is not None:
        _plan_generation(generation, wanted, asked, output, as_json=as_json)
        return
    if wanted.seq_len is None:
        raise ArgumentError("--seq-len is missing: tokens of a sequence")
    query = asked_by(wanted, asked, ranks)
    charged.require_possible()
    charged = charged.on(wanted.machine, asked.cluster)
    if warm_start and query.kind != "device":
        raise LayoutError("--warm-start is of one device; leave it out")
    known = {path: checked_schedule(path) for path in warm_start or []}
    answer, seconds = answered(query, known, quiet=as_json)
    try:
        if output is not None:
            write_document(answer.schedule, output)
    finally:  # what was planned is told, on a full disk too
        known_plan = next((str(path) for path, one in known.items() if answer.is_plan(one)), None)
        tell(answer, seconds, known_plan, (charged, notes_of(wanted)), as_json=as_json)
    if output is not None and not as_json:
        which = "" if answer.searched is None else " of the first"
        run = f"; run it: twinstream run {output}" if answer.candidates else "."
        print_report(f"Wrote the schedule{which} to {output}{run}")


def _plan_generation(
    generation: TextGeneration, wanted: PlanOptions, asked: ClusterOptions, output: Path | None, *,
    as_json: bool,
) -> None:  # fmt: skip
    """Plan generating text.

    Raises:
        ArgumentError: an option is of training.
    """
    beside = [flag for flag in wanted.given() if flag in _OF_TRAINING]
    beside += ["--output"] if output is not None else []
    if beside:
        raise ArgumentError(f"{', '.join(beside)} is of a training step, not of --task inference")
    start_s = time.perf_counter()
    with progress(f"planning {wanted.model}", quiet=as_json):
        found, *others = generations(generation, wanted, asked)
    seconds = time.perf_counter() - start_s
    if as_json:
        told: dict[str, Any] = {"uncertainty": found.uncertainty, "plan_seconds": seconds}
        if others:
            told["others"] = [one.figures for one in others]
        print_json(found.figures | told)
        return
    print_report(*generation_screen(found, others, seconds))


def answered(query: Query, known: Mapping[Path, Schedule], *, quiet: bool) -> tuple[Answer, float]:
    """The answer to a query, and the seconds it took to plan.

    Args:
        known: schedules of one device's step, by their files.

    Raises:
        WarmStartError: one of these is of another step; it names the file.
        TwinstreamError: nothing fits, or the query contradicts itself.
    """
    start_s = time.perf_counter()
    try:
        with progress(f"planning {query.subject.title}", quiet=quiet) as stage:
            plans = list(known.values())
            answer = query.begun_from(plans) if plans else query.answer(progress=stage.doing)
    except WarmStartError as error:
        path = next(path for path, plan in known.items() if plan.only is error.plan)
        raise WarmStartError(error.plan, f"--warm-start {path}", error.why) from None
    return answer, time.perf_counter() - start_s
