"""`run`: train by a schedule, here."""

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
)
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import read_as, require_sound
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.arguments.tokens import token_stream
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan_screens import describe
from twinstream.commands.runs.run_ranks import HowToRun, run_of_ranks
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.models.providers.model import model_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.run_settings import RunSettings
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_document
from twinstream.screens.run_report import losses_line, prediction_json, provenance_lines, run_table
from twinstream.trusted_code import require_trusted


class RunOptionsError(TwinstreamError):
    """The options do not go together, or not with what is run."""


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
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A folder on a drive for what the schedule has at home there: a file that is gone "
            "when the run is.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the Python files that the schedule names.",
        ),
    ] = False

    @property
    def settings(self) -> RunSettings:
        if self.timed_steps is not None and self.timed_steps > self.steps:
            raise RunOptionsError(
                f"--timed-steps {self.timed_steps} of --steps {self.steps}: time fewer"
            )
        return RunSettings(
            backend_named(self.backend), self.steps, self.learning_rate, self.seed, self.poison,
            graphs=self.graphs, timed_steps=self.timed_steps, nvtx=self.nvtx, keeps_state=False,
            trusts_code=self.trust_remote_code, disk=self.disk,
        )  # fmt: skip


@grouped()
def run(  # noqa: PLR0913
    schedule: options.ScheduleFile,
    how: RunOptions,
    machine: options.MachineIfKnown = None,
    cluster: options.ClusterIfKnown = None,
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
    output: Annotated[Path | None, output_option("Write the measured timeline here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Train by SCHEDULE, which `plan -o` writes, verbatim.

    Of a cluster's schedule each rank is a process, or one of torchrun's.
    """
    settings, document = how.settings, read_as(Schedule, schedule)
    if not document.is_one_device:
        tokens = token_stream(text, tokenizer)
        on_ranks = HowToRun(settings, cluster, tokens, output, as_json)
        run_of_ranks(schedule, document, on_ranks)
        return
    if cluster is not None:
        raise RunOptionsError(f"--cluster is of several ranks: {schedule} is of one device")
    require_sound(document)
    recipe, model = Recipe.model_validate(document.recipe), model_of(document.only.model)
    require_trusted(str(schedule), model, recipe, trusts=settings.trusts_code)
    tokens = token_stream(text, tokenizer)
    peak = peak_machine(document.only, machine, settings.backend)
    predicted = _predicted(document, peak, quiet=as_json)
    result = _trained(document, settings, tokens, quiet=as_json)
    try:
        if output is not None:
            write_document(result.timeline, output)
    finally:  # what was trained is told, on a full disk too
        _report(_Outcome(document, result, peak, predicted), as_json=as_json)


@dataclass(frozen=True)
class _Outcome:
    schedule: Schedule
    run: api.Run
    peak: Machine | None
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
    summary = summarize(schedule, timeline, peak or UNKNOWN_PEAK)
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
