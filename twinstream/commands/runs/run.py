"""`run`: train by a schedule, here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.backends import (
    UNKNOWN_PEAK,
    backend_named,
    peak_machine,
    planning_machine,
    with_kernels_of,
)
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import read_as, require_sound
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.tokens import token_stream
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan import answered
from twinstream.commands.plan_screens import describe
from twinstream.commands.runs.run_ranks import HowToRun, run_of_ranks, run_planned_ranks
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.models.model import model_of
from twinstream.models.recipe import Recipe
from twinstream.options.plan_options import PlanOptions
from twinstream.options.step_options import RankOptions
from twinstream.run_settings import RunSettings
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_document
from twinstream.screens.run_report import losses_line, prediction_json, provenance_lines, run_table
from twinstream.study.questions import asked_by, notes_of
from twinstream.trusted_code import require_trusted


class RunOptionsError(TwinstreamError):
    """The options do not say what to run, or say it twice."""


@dataclass(frozen=True)
class RunOptions:
    """The options that say how to run."""

    steps: options.Steps = 4
    backend: options.Backend = "auto"
    learning_rate: Annotated[
        float, typer.Option(min=0.0, max=1e3, metavar="X", help="Learning rate of AdamW.")
    ] = 1e-3
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, metavar="N", help="Seed of the initial weights."),
    ] = 0
    poison: Annotated[
        bool,
        typer.Option("--poison", help="Fill dead bytes with NaN, to expose a faulty schedule."),
    ] = False
    graphs: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="CUDA graphs for steps that are not timed op by op: auto (where they pay), on or "
            "off.",
        ),
    ] = "auto"
    timed_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="So many of the last steps have every op timed; by default 1 on CUDA, all on the "
            "CPU.",
        ),
    ] = None
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Name every op for NVIDIA's profilers (CUDA only).")
    ] = False
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Plan for so many processes (--pp, --dp) and run them; a cluster's schedule says "
            "itself how many it has.",
        ),
    ] = None

    @property
    def settings(self) -> RunSettings:
        if self.timed_steps is not None and self.timed_steps > self.steps:
            raise RunOptionsError(
                f"--timed-steps {self.timed_steps} of --steps {self.steps}: time fewer"
            )
        return RunSettings(
            backend_named(self.backend), self.steps, self.learning_rate, self.seed, self.poison,
            graphs=self.graphs, timed_steps=self.timed_steps, nvtx=self.nvtx, keeps_state=False,
        )  # fmt: skip


@grouped()
def run(  # noqa: PLR0913
    wanted: PlanOptions,
    how: RunOptions,
    layout: RankOptions,
    schedule: Annotated[
        Path | None, typer.Argument(metavar="SCHEDULE", help="A schedule's JSON.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to train on; by default Python's help topics."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A Hugging Face tokenizer.json; by default each byte is a token."
        ),
    ] = None,
    cluster: options.ClusterIfKnown = None,
    output: Annotated[Path | None, output_option("Write the measured timeline here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Train by SCHEDULE, verbatim; without one, plan first (--model and --seq-len).

    With --ranks, or a cluster's schedule, each rank is a process, or one of torchrun's.
    """
    settings = replace(how.settings, trusts_code=wanted.trust_remote_code)
    if schedule is not None:
        given = [flag for flag in wanted.given() if flag != "--trust-remote-code"]
        _refuse_to_plan(schedule, [*given, *layout.given()])
    document = None if schedule is None else read_as(Schedule, schedule)
    if (how.ranks or 1) > 1 if document is None else not document.is_one_device:
        tokens = token_stream(text, tokenizer)
        on_ranks = HowToRun(settings, cluster, tokens, output, as_json)
        if schedule is not None and document is not None:
            run_of_ranks(schedule, document, how.ranks, on_ranks)
        else:
            _plan_and_run_ranks(how, wanted, layout, on_ranks)
        return
    beside = ["--ranks"] if (how.ranks or 1) > 1 else []
    beside += [*layout.given(), *(["--cluster"] if cluster else [])]
    if beside:
        told = "add --ranks N" if schedule is None else f"{schedule} is of one device"
        raise RunOptionsError(f"{', '.join(beside)} is of several ranks: {told}")
    plan_seconds = None
    if document is None:
        document, plan_seconds = _planned(wanted, settings.backend, quiet=as_json)
    else:
        require_sound(document)
        recipe = Recipe.model_validate(document.recipe)
        spec = model_of(document.only.model)
        require_trusted(str(schedule), spec, recipe, trusts=settings.trusts_code)
    tokens = token_stream(text, tokenizer)
    peak = peak_machine(document.only, wanted.machine, settings.backend)
    predicted = _predicted(document, peak, quiet=as_json)
    result = _trained(document, settings, tokens, quiet=as_json)
    try:
        if output is not None:
            write_document(result.timeline, output)
    finally:  # what was trained is told, on a full disk too
        _report(_Outcome(document, result, peak, plan_seconds, predicted), as_json=as_json)
    if not as_json:
        print_report(*notes_of(wanted))


def _plan_and_run_ranks(
    how: RunOptions,
    wanted: PlanOptions,
    layout: RankOptions,
    on_ranks: HowToRun,
) -> None:
    """Run what is planned now for `how.ranks`."""
    _require_model(wanted)
    backend = on_ranks.settings.backend
    wanted = with_kernels_of(backend, wanted)
    if on_ranks.cluster is None:
        machine = planning_machine(wanted.machine, backend)
        wanted = wanted.model_copy(update={"machine": machine})
    assert how.ranks is not None
    run_planned_ranks(how.ranks, wanted, layout, on_ranks)


@dataclass(frozen=True)
class _Outcome:
    schedule: Schedule
    run: api.Run
    peak: Machine | None
    plan_seconds: float | None
    predicted: Summary | None

    @property
    def uncertainty(self) -> Uncertainty | None:
        return None if self.peak is None else uncertainty_of(self.peak, self.schedule)


def _predicted(schedule: Schedule, machine: Machine | None, *, quiet: bool) -> Summary | None:
    """What the run should come to by the profile of the machine here, where one is known."""
    if machine is None:
        return None
    with progress(f"predicting {schedule.only.model.name}", quiet=quiet):
        return summarize(schedule, api.simulate(schedule, machine), machine)


def _planned(wanted: PlanOptions, backend: str, *, quiet: bool) -> tuple[Schedule, float]:
    """Plan now, and say how long that took."""
    _require_model(wanted)
    machine = planning_machine(wanted.machine, backend)
    here = with_kernels_of(backend, wanted).model_copy(update={"machine": machine})
    answer, seconds = answered(asked_by(here), {}, quiet=quiet)
    return answer.schedule, seconds


def _require_model(wanted: PlanOptions) -> None:
    if wanted.model is None or wanted.seq_len is None:
        raise RunOptionsError("say what to run: a SCHEDULE, or --model and --seq-len to plan one")


def _refuse_to_plan(path: Path, given: Sequence[str]) -> None:
    """
    Raises:
        RunOptionsError: there is a schedule, and options of a plan beside it.
    """
    if given:
        raise RunOptionsError(
            f"{path} is planned already, {', '.join(given)} cannot change it; "
            "give either a SCHEDULE or what to plan"
        )


def _trained(
    schedule: Schedule, settings: RunSettings, tokens: NDArray[np.int32], *, quiet: bool
) -> api.Run:
    """The run; where it is stopped, stderr gets the losses so far."""
    losses: list[float] = []
    num_steps = settings.num_steps
    try:
        with progress(f"training {schedule.only.model.name}", num_steps, quiet=quiet) as stage:

            def on_loss(loss: float) -> None:
                losses.append(loss)
                stage()

            settings = replace(settings, on_loss=on_loss, on_pinned=stage.pinned)
            return api.execute(schedule, settings, tokens=tokens)
    except KeyboardInterrupt:
        told = f"stopped after {len(losses)} of {num_steps:,} steps; no timeline is written"
        typer.echo("\n".join([told, *([losses_line(losses)] if losses else [])]), err=True)
        raise


def _report(outcome: _Outcome, *, as_json: bool) -> None:
    schedule, timeline, peak = outcome.schedule, outcome.run.timeline, outcome.peak
    summary = summarize(schedule, timeline, peak or UNKNOWN_PEAK, outcome.plan_seconds)
    if as_json:
        unknown = {} if peak else {"mfu": None, "hfu": None}
        run = {
            "measured_on": timeline.provenance.where,
            "losses": outcome.run.losses,
            "provenance": timeline.provenance,
        } | prediction_json(outcome.predicted, summary, outcome.uncertainty)
        print_json(summary.model_dump() | unknown | describe(schedule) | run)
        return
    print_report(
        run_table(
            schedule, outcome.predicted, summary, peak.name if peak else None, outcome.uncertainty
        ),
        losses_line(outcome.run.losses),
        f"{timeline.provenance.description.capitalize()}, {timeline.provenance.detail}.",
        *provenance_lines(timeline.provenance),
    )
    if peak is None:
        print_report(
            f"It was planned for {schedule.machine.name}. For a prediction and MFU give the "
            "profile of the machine this ran on: --machine NAME|FILE."
        )
