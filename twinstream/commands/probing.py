"""`probe`: measure this machine."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from twinstream import api
from twinstream.commands import options
from twinstream.commands.output import print_json, print_report, progress
from twinstream.hardware_profiles.loader import save_machine
from twinstream.tables import probed_table


class Dtype(StrEnum):
    """What kernels are timed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def probe(
    output: Annotated[Path | None, options.output("Write the profile here, as TOML.")] = None,
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="May be given twice; by default float32.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine's CPU, for which `run --backend cpu` is then predicted well.

    A CUDA device, and which attention is right and fastest on it, is measured by
    `python -m twinstream.campaign --stage probe`.
    """
    dtypes = list(dict.fromkeys(d.value for d in dtype or [Dtype.float32]))
    with progress(f"measuring this machine in {', '.join(dtypes)}", quiet=as_json):
        machine = api.probe(dtypes)
    if output is not None:
        save_machine(machine, output)
    if as_json:
        print_json(machine)
    else:
        print_report(probed_table(machine))
        if output is not None:
            print_report(f"Wrote the profile to {output}; use it as --machine {output}.")
