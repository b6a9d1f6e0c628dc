"""`probe`: measure this machine."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.backends import backend_named
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.loader import save_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import probed_table

if TYPE_CHECKING:
    from twinstream.executor.probe.drive import DriveReads


class Dtype(StrEnum):
    """What kernels are timed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class DtypeError(TwinstreamError):
    """A dtype, and a device that is not measured in it."""


def probe(
    output: Annotated[Path | None, output_option("Write the profile here, as TOML.")] = None,
    backend: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu or cuda.")] = (
        "auto"
    ),
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(help="A dtype in which a CPU is measured beside float32."),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Measure reads of this folder's drive, too, as a run with --disk reads it: of the "
            "largest file in it, or one of 256 MiB that is written and removed; or of this file.",
            exists=True,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine, for which runs are then predicted well.

    A CPU takes seconds, and so does a drive. A CUDA device takes some minutes, under load; its
    profile names the attention that is right and fastest on it, and is of the dtypes that models
    are trained in.
    """
    if backend_named(backend) == "cuda":
        machine = _probed_cuda(dtype)
    else:
        dtypes = list(dict.fromkeys(["float32", *(d.value for d in dtype or [])]))
        with progress(f"measuring this machine in {', '.join(dtypes)}", quiet=as_json):
            machine = api.probe(dtypes)
    reads = None
    if disk is not None:
        from twinstream.executor.probe.drive import probed_drive

        with progress(f"measuring reads of {disk}", quiet=as_json):
            reads = probed_drive(disk)
        machine = reads.on(machine)
    try:
        if output is not None:
            save_machine(machine, output)
    finally:  # what was measured is told, on a full disk too
        if as_json:
            print_json(machine)
        else:
            print_report(probed_table(machine), *([] if reads is None else [_drive_lines(reads)]))
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --machine {output}.")


def _drive_lines(reads: "DriveReads") -> str:
    """What reads of a drive take, by size."""
    sizes = ", ".join(
        f"{size / ns:.2f} GB/s of {gib(size)}" for size, ns in sorted(reads.times_ns.items())
    )
    written = reads.written_bytes_per_s
    told = "" if written is None else f"; a file of its own was written at {written / 1e9:.2f} GB/s"
    return f"Reads of {reads.place}: {sizes}{told}."


def _probed_cuda(dtype: list[Dtype] | None) -> Machine:
    if dtype:
        raise DtypeError("a CUDA device is measured in bfloat16: leave out --dtype")
    from twinstream.executor.probe.device import probed_machine

    return probed_machine(lambda line: print(line, file=sys.stderr, flush=True))
