"""Calibration and validation on tables of machines that do not exist.

    python -m tests.bench.synthetic_machines [a100 rtx5090 b200_like] [-o FOLDER]

Each table is predicted by a hidden profile, 20 to 30 % off the profile that the calibration starts
from, with 1 % noise. 14 cells by the default rule calibrate, all other schedules test.
"""

import argparse
import csv
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from twinstream.fidelity.cells import cell_of, key_of
from twinstream.fidelity.predict import predict_cell
from twinstream.fidelity.row_choice import chosen_cells
from twinstream.fidelity.table_fit import fit_table
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.policies.ml_dataflow_sizing import SizingRefused

NOISE = 0.01
MOST_ROWS = 44
SEED = 20261121


@dataclass(frozen=True)
class Synthetic:
    """A hidden machine: a shipped profile with some of its values multiplied."""

    machine: str  # a name of a class that the seed system's policy knows
    base: str
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    device_gib: tuple[float, ...]
    host_gib: tuple[float, ...]
    factors: Mapping[str, float]  # on numbers, and on `max` of efficiencies that begin so


_EFFICIENCIES = {"sustained": 0.78, "attention_forward": 1.25, "attention_backward": 0.8}
_LINKS = {"h2d": 0.8, "d2h": 0.75}
_MEMORY = {"vector": 0.8, "rms_norm": 0.7, "swiglu": 0.8, "cross_entropy": 0.75, "adamw": 0.75}
SYNTHETIC = {
    "a100": Synthetic(
        "A100", "a100", ("8B", "15B"), (512, 4096, 16384, 32768, 65536),
        (24, 32, 48, 78), (70, 100, 160, 250), _EFFICIENCIES | _LINKS | _MEMORY,
    ),
    "rtx5090": Synthetic(
        "RTX5090", "rtx5090", ("1B", "8B"), (1024, 4096, 16384, 65536), (16, 20, 24, 31),
        (20, 64, 80, 128), _EFFICIENCIES | _LINKS | {"launch_latency_ns": 2.0},
    ),
    "b200_like": Synthetic(
        "H100", "h100", ("8B", "32B"), (2048, 8192, 32768, 65536), (40, 60, 78),
        (100, 250, 300, 450),
        _EFFICIENCIES | _MEMORY | {"peak_bf16_flop_per_s": 2.25, "hbm_bytes_per_s": 2.3,
        "pcie_h2d_bytes_per_s": 1.25, "pcie_d2h_bytes_per_s": 1.25},
    ),
}  # fmt: skip
# What the calibration is told of the hidden machine: its datasheet, without efficiencies.
_TOLD = ("peak_bf16_flop_per_s", "hbm_bytes_per_s", "pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s")


def changed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The profile with these numbers and efficiencies multiplied."""
    numbers = {
        name: machine.number(name) * f for name, f in factors.items() if hasattr(machine, name)
    }
    curves = dict(machine.efficiency)
    for key, curve in machine.efficiency.items():
        factor = factors.get(key, factors.get(key.split("/")[0]))
        if factor is not None:
            curves[key] = curve.model_copy(update={"max": min(1.5, curve.max * factor)})
    return override(machine.model_copy(update={"efficiency": curves}), numbers)


def rows_of(which: Synthetic, hidden: Machine) -> Iterator[tuple[MeasuredRow, float]]:
    """Rows with noisy speeds, and how much each stalls."""
    chance = random.Random(SEED)
    plans: dict[object, MeasuredRow] = {}
    for line, row in enumerate(_configurations(which), 2):
        try:
            plans.setdefault(key_of(row), row.model_copy(update={"line": line}))
        except SizingRefused:
            continue
    rows = list(plans.values())
    for row in chance.sample(rows, min(MOST_ROWS, len(rows))):
        found = predict_cell(cell_of(row), hidden)
        noisy = found.tokens_per_s * (1.0 + NOISE * chance.gauss(0.0, 1.0))
        yield row.model_copy(update={"tokens_per_s": noisy}), found.stall


def _configurations(which: Synthetic) -> Iterator[MeasuredRow]:
    for model in which.models:
        for seq_len in which.lengths:
            for device in which.device_gib:
                for host in which.host_gib:
                    yield MeasuredRow(
                        line=1, machine=which.machine, model=model, seq_len=seq_len,
                        host_mem_gib=host, dev_mem_gib=device, tokens_per_s=1.0, status="ok",
                        columns={},
                    )  # fmt: skip


def run(name: str, folder: Path | None) -> str:
    """One machine's line of the table."""
    which = SYNTHETIC[name]
    base = load_machine(which.base)
    hidden = changed(base, which.factors)
    told = {n: f for n, f in which.factors.items() if n in _TOLD}
    start = changed(base, told) if told else base
    table = list(rows_of(which, hidden))
    rows = [row for row, _ in table]
    if folder is not None:
        _write(rows, folder / f"{name}.csv")
    cells = chosen_cells(rows, None)
    seen = {key_of(row) for row in cells}
    test = [(row, stall) for row, stall in table if key_of(row) not in seen]
    fit = fit_table(start, cells)
    errors = {"before": _errors(test, start), "after": _errors(test, fit.machine(name, "test"))}
    stalled = [error for error, stall in errors["after"] if stall > 0.1]
    after = [error for error, _ in errors["after"]]
    left_out = fit.summary().left_out_mean_error
    return (
        f"| {name} | {', '.join(which.models)} | {len(cells)} | {len(test)} "
        f"| {fmean(error for error, _ in errors['before']):.1%} | {left_out:.2%} "
        f"| {fmean(after):.2%} | {max(after):.2%} "
        f"| {fmean(stalled) if stalled else 0.0:.2%} ({len(stalled)}) |"
    )


def _errors(test: list[tuple[MeasuredRow, float]], machine: Machine) -> list[tuple[float, float]]:
    found = []
    for row, stall in test:
        assert row.tokens_per_s is not None
        predicted = predict_cell(cell_of(row), machine).tokens_per_s
        found.append((abs(predicted / row.tokens_per_s - 1.0), stall))
    return found


def _write(rows: list[MeasuredRow], path: Path) -> None:
    names = ("machine", "model", "seq_len", "host_mem_gib", "dev_mem_gib", "tokens_per_s")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(SYNTHETIC))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    print("| machine | models | cells | test | before | left out | mean | worst | stalled |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.names:
        print(run(name, given.output), flush=True)


if __name__ == "__main__":
    main()
