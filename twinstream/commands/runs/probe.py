"""`probe`: measure this machine."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.backends import backend_named
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.loader import save_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.errors import TwinstreamError
from twinstream.screens.tables import probed_table


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
    as_json: options.Json = False,
) -> None:
    """Measure this machine, for which runs are then predicted well.

    A CPU takes seconds. A CUDA device takes some minutes, under load; its profile names the
    attention that is right and fastest on it, and is of the dtypes that models are trained in.
    """
    if backend_named(backend) == "cuda":
        machine = _probed_cuda(dtype)
    else:
        dtypes = list(dict.fromkeys(["float32", *(d.value for d in dtype or [])]))
        with progress(f"measuring this machine in {', '.join(dtypes)}", quiet=as_json):
            machine = api.probe(dtypes)
    try:
        if output is not None:
            save_machine(machine, output)
    finally:  # what was measured is told, on a full disk too
        if as_json:
            print_json(machine)
        else:
            print_report(probed_table(machine))
    if output is not None and not as_json:
        print_report(f"Wrote the profile to {output}; use it as --machine {output}.")


def _probed_cuda(dtype: list[Dtype] | None) -> Machine:
    if dtype:
        raise DtypeError("a CUDA device is measured in bfloat16: leave out --dtype")
    from twinstream.executor.probe.device import probed_machine

    return probed_machine(lambda line: print(line, file=sys.stderr, flush=True))
