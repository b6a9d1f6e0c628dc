"""`export`: an adapter as others load it, by itself or merged into its base."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.api import require_torch
from twinstream.commands.arguments.outputs import check_folder
from twinstream.commands.output import print_report, progress
from twinstream.models.hf.config import DTYPES
from twinstream.planner.choices import require_known


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A PEFT folder: adapter_config.json and weights.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="The folder to write, which is not there yet.",
            callback=check_folder,
        ),
    ],
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Add the adapter to its base, and write all as a Hugging Face folder."
        ),
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The base's Hugging Face folder; by default the adapter's own."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Dtype of what is merged: bfloat16 or float32; by default the base's.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Write the adapter in DIR to OUT: as PEFT loads it or, merged, as transformers does."""
    require_torch()
    require_known("--dtype", dtype, tuple(DTYPES))
    from twinstream.executor.weights.merging import export_adapter

    with progress(f"writing {output}"):
        said = export_adapter(
            folder, output, base, merge=merge, dtype=None if dtype is None else DTYPES[dtype]
        )
    print_report(f"Wrote {output}.")
    if said is not None:
        print_report(said)
