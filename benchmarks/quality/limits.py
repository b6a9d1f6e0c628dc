"""What every number of `SearchLimits` is worth: plans with other values, of the same few cells.

python -m benchmarks.quality.limits [--out FILE.csv] [--cells N] [--only TEXT] [--jobs 2]

A row per limit, other value and cell, with the time of the step and the seconds of planning, is
appended as it comes; what the file has already is not run again. At the end the table is printed,
of as many rows as there are. Cells are short steps, tight ones and some of the matrix, in an order
drawn once, so that the first N are of all kinds.
"""

import argparse
import csv
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context  # noqa: TID251 - sends functions of this script
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.quality.matrix_cells import GIB, cells
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.limits import LIMITS, SearchLimits
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import Caps
from twinstream.simulator.replay import steady_state

COLUMNS = ("limit", "other", "cell", "step_s", "plan_seconds")
DEFAULT = "-"
_SEED = 32
# model, sequence length, tokens a step, device and host cap in GiB
_SHORT = [
    *(("h100", "8b", 2048, tokens, device, 256) for tokens in (4096, 8192) for device in (12, 24)),
    ("rtx5090", "1b", 2048, 8192, 6, 256),
    ("rtx3090", "8b", 2048, 4096, 12, 128),
    ("h100", "15b", 8192, 16384, 12, 256),
]
_TIGHT = [
    ("h100", "8b", 8192, 4 * 8192, 9, 100),
    ("a100", "8b", 2048, 16 * 2048, 9, 64),
    ("rtx3090", "1b", 8192, 8 * 8192, 4, 16),
]
_LONG = [("h100", "8b", 131072, 131072, 24, 256), ("rtx5090", "1b", 131072, 131072, 16, 64)]


@dataclass(frozen=True)
class Step:
    """A training step that is planned again and again."""

    machine: str
    model: str
    seq_len: int
    tokens_per_step: int
    device_gib: int
    host_gib: int

    def __str__(self) -> str:
        rest = f"{self.tokens_per_step} in {self.seq_len} {self.device_gib}+{self.host_gib}"
        return f"{self.machine} {self.model} {rest}"


def steps() -> list[Step]:
    """Short, tight and long ones, and a few cells of the matrix that take little to plan."""
    cheap = [c for c in cells() if c.model in ("1b", "8b") and 2048 <= c.seq_len <= 32768]
    some = random.Random(_SEED).sample(cheap, 4)
    found = [Step(*one) for one in (*_SHORT, *_TIGHT, *_LONG)]
    found += [
        Step(c.machine, c.model, c.seq_len, c.tokens_per_step, c.device_gib, c.host_gib)
        for c in some
    ]
    random.Random(_SEED).shuffle(found)
    return found


def others(value: float | tuple[float, ...]) -> list[float | tuple[float, ...]]:
    """Other values of a limit: half and twice as much; of several, fewer.

    Of a factor near 1 half and twice its distance from it; of a share no more than all.
    """
    if isinstance(value, tuple):
        return [value[: len(value) // 2], ()]
    if isinstance(value, int):
        return list(dict.fromkeys((max(1, value // 2), 2 * value)))
    if 0.9 < value < 1.3:
        return [round(1 + (value - 1) * times, 6) for times in (0.5, 2.0)]
    return [value / 2, value * 2 if value >= 1 else min(value * 2, (1 + value) / 2)]


def changed() -> Iterator[tuple[str, str, SearchLimits]]:
    """The limits as they are, then with each changed: its name and its other value."""
    yield DEFAULT, DEFAULT, LIMITS
    for limit in fields(LIMITS):
        for other in others(getattr(LIMITS, limit.name)):
            change: dict[str, Any] = {limit.name: other}
            yield limit.name, str(other), replace(LIMITS, **change)


def planned(limit: str, other: str, limits: SearchLimits, step: Step) -> dict[str, object]:
    """A row; without a step time where nothing is found."""
    machine = load_machine(step.machine)
    caps = Caps(
        device_bytes=step.device_gib * GIB,
        host_bytes=step.host_gib * GIB,
        device_reserve_bytes=round(machine.number("device_reserve_bytes")),
    )
    recipe = Recipe(kernels=KernelChoice())
    training = TrainingStep(step.seq_len, step.tokens_per_step, recipe=recipe)
    request = PlanRequest(load_preset(step.model), training, machine, caps)
    begun = time.perf_counter()
    try:
        schedule = Planner(steady_state, limits).plan(request, name_caps=False)
    except InfeasiblePlan:
        step_s = ""
    else:
        step_s = f"{steady_state(schedule.only, machine).step_ns / 1e9:.9g}"
    seconds = f"{time.perf_counter() - begun:.2f}"
    values = (limit, other, str(step), step_s, seconds)
    return dict(zip(COLUMNS, values, strict=True))


def run(path: Path, some: list[Step], jobs: int) -> None:
    """Append what the file lacks."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    done = {(row["limit"], row["other"], row["cell"]) for row in read(path)}
    todo = [
        (limit, other, limits, step)
        for limit, other, limits in changed()
        for step in some
        if (limit, other, str(step)) not in done
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, future in enumerate(as_completed([pool.submit(planned, *o) for o in todo]), 1):
            row = future.result()
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
            print(f"{number}/{len(todo)} {', '.join(map(str, row.values()))}", flush=True)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: what each other value changes, over the cells that were planned with both."""
    default = {row["cell"]: row for row in rows if row["limit"] == DEFAULT and row["step_s"]}
    lines = [
        "| limit | value | other | cells | step, mean | worst cell | planning |",
        "|---|---|---|---|---|---|---|",
    ]
    for limit, other, _ in changed():
        mine = [
            row
            for row in rows
            if (row["limit"], row["other"]) == (limit, other) and row["cell"] in default
        ]
        if limit == DEFAULT or not mine:
            continue
        lost = sum(not row["step_s"] for row in mine)
        both = [(row, default[row["cell"]]) for row in mine if row["step_s"]]
        if not both:
            continue
        ratios = {r["cell"]: float(r["step_s"]) / float(d["step_s"]) - 1 for r, d in both}
        worst = max(ratios, key=ratios.__getitem__)
        seconds, before = (sum(float(p[i]["plan_seconds"]) for p in both) for i in range(2))
        told = f"{len(both)}" + (f", {lost} lost" if lost else "")
        lines.append(
            f"| {limit} | {getattr(LIMITS, limit)} | {other} | {told} | "
            f"{mean(ratios.values()):+.2%} | {ratios[worst]:+.2%} ({worst}) | "
            f"{seconds / before - 1:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.limits")
    parser.add_argument("--out", type=Path, default=Path("limits.csv"), help="append to this file")
    parser.add_argument("--cells", type=int, default=8, help="so many steps, from the first")
    parser.add_argument("--only", default="", metavar="TEXT", help="steps with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    given = parser.parse_args()
    some = [step for step in steps() if given.only in str(step)]
    run(given.out, some[: given.cells], given.jobs)
    print("\n" + table(read(given.out)))


if __name__ == "__main__":
    main()
