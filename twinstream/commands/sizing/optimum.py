"""`optimum`: the size, tokens and layout that are best for GPUs and days, FLOPs or money."""

from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import Json
from twinstream.commands.arguments.outputs import check_output
from twinstream.commands.output import print_json, print_report, progress
from twinstream.schedule.files import write_text
from twinstream.study.optimum.optimum import OptimumQuestion, find_optimum


@grouped()
def optimum(
    asked: OptimumQuestion,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page here.", callback=check_output)
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which size, how many tokens and which layout are best for GPUs and days, FLOPs or money.

    At the utilisation that is predicted for each size, by a published scaling law.
    """
    from twinstream.study.optimum.screen import optimum_html, optimum_screen

    with progress("predicting sizes", quiet=as_json) as stage:
        found = find_optimum(asked, on_run=stage.doing)
    if html is not None:
        write_text(optimum_html(found), html)
    if as_json:
        print_json(found)
        return
    print_report(optimum_screen(found))
    if html is not None:
        print_report(f"Wrote {html}.")
