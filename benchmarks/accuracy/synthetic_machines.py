"""Calibration and validation on tables of machines that do not exist.

    python -m benchmarks.accuracy.synthetic_machines [a100 rtx5090 b200_like narrow_link]
        [--sweeps SIGMA] [-o FOLDER]

Each table is predicted by a hidden profile, 20 to 30 % off the profile that the calibration starts
from (`narrow_link`: up to three times), with 1 % noise. 14 cells by the default rule calibrate, all
other schedules test. The hidden machine obeys the same model, so this tests the fit, not the model.
`--sweeps 0.015` makes each model and length faster or slower as a whole besides, as recorded sweeps
are and no model can know.
"""

import argparse
import csv
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from twinstream.fidelity.rows import candidate_rows
from twinstream.fidelity.seed_system.cells import cell_of, key_of
from twinstream.fidelity.seed_system.sizing import SizingRefused
from twinstream.fidelity.table_fit import fit_table, informative_rows
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine

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
    # on numbers, and on efficiencies that begin so: their `max`, or what follows a dot
    factors: Mapping[str, float]


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
    # 12 GB/s each way, 18 both ways, 17 by host DRAM. No fit varies `half` of matmuls.
    "narrow_link": Synthetic(
        "A100", "a100", ("15B", "32B"), (2048, 16384, 65536), (40, 60, 78), (130, 200, 300, 450),
        _MEMORY | {"sustained": 1.15, "attention_forward": 0.7, "attention_backward": 0.7,
        "matmul.half_depth": 3.0, "matmul.half": 3.0, "launch_latency_ns": 3.0,
        "pcie_h2d_bytes_per_s": 0.5, "pcie_d2h_bytes_per_s": 0.5, "pcie_duplex_bytes_per_s": 0.5,
        "h2d": 0.915, "d2h": 0.915, "duplex": 0.7, "host_dram_bytes_per_s": 0.213,
        "host_dram": 0.5},
    ),
}  # fmt: skip
# What the calibration is told of the hidden machine: its datasheet, without efficiencies.
_TOLD = (
    "peak_bf16_flop_per_s", "hbm_bytes_per_s", "pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s",
    "pcie_duplex_bytes_per_s", "host_dram_bytes_per_s",
)  # fmt: skip


def changed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The profile with these numbers and efficiencies multiplied."""
    numbers = {
        name: machine.number(name) * f for name, f in factors.items() if hasattr(machine, name)
    }
    curves = dict(machine.efficiency)
    for key, curve in machine.efficiency.items():
        names, unit = {"max": "", "half": ".half", "half_depth": ".half_depth"}, key.split("/")[0]
        update = {
            field: getattr(curve, field) * factors.get(key + end, factors.get(unit + end, 1.0))
            for field, end in names.items()
        }
        curves[key] = curve.model_copy(update={**update, "max": min(1.5, update["max"])})
    return override(machine.model_copy(update={"efficiency": curves}), numbers)


def rows_of(
    which: Synthetic, hidden: Machine, sweeps: float
) -> Iterator[tuple[MeasuredRow, float]]:
    """Rows with noisy speeds, and how much each stalls."""
    chance = random.Random(SEED)
    paces = random.Random(SEED)
    pace = {
        (model, seq_len): 1.0 + sweeps * paces.gauss(0.0, 1.0)
        for model in which.models
        for seq_len in which.lengths
    }
    plans: dict[object, MeasuredRow] = {}
    for line, row in enumerate(configurations(which), 2):
        try:
            plans.setdefault(key_of(row), row.model_copy(update={"line": line}))
        except SizingRefused:
            continue
    rows = list(plans.values())
    for row in chance.sample(rows, min(MOST_ROWS, len(rows))):
        cell = cell_of(row)
        seconds = cell.step_s(hidden)
        noisy = cell.tokens_per_step / seconds * (1.0 + NOISE * chance.gauss(0.0, 1.0))
        noisy *= pace[row.model, row.seq_len]
        yield (
            row.model_copy(update={"tokens_per_s": noisy}),
            seconds / cell.free_link_step_s(hidden) - 1.0,
        )


def configurations(which: Synthetic) -> Iterator[MeasuredRow]:
    for model in which.models:
        for seq_len in which.lengths:
            for device in which.device_gib:
                for host in which.host_gib:
                    yield MeasuredRow(
                        line=1, machine=which.machine, model=model, seq_len=seq_len,
                        host_mem_gib=host, dev_mem_gib=device, tokens_per_s=1.0, status="ok",
                        columns={},
                    )  # fmt: skip


def run(name: str, folder: Path | None, sweeps: float) -> str:
    """One machine's line of the table."""
    which = SYNTHETIC[name]
    base = load_machine(which.base)
    hidden = changed(base, which.factors)
    told = {n: f for n, f in which.factors.items() if n in _TOLD}
    start = changed(base, told) if told else base
    table = list(rows_of(which, hidden, sweeps))
    rows = [row for row, _ in table]
    if folder is not None:
        _write(rows, folder / f"{name}.csv")
    cells = informative_rows(start, candidate_rows(rows))
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
        cell = cell_of(row)
        predicted = cell.tokens_per_step / cell.step_s(machine)
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
    parser.add_argument("--sweeps", type=float, default=0.0)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    print("| machine | models | cells | test | before | left out | mean | worst | stalled |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.names:
        print(run(name, given.output, given.sweeps), flush=True)


if __name__ == "__main__":
    main()
