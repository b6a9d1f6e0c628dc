"""`python -m benchmarks.gpu.report.publish`: a campaign's page among the benchmarks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.campaign import campaign_of
from benchmarks.gpu.jobs.results import Results
from benchmarks.gpu.jobs.store import CampaignError, read_results
from benchmarks.gpu.report.page import markdown_of
from benchmarks.gpu.report.table import table_of
from twinstream.schedule.files import write_bytes, write_document, write_text

_KEPT = {
    "results.json": ".json",
    "profile.toml": ".toml",
    "timelines.json.gz": "-timelines.json.gz",
}


def write_tables(results: Results, folder: Path) -> None:
    """table.md and table.json beside the results."""
    table = table_of(results, campaign_of(results.size, backend=results.where.backend))
    write_text(markdown_of(results, table), folder / "table.md")
    write_document(table, folder / "table.json")


def publish(campaign: Path, benchmarks: Path) -> list[Path]:
    """Write DEVICE.md, .json (results), .toml (profile), timelines into a folder; what was written.

    Raises:
        DocumentError: there are no results, or they are damaged.
        CampaignError: there is no such folder to write into.
    """
    results = read_results(campaign)
    if not benchmarks.is_dir():
        raise CampaignError(f"{benchmarks} is no folder; give the one for pages, docs/benchmarks")
    name = re.sub(r"[^a-z0-9]+", "-", results.where.device.lower()).strip("-")
    table = table_of(results, campaign_of(results.size, backend=results.where.backend))
    written = [benchmarks / f"{name}.md"]
    write_text(markdown_of(results, table), written[0])
    for kept, ending in _KEPT.items():
        if (source := campaign / kept).exists():
            written.append(benchmarks / f"{name}{ending}")
            write_bytes(source.read_bytes(), written[-1])
    return written


def _command(
    campaign: Annotated[Path, typer.Argument(help="A campaign's --out.")],
    benchmarks: Annotated[Path, typer.Argument(help="Where pages go.")] = Path("docs/benchmarks"),
) -> None:
    """Write the campaign's page, figures and profile among the benchmarks, named by the device."""
    for path in publish(campaign, benchmarks):
        print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(_command, arguments)


if __name__ == "__main__":
    main()
