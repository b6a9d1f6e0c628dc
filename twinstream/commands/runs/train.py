"""`train`: a model on data, with checkpoints; what it will do is told first."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from twinstream.api import require_torch
from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import let_typer_see, options_of
from twinstream.commands.arguments.outputs import check_folder
from twinstream.commands.output import print_json, print_report, screen
from twinstream.commands.runs.train_screen import predicted_json, train_screen, trained_screen
from twinstream.executor.memory.host_limits import process_bytes
from twinstream.executor.ranks.torchrun import StartedRank
from twinstream.log.metrics import (
    CheckpointMetrics,
    EvalMetrics,
    StepMetrics,
    events_of_kind,
    read_metrics,
)
from twinstream.log.run_files import OPTIONS, RunFiles
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import brief
from twinstream.screens.live import LiveLine, loss_curve
from twinstream.training.callbacks import Callback
from twinstream.training.options import ALIASES, LAYOUT, TrainOptions, read_options
from twinstream.training.planning import START_S
from twinstream.training.preparing import Prepared
from twinstream.training.ranks.planning import on_all_gpus
from twinstream.training.run.run_folder import RunEndedError, TrainResult
from twinstream.training.trainer import Trainer

_OF_SIGNAL = 128


class TrainArgumentsError(TwinstreamError):
    """The command line does not say what to train."""


def train(**given: Any) -> None:
    """Train MODEL on DATA; what it will do is told first. `train run.toml` has all in a file.

    MODEL is a Hugging Face folder, a config.json (random weights) or a preset; DATA are files or
    folders, .txt, .jsonl, .parquet, .csv or .bin, each with a weight if wanted: chat.jsonl=2.
    """
    inputs, resume, dry_run = given.pop("inputs"), given.pop("resume"), given.pop("dry_run")
    as_json, output = given.pop("as_json"), given.pop("output")
    flags = {name: value for name, value in given.items() if value not in (None, [], ())}
    if (me := StartedRank.here()) is not None:
        if me.rank:
            _work_for_rank_0(me, waits=not dry_run)
            return
        flags |= {"ranks": me.size, "hosts": me.hosts}
    if {"steps", "epochs"} <= flags.keys():
        raise TrainArgumentsError("--steps and --epochs both say how long to train: leave one out")
    unnamed = Path(f"dry-run-{os.getpid()}") if dry_run and not resume else None
    wanted = _options(inputs or [], output, flags, resume=resume, unnamed=unnamed)
    looking = _Looking(quiet=as_json)
    require_torch()
    wanted = on_all_gpus(wanted, looking.tell)
    trainer = Trainer(wanted, resume=resume, callbacks=[looking], tell=looking.tell)
    prepared = trainer.prepare(weights=not dry_run)
    if not as_json:
        print_report(train_screen(prepared, trainer.steps_done), *prepared.notes)
    if dry_run:
        if as_json:
            print_json(predicted_json(prepared))
        return
    failure: RunEndedError | None = None
    with looking:
        try:
            result = trainer.train()
        except RunEndedError as ended:
            result, failure = ended.result, ended
    _report(result, prepared, as_json=as_json)
    if failure is not None:
        raise failure
    if result.signal:
        raise typer.Exit(_OF_SIGNAL + result.signal)


def _work_for_rank_0(me: StartedRank, *, waits: bool) -> None:
    """Be a rank of the training that the process of rank 0 plans, feeds and writes."""
    require_torch()
    from twinstream.executor.launch.hosts import work_for_trainer
    from twinstream.executor.ranks.world import Patience

    if waits:
        work_for_trainer(me, Patience(start_s=START_S))


def _options(
    inputs: list[str], output: Path | None, flags: dict[str, Any], *, resume: bool,
    unnamed: Path | None,
) -> TrainOptions:  # fmt: skip
    """From a file, the command line and, of a run that goes on, its folder.

    Args:
        unnamed: the folder where none is given, if none has to be.
    """
    base: dict[str, Any] = {}
    where = ""
    if inputs and inputs[0].endswith(".toml"):
        if len(inputs) > 1:
            raise TrainArgumentsError(
                f"{inputs[0]} says what to train, and '{inputs[1]}' beside it does, too: give one"
            )
        base, where = read_options(Path(inputs[0])), f"{inputs[0]}: "
    elif inputs:
        base = {"model": inputs[0]} | ({"data": inputs[1:]} if inputs[1:] else {})
    if output is not None:
        base["output"] = output
    path = Path(base.get("output", "")) / OPTIONS
    if resume and "output" in base and os.path.exists(path):  # noqa: PTH110 - false of too long a name
        before = read_options(path)
        before.pop("hosts", None)  # those of now
        if "ranks" in flags:  # the layout was chosen for those before
            before = {name: value for name, value in before.items() if name not in LAYOUT}
        base, where = before | base, f"{path}: "
    base = {ALIASES.get(name, name): value for name, value in base.items()} | flags
    for name, other in (("batch_size", "tokens_per_step"), ("tokens_per_step", "batch_size")):
        if name in flags and other not in flags:  # the command line is above the file
            base.pop(other, None)
    if unnamed is not None:
        base.setdefault("output", unnamed)
    if resume and "output" in base and "model" not in base:
        raise TrainArgumentsError(
            f"{base['output']} has no run to go on with ({OPTIONS} is missing): leave out --resume"
        )
    for name, told in (("model", "MODEL"), ("data", "DATA"), ("output", "-o DIR")):
        if name not in base:
            raise TrainArgumentsError(
                f"{told} is missing: twinstream train MODEL DATA... -o DIR, or a file "
                "`twinstream train run.toml`, or `twinstream train -o DIR --resume`"
            )
    return TrainOptions.of(base, where)


class _Looking(Callback):
    """The live line, and notes above it."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._line: LiveLine | None = None

    def __enter__(self) -> "_Looking":
        return self

    def __exit__(self, *errors: object) -> None:
        if self._line is not None:
            self._line.__exit__(*errors)

    def tell(self, line: str) -> None:
        if self._line is not None:
            self._line.note(line)
        elif not self._quiet:
            typer.echo(line, err=True)

    def on_start(self, prepared: Prepared) -> None:
        if not self._quiet:
            self._line = LiveLine(prepared.num_steps, console=screen()).__enter__()

    def on_step(self, metrics: StepMetrics) -> None:
        if self._line is not None:
            self._line(metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        if self._line is not None:
            self._line.note(
                f"evaluated after step {metrics.step:,}: {metrics.text}, {metrics.tokens:,} tokens "
                f"in {metrics.seconds:.1f} s"
            )

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        if self._line is not None:
            rate = metrics.bytes / 1e6 / max(1e-9, metrics.seconds)
            self._line.note(
                f"{metrics.path}: {metrics.bytes / 1e6:,.1f} MB in {metrics.seconds:.1f} s, "
                f"{rate:,.0f} MB/s; the device waited {metrics.device_held_s:.1f} s"
            )


def _report(result: TrainResult, prepared: Prepared, *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    folder = result.folder
    log = RunFiles(folder).metrics  # which is gone where someone has removed the folder
    steps = events_of_kind(read_metrics(log), StepMetrics) if log.exists() else []
    lines = [f"fill {result.fill:.1%}; steps waited {result.waited_s:.2f} s for data"]
    if (memory := prepared.process_memory) is not None:
        lines.append(
            f"the process took {brief(process_bytes()[1])} of the host's memory at its peak, "
            f"{brief(memory.total_bytes)} were predicted"
        )
    if result.skipped:
        lines.append(f"{len(result.skipped):,} rows were skipped; the first: {result.skipped[0]}")
    if result.stopped:
        lines.append(
            f"Stopped after step {result.step:,}; to go on: twinstream train -o {folder} --resume"
        )
    else:
        lines.append(_where(result.model, prepared))
    lines.append(f"To see the run: twinstream report {folder}")
    curve = loss_curve([(step.step, step.loss) for step in steps])
    print_report(*trained_screen(result, curve, lines))


def _where(model: Path | None, prepared: Prepared) -> str:
    """What to do with what was trained."""
    if model is not None and (config := model / "adapter_config.json").exists():
        told = f"The adapter is in {model}; {prepared.model.in_peft}"
        if json.loads(config.read_text("utf-8")).get("base_model_name_or_path") is None:
            return f"{told}, beside the random base of this run, which no folder holds."
        return f"{told}, and `twinstream export {model} -o DIR --merge` adds it to its base."
    if model is not None and not (model / "config.json").exists():
        return f"The weights are in {model}, under the names of your module's state_dict."
    return f"The model is in {model}; transformers loads it as it is."


def _flags() -> Iterator[tuple[str, Any, Any]]:
    """A flag for each option, by all its names."""
    for name, default, hint in options_of(TrainOptions):
        kind, option = get_args(hint)
        option.param_decls += tuple(f"--{alias}" for alias, of in ALIASES.items() if of == name)
        yield name, default, Annotated[kind, option]


_INPUTS = Annotated[list[str] | None, typer.Argument(metavar="MODEL DATA...", show_default=False)]
_OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="The folder of the run.",
                 callback=check_folder),
]  # fmt: skip
_RESUME = Annotated[bool, typer.Option("--resume", help="Go on from DIR's last checkpoint.")]
let_typer_see(
    train,
    {
        "inputs": (_INPUTS, None), "output": (_OUTPUT, None), "resume": (_RESUME, False),
        "dry_run": (options.DryRun, False), "as_json": (options.Json, False),
    },
    _flags(),
)  # fmt: skip
