"""Write the page of what 20 cards can do with 30 models.

python -m benchmarks.fit_page fit.html
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from twinstream import __version__
from twinstream.commands.arguments.outputs import check_output
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_text
from twinstream.study.fit.cells import FitCell
from twinstream.study.fit.chart import Chart, chart, chart_html

MODELS = (
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b",
    "qwen3-235b-a22b", "llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b",
    "llama2-7b", "llama2-13b", "llama2-70b", "mistral-7b", "mistral-nemo-12b", "mistral-small-24b",
    "mixtral-8x7b", "mixtral-8x22b", "phi-4", "phi-4-mini", "gemma-3-1b", "gemma-3-4b",
    "gemma-3-12b", "gemma-3-27b", "olmoe", "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip
CARDS = (
    "rtx4080_super", "rtx5070ti", "rtx5080", "rtx3090", "rtx4090", "rtx5090", "rtx_a6000",
    "rtx6000_ada", "rtx_pro_6000", "a10g", "l40s", "a100_40gb", "a100", "h100", "h200", "gh200",
    "b200", "mi300x", "gb10", "strix_halo",
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Write the page to the path that is given; progress goes to stderr.

    Models that are done lie beside it until it is written, and are not planned again.
    """
    path = Path(arguments[0] if arguments else "fit.html")
    try:
        check_output(path)
    except TwinstreamError as error:
        sys.exit(f"error: {error}")
    done = path.with_name(f"{path.name}.done.jsonl")
    rows = rows_in(done)
    num_cells = len(CARDS) * len(rows)

    def told(_: FitCell) -> None:
        nonlocal num_cells
        num_cells += 1
        sys.stderr.write(f"\r{num_cells} of {len(MODELS) * len(CARDS)} cells")

    for model in MODELS:
        if model not in rows:
            rows |= chart((model,), CARDS, num_jobs=os.cpu_count() or 1, on_cell=told).rows
            cells = [cell.model_dump_json() for cell in rows[model]]
            with done.open("a") as file:
                file.write(json.dumps({"made_by": __version__, "model": model, "cells": cells}))
                file.write("\n")
    write_text(chart_html(Chart(CARDS, {model: rows[model] for model in MODELS})), path)
    done.unlink(missing_ok=True)
    sys.stderr.write(f"\nwrote {path}, {path.stat().st_size:,} bytes\n")


def rows_in(done: Path) -> dict[str, tuple[FitCell, ...]]:
    """The models that a run of this version has finished; the last line may be cut off."""
    found = {}
    for line in done.read_text().splitlines() if done.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["made_by"] == __version__:
                found[row["model"]] = tuple(map(FitCell.model_validate_json, row["cells"]))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
