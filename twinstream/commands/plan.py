"""`plan`: decide where every tensor lives, and predict what that yields."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.cluster_options import ClusterOptions
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import checked_schedule
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.commands.arguments.queries import charged_at, query_of
from twinstream.commands.arguments.requests import notes_of
from twinstream.commands.output import print_report, progress
from twinstream.commands.plan_screens import (
    tell_device,
    tell_layouts,
    tell_ranks,
)
from twinstream.models.parallel.layout import LayoutError
from twinstream.options.option_group import MEMORY, WHERE
from twinstream.planner.warm_start import WarmStartError
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.study.layouts import ChoiceOfLayouts
from twinstream.study.many_gpus import LaidOutStep
from twinstream.study.one_device import DeviceQuery
from twinstream.study.planned_step import PlannedStep
from twinstream.study.query import Answer, Query
from twinstream.study.several_ranks import RanksStep

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


@grouped("model", "seq_len")
def plan(  # noqa: PLR0913
    wanted: PlanOptions,
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
    are searched, with --machine (or --ranks N) those that twinstream runs.
    """
    query = query_of(wanted, asked, ranks)
    charged.require_possible()
    charged = charged_at(charged, wanted, asked)
    if warm_start and not isinstance(query, DeviceQuery):
        raise LayoutError("--warm-start is of one device; leave it out")
    known = {path: checked_schedule(path) for path in warm_start or []}
    answer, seconds = answered(query, known, quiet=as_json)
    try:
        if output is not None:
            write_document(_document(answer), output)
    finally:  # what was planned is told, on a full disk too
        _tell(answer, seconds, known, (charged, notes_of(wanted)), as_json=as_json)
    if output is not None and not as_json:
        print_report(f"Wrote the schedule{_which(answer)} to {output}{_run(answer, output)}")


def answered(query: Query, known: Mapping[Path, Schedule], *, quiet: bool) -> tuple[Answer, float]:
    """The answer to a query, and the seconds it took to plan.

    Args:
        known: schedules of one device's step, by their files.

    Raises:
        WarmStartError: one of these is of another step; it names the file.
        TwinstreamError: nothing fits, or the query contradicts itself.
    """
    start_s = time.perf_counter()
    if not isinstance(query, DeviceQuery):
        told = f"planning {query.subject.title}"
        with progress(told, quiet=quiet) as stage:
            answer: Answer
            if isinstance(query, ChoiceOfLayouts):
                answer = query.fastest(stage.doing)
            else:
                answer = query.answer()
        return answer, time.perf_counter() - start_s
    try:
        told = f"planning {query.request.spec.name} for {query.request.machine.name}"
        with progress(told, quiet=quiet):
            schedule = query.planned(list(known.values()))
    except WarmStartError as error:
        path = next(path for path, plan in known.items() if plan.only is error.plan)
        raise WarmStartError(error.plan, f"--warm-start {path}", error.why) from None
    seconds = time.perf_counter() - start_s
    with progress("simulating", quiet=quiet):
        is_known = any(schedule.ops is plan.ops for plan in known.values())
        return PlannedStep.predicted(schedule, query.request, is_known=is_known), seconds


def _document(answer: Answer) -> Schedule:
    if isinstance(answer, LaidOutStep):
        return answer.document()
    assert isinstance(answer, PlannedStep | RanksStep)
    return answer.schedule


def _tell(
    answer: Answer,
    seconds: float,
    known: Mapping[Path, Schedule],
    about: tuple[RunOptions, Sequence[str]],
    *,
    as_json: bool,
) -> None:
    if isinstance(answer, LaidOutStep):
        tell_layouts(answer, seconds, about[0], as_json=as_json)
    elif isinstance(answer, RanksStep):
        tell_ranks(answer, seconds, about[0], as_json=as_json)
    else:
        assert isinstance(answer, PlannedStep)
        ops = answer.schedule.ops
        taken = next((str(path) for path, plan in known.items() if plan.ops is ops), None)
        tell_device(answer, seconds, taken, about, as_json=as_json)


def _which(answer: Answer) -> str:
    return " of the first" if isinstance(answer, LaidOutStep) else ""


def _run(answer: Answer, output: Path) -> str:
    return f"; run it: twinstream run {output}" if isinstance(answer, RanksStep) else "."
