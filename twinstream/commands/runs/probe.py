"""`probe`: measure this machine."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstream import api
from twinstream.clusters.running.places import keep_links
from twinstream.clusters.shared_machine import cores_here, place_here
from twinstream.commands.arguments import options
from twinstream.commands.arguments.backends import backend_named
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress, told_at_the_end
from twinstream.fidelity.ranks_fit import curve_told
from twinstream.hardware_profiles.clusters.loader import save_with_node
from twinstream.hardware_profiles.loader import load_machine, save_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.model_probe import model_probe_table, num_shapes, probe_model
from twinstream.ranks_probe import probe_ranks
from twinstream.schedule.errors import ArgumentError, TwinstreamError
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import probed_table
from twinstream.tracing import find_model

if TYPE_CHECKING:
    from twinstream.executor.probe.drive import ProbedDrive
    from twinstream.executor.program.options import BackendName


class DriveError(TwinstreamError):
    """The drive that is to be measured is not there."""


class Dtype(StrEnum):
    """What kernels are timed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class DtypeError(TwinstreamError):
    """A dtype, and a device that is not measured in it."""


_MOST_RANKS_A_CORE = 16
Disk = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Measure this folder's drive, too, as a run with --disk uses it: reads of the "
        "largest file in it, writes of one of 256 MiB that is gone afterwards; or a file's "
        "reads.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A model that runs by its own code: its blocks are timed, and the profile is for it.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Measure the links of N ranks, too: every collective, by size. The profile is a "
        "cluster's; runs of N ranks here find it by themselves.",
    ),
]
Seconds = Annotated[
    float, typer.Option(min=0, metavar="S", help="With --ranks: that sizes may take together.")
]


def probe(  # noqa: PLR0913
    output: Annotated[Path | None, output_option("Write the profile here, as TOML.")] = None,
    backend: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu or cuda.")] = (
        "auto"
    ),
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(help="A dtype in which a CPU is measured beside float32."),
    ] = None,
    disk: Disk = None,
    model: ModelName = None,
    seq_len: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --model: tokens of its sequences.")
    ] = 512,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="With --model or --ranks: this machine's profile, not measured again.",
        ),
    ] = None,
    ranks: Ranks = None,
    seconds: Seconds = 20.0,
    as_json: options.Json = False,
) -> None:
    """Measure this machine, for which runs are then predicted well.

    A CPU takes seconds, and so does a drive. A CUDA device takes some minutes, under load; its
    profile names the attention that is right and fastest on it, and is of the dtypes that models
    are trained in.
    """
    if disk is not None and not disk.exists():
        raise DriveError(f"--disk {disk}: there is no such file or folder")
    if ranks is not None:
        if model is not None or disk is not None:
            raise ArgumentError(
                "--ranks goes without --model and --disk: give these to another probe"
            )
        device: BackendName = "cuda" if backend_named(backend) == "cuda" else "cpu"
        _require_links(ranks, device, output)
        base = load_machine(machine) if machine else _probed(backend, dtype, quiet=as_json)
        _probe_links(base, ranks, seconds, device, output, as_json=as_json)
        return
    if model is None:
        if machine is not None:
            raise ArgumentError(
                "--machine goes with --model or --ranks: without them this machine is measured"
            )
        found = _probed(backend, dtype, quiet=as_json)
        screen = probed_table(found)
    else:
        spec = find_model(model, longest=seq_len)
        base = load_machine(machine) if machine else _probed(backend, dtype, quiet=as_json)
        with progress(f"timing blocks of {spec.name}", num_shapes(), quiet=as_json) as step:
            own = probe_model(spec, base, seq_len, backend_named(backend), step)
        found, screen = own.machine, model_probe_table(own)
    drive = None
    if disk is not None:
        from twinstream.executor.probe.drive import probed_drive

        with progress(f"measuring the drive of {disk}", quiet=as_json):
            drive = probed_drive(disk)
        found = drive.on(found)
    try:
        if output is not None:
            save_machine(found, output)
    finally:  # what was measured is told, on a full disk too
        if as_json:
            print_json(found)
        else:
            print_report(screen, *([] if drive is None else [_drive_lines(drive)]))
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --machine {output}.")


def _require_links(num_ranks: int, backend: "BackendName", output: Path | None) -> None:
    """
    Raises:
        ArgumentError: the file's name is none of a profile, or there are too many ranks.
    """
    if output is not None and output.suffix != ".toml":
        raise ArgumentError(f"name the profile {output.stem}.toml: it names its node's file")
    most = _MOST_RANKS_A_CORE * cores_here()
    if backend == "cpu" and num_ranks > most:
        raise ArgumentError(
            f"--ranks {num_ranks:,}: this machine has {cores_here()} cores, on which up to {most} "
            "ranks are timed"
        )


def _probe_links(
    base: Machine, num_ranks: int, seconds: float, backend: "BackendName", output: Path | None,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Measure, tell, keep for runs of so many ranks, and write the cluster and its node's profile.

    Raises:
        TwinstreamError: as `probe_ranks`.
    """
    from twinstream.executor.launch.rank_processes import RankProcesses
    from twinstream.executor.ranks.gpus import require_gpus

    if backend == "cuda":
        require_gpus(num_ranks)
    machine = place_here(base, num_ranks, cores_here()).machine
    with (
        progress(f"measuring links of {num_ranks} ranks", quiet=as_json) as step,
        RankProcesses(num_ranks) as processes,
    ):
        found = probe_ranks(processes, machine, seconds, backend, step)
    found = found.model_copy(update={"name": output.stem if output else found.name})
    keep_links(found, machine)
    with told_at_the_end(
        lambda: found, as_json=as_json, screen=lambda: [found.description + ".",
        *map(curve_told, found.curves)],
    ):  # fmt: skip
        if output is not None:
            save_with_node(found, machine, output)
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --cluster {output}.")


def _drive_lines(drive: "ProbedDrive") -> str:
    """What reads and writes of a drive reach, by size."""

    def told(ns_by_size: dict[int, float]) -> str:
        sizes = sorted(ns_by_size.items())
        return ", ".join(f"{size / ns:.2f} GB/s of {gib(size)}" for size, ns in sizes)

    lines = f"Reads of {drive.place}: {told(drive.reads.times_ns)}."
    if drive.writes is None:
        return lines + " Writes: not measured, no file can be written there."
    return (
        f"{lines}\nWrites: {told(drive.writes.times_ns)}; both at once reach {drive.overlap:.2f} "
        "of what each does alone. A drive's cache is faster than what it sustains."
    )


def _probed(backend: str, dtype: list[Dtype] | None, *, quiet: bool) -> Machine:
    if backend_named(backend) == "cuda":
        return _probed_cuda(dtype)
    dtypes = list(dict.fromkeys(["float32", *(d.value for d in dtype or [])]))
    with progress(f"measuring this machine in {', '.join(dtypes)}", quiet=quiet):
        return api.probe(dtypes)


def _probed_cuda(dtype: list[Dtype] | None) -> Machine:
    if dtype:
        raise DtypeError("a CUDA device is measured in bfloat16: leave out --dtype")
    from twinstream.executor.probe.device import probed_machine

    return probed_machine(lambda line: print(line, file=sys.stderr, flush=True))
