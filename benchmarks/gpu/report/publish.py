"""`python -m benchmarks.gpu.report.publish`: a campaign's page and tables among the benchmarks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.campaign import campaign_of
from benchmarks.gpu.jobs.results import Results
from benchmarks.gpu.jobs.store import CampaignError, read_results
from benchmarks.gpu.report.figures import cells_csv, jobs_csv
from benchmarks.gpu.report.page import markdown_of
from benchmarks.gpu.report.summary import summary_of
from benchmarks.gpu.report.table import table_of
from twinstream.schedule.files import write_bytes, write_document, write_text

# What is kept of a campaign as it is: by its name there, how it ends here, and what it holds.
_KEPT = {
    "results.json": (".json", "results as they came, every reading of clock and power"),
    "profile.toml": (".toml", "the profile as probed, for `--machine`"),
    "timelines.json.gz": ("-timelines.json.gz", "when each op of a cell's short pass ran"),
}
_JOBS = "a row a figure: machine, tests, samples of the probe, times by kind of op, peers, reasons"


def write_tables(results: Results, folder: Path) -> None:
    """table.md and table.json beside the results."""
    table = table_of(results, campaign_of(results.size, backend=results.where.backend))
    write_text(markdown_of(results, table), folder / "table.md")
    write_document(table, folder / "table.json")


def publish(campaign: Path, benchmarks: Path) -> list[Path]:
    """Write DEVICE.md, half a page, and the figures beside it into a folder; what was written.

    These are DEVICE-cells.csv, DEVICE-jobs.csv, and results, profile and timelines as they are.

    Raises:
        DocumentError: there are no results, or they are damaged.
        CampaignError: there is no such folder to write into.
    """
    results = read_results(campaign)
    if not benchmarks.is_dir():
        raise CampaignError(f"{benchmarks} is no folder; give the one for pages, docs/benchmarks")
    name = re.sub(r"[^a-z0-9]+", "-", results.where.device.lower()).strip("-")
    table = table_of(results, campaign_of(results.size, backend=results.where.backend))
    files = {f"{name}-cells.csv": "a row a cell", f"{name}-jobs.csv": _JOBS}
    write_text(cells_csv(table), benchmarks / f"{name}-cells.csv")
    write_text(jobs_csv(results, table), benchmarks / f"{name}-jobs.csv")
    for kept, (ending, told) in _KEPT.items():
        if (source := campaign / kept).exists():
            files[f"{name}{ending}"] = told
            write_bytes(source.read_bytes(), benchmarks / f"{name}{ending}")
    write_text(summary_of(results, table, files), benchmarks / f"{name}.md")
    return [benchmarks / file for file in (f"{name}.md", *files)]


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
