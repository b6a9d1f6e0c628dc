"""`python -m benchmarks.gpu`: all work for a lent GPU in one command."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.device.worker import DeviceWorker, where_is
from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.campaign import STAGES, STAGES_OF, Size, campaign_of
from benchmarks.gpu.jobs.store import Store, only_campaign
from benchmarks.gpu.report.publish import write_tables
from benchmarks.gpu.run.budget import Budget
from benchmarks.gpu.run.engine import Engine
from benchmarks.gpu.run.settings import AUTO, Settings
from twinstream.commands.arguments.backends import backend_named
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.schedule.sizes import parse_bytes

# Wait nodes, graphs, a streaming plan with the bits of the resident one.
_SMOKE = tuple(
    f"tests/executor/test_cuda.py::test_{name}"
    for name in (
        "a_wait_in_a_graph_takes_the_record_made_before_the_graph_was_launched",
        "graphs_have_the_bits_of_ops_enqueued_one_by_one",
        "streaming_has_the_bits_of_resident",
        "after_a_refused_capture_the_device_goes_on",
    )
)
# Whose shapes are probed, the cells': 15b has the layers of 8b.
_PRESETS: dict[Size, tuple[str, ...]] = {"full": ("8b", "1b"), "short": ("8b",), "tiny": ("tiny",)}
_TESTS = (
    "tests/executor/test_cuda.py",
    "tests/executor/test_cuda_training.py",
    "tests/traced/test_cuda.py",
    "tests/executor/test_cuda_whole.py",
    "tests/executor/kernels",
    "tests/executor",
    "tests/traced",
)
# In the order of what they tell: the same bits, resumed and capped; then what has never been there.
_TELLING = (
    "tests/executor/test_cuda.py",
    "tests/executor/test_cuda_training.py",
    "tests/executor/test_cuda_whole.py",
    "tests/traced/test_cuda.py",
    "tests/executor/kernels/test_triton_model.py",
    "tests/executor/test_triton_run.py",
    "tests/executor/test_quantized_base_cuda.py",
    "tests/executor/kernels/test_head_dpo.py",
)
_SMOKE_S, _TELLING_S = 30.0, 300.0
_FIRST_TESTS: dict[Size, tuple[str, ...]] = {"full": _SMOKE, "short": _TELLING, "tiny": _SMOKE}
_LAST_S = 8.0  # kept for the tables and for ending the device's process

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class SizeName(StrEnum):
    """`short` is for a lease of 15 minutes, `full` for longer ones; `tiny` tries every stage in two
    minutes or so, as does `short` on a CPU."""

    full = "full"
    short = "short"
    tiny = "tiny"


class VectorName(StrEnum):
    """Vector kernels; `auto` are Triton's on CUDA, where they are right."""

    auto = "auto"
    eager = "eager"
    triton = "triton"


class StageName(StrEnum):
    """A part of the campaign."""

    facts = "facts"
    check = "check"
    smoke = "smoke"
    probe = "probe"
    train = "train"
    cells = "cells"
    peers = "peers"
    tests = "tests"


@app.command()
def run(  # noqa: PLR0913
    out: Annotated[Path, typer.Option(help="Folder of results; a second call goes on there.")],
    backend: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    size: Annotated[SizeName, typer.Option(help="Which models and cells.")] = SizeName.full,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time of this call.")] = 8.5,
    stage: Annotated[
        list[StageName] | None, typer.Option(help="Only these stages; may be given again.")
    ] = None,
    host_mem: Annotated[str, typer.Option(help="Cap of pinned host memory of cells.")] = "100GiB",
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that plan; by default half the cores, at most 4."),
    ] = None,
    tests: Annotated[
        list[str] | None,
        typer.Option(
            help="Where tests are, for pytest; by default the executor's, after some first."
        ),
    ] = None,
    vector: Annotated[VectorName, typer.Option(help="Vector kernels.")] = VectorName.auto,
    attention: Annotated[str, typer.Option(help="auto, or a registered name.")] = "auto",
    again: Annotated[
        list[str] | None, typer.Option(help="Forget outcomes whose job has this in its name.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells and peers with this in their name.")
    ] = None,
    commit: Annotated[str, typer.Option(help="Commit that is measured, for the record.")] = "",
    anew: Annotated[
        bool, typer.Option("--anew", help="Set aside results of another device or size.")
    ] = False,
) -> None:
    """Do the jobs that are not done yet, in order of value, and write what they find."""
    if attention != AUTO:
        attention_limits(attention)
    wanted = [one.value for one in stage] if stage else STAGES_OF[size.value]
    settings = Settings(
        backend="cuda" if backend_named(backend) == "cuda" else "cpu",
        size=size.value,
        stages=tuple(s for s in STAGES if s in wanted),
        host_bytes=None,
        num_jobs=_default_jobs() if jobs is None else jobs,
        tests=tuple(tests or _TESTS),
        vector=vector.value,
        attention=attention,
        only=tuple(only or ()),
        smoke=() if tests else _FIRST_TESTS[size.value],
        smoke_s=_TELLING_S if size is SizeName.short else _SMOKE_S,
    )
    settings = replace(
        settings,
        host_bytes=None if settings.is_tiny else parse_bytes(host_mem),
        presets=("tiny",) if settings.is_tiny else _PRESETS[size.value],
    )
    _run(settings, Budget(60.0 * minutes - _LAST_S), _Folder(out, tuple(again or ()), commit, anew))


@dataclass(frozen=True)
class _Folder:
    """Where results are, which of them are to be found again, the commit they are of, and whether
    what is there of another device is set aside."""

    out: Path
    again: tuple[str, ...]
    commit: str
    begins_anew: bool


def _run(settings: Settings, budget: Budget, folder: _Folder) -> None:
    out = folder.out
    with (
        only_campaign(out),
        DeviceWorker(settings.backend) as worker,
        DeviceWorker(settings.backend) as peer_worker,
    ):
        where = where_is(worker, settings.backend, _command(), folder.commit)
        store = _opened(
            Store(out, where, settings.size, begins_anew=folder.begins_anew), folder.again
        )
        plan = campaign_of(settings.size, settings.host_bytes, settings.backend)
        engine = Engine(settings, plan, store, worker, budget, _tell, peer_worker)
        try:
            engine.run()
        finally:
            write_tables(store.results, out)
    print((out / "table.md").read_text(encoding="utf-8"))
    if engine.waiting:
        _tell(
            f"{len(engine.waiting)} job(s) wait, for time or for what is said above: call it again "
            "with the same --out"
        )


def _opened(store: Store, again: Sequence[str]) -> Store:
    """Without the outcomes to be found again; says what was damaged or set aside."""
    for warning in store.warnings:
        _tell(warning)
    for text in again:
        store.forget(text)
    return store


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])


def _default_jobs() -> int:
    """Each takes some GiB, beside the pinned arena."""
    return max(1, min(4, (os.cpu_count() or 2) // 2))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(app, arguments)


if __name__ == "__main__":
    main()
