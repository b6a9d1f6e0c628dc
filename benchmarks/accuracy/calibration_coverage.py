"""Calibration on known consumer machines: errors on other rows, and whether widths hold.

    python -m benchmarks.accuracy.calibration_coverage [--truths 20] [--seed 0]

A desktop machine (rtx5090: PCIe 5 x16, 83 GB/s of host DRAM, so that both directions together
exceed it) is drawn around the shipped profile, with host DRAM at 0.88 and DMA writes that cost
1.3 of a read on every second one; its runs have 1.5 % of noise between sweeps and 0.2 % within, and
long sequences are 3 % slower on every third, as no parameter can say. Each is calibrated from the
shipped profile on the rows that `calibrate` chooses.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from unittest import mock

from benchmarks.accuracy.synthetic_machines import SYNTHETIC, configurations
from twinstream.fidelity.rows import candidate_rows
from twinstream.fidelity.seed_system.cells import cell_of, key_of
from twinstream.fidelity.seed_system.sizing import SizingRefused
from twinstream.fidelity.table_fit import fit_table, informative_rows
from twinstream.hardware_profiles.calibration.fitting import Fit
from twinstream.hardware_profiles.calibration.parameters import applied, prepared
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.measured_table import MeasuredRow
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.ops import Copy, Op
from twinstream.simulator.costs import MachineCosts, OpCost
from twinstream.simulator.flows import Flow

BETWEEN, WITHIN = 0.015, 0.002
LONG, LONG_SLOWER = 65536, 0.03
HOST_DRAM, WRITE_COST = 0.88, 1.3
# Standard deviations of the logarithms of what is drawn.
SPREAD = {
    "sustained": 0.15, "attention_forward": 0.25, "attention_backward": 0.25, "vector": 0.1,
    "h2d": 0.08, "d2h": 0.08, "duplex": 0.08,
}  # fmt: skip


# No truth lies beyond the bounds of the fit.
MOST = {"sustained": 1.15, "attention_forward": 1.2, "attention_backward": 1.2}


@dataclass(frozen=True)
class Truth:
    """A machine, and what it does that no profile can say."""

    machine: Machine
    write_cost: float
    long_slower: float


class WritesCostMore(MachineCosts):
    """DMA writes use more of the host DRAM than their bytes."""

    write_cost = 1.0

    def cost(self, op: Op) -> OpCost:
        found = super().cost(op)
        if not isinstance(op, Copy) or found.flow is None:
            return found
        if not any(name == "d2h" for name, _ in found.flow.amounts):
            return found
        amounts = tuple(
            (name, amount * self.write_cost if name == "host_dram" else amount)
            for name, amount in found.flow.amounts
        )
        return OpCost(found.fixed_ns, Flow(found.flow.alone_ns, amounts))


def drawn_truth(number: int, drawn: random.Random) -> Truth:
    base = prepared(load_machine("rtx5090"))
    factors = {key: math.exp(drawn.gauss(0.0, width)) for key, width in SPREAD.items()}
    factors["host_dram"] = HOST_DRAM / base.efficiency["host_dram"].max
    curves = dict(base.efficiency)
    for key, factor in factors.items():
        for name in [one for one in curves if one.split("/")[0] == key]:
            value = min(MOST.get(key, 1.0), curves[name].max * factor)
            curves[name] = curves[name].model_copy(update={"max": value})
    machine = base.model_copy(update={"name": f"truth {number}", "efficiency": curves})
    return Truth(
        machine=machine,
        write_cost=WRITE_COST if number % 2 else 1.0,
        long_slower=LONG_SLOWER if number % 3 == 2 else 0.0,
    )


def table() -> list[MeasuredRow]:
    """Distinct schedules of a desktop machine, without speeds."""
    rows: dict[object, MeasuredRow] = {}
    for line, row in enumerate(configurations(SYNTHETIC["rtx5090"]), 2):
        try:
            rows.setdefault(key_of(row), row.model_copy(update={"line": line}))
        except SizingRefused:
            continue
    return list(rows.values())


def measured(
    rows: Sequence[MeasuredRow], truth: Truth, drawn: random.Random
) -> tuple[list[MeasuredRow], list[float]]:
    """The rows with the truth's speeds and noise, and the speeds without noise."""
    pace: dict[tuple[str, int], float] = {}
    found, exact = [], []
    costs = type("Costs", (WritesCostMore,), {"write_cost": truth.write_cost})
    with mock.patch("twinstream.fidelity.seed_system.cells.MachineCosts", costs):
        for row in rows:
            cell = cell_of(row)
            seconds = cell.step_s(truth.machine)
            seconds *= 1.0 + (truth.long_slower if row.seq_len >= LONG else 0.0)
            sweep = pace.setdefault((row.model, row.seq_len), drawn.gauss(0.0, BETWEEN))
            exact.append(cell.tokens_per_step / seconds)
            speed = exact[-1] * math.exp(sweep + drawn.gauss(0.0, WITHIN))
            found.append(row.model_copy(update={"tokens_per_s": speed}))
    return found, exact


def true_factor(fit: Fit, name: str, truth: Truth) -> float:
    (found,) = [p for p in fit.parameters if p.parameter.name == name]
    return found.parameter.value_in(truth.machine) / found.prior_value


def run(number: int, rows: list[MeasuredRow], chosen: set[int], seed: int) -> str:
    """One machine's line of the table."""
    drawn = random.Random(1000 * seed + number)
    truth = drawn_truth(number, drawn)
    noisy, _ = measured(rows, truth, drawn)
    fit = fit_table(load_machine("rtx5090"), [row for row in noisy if row.line in chosen])
    machine = applied(
        fit.base, [p.parameter for p in fit.parameters], [p.factor for p in fit.parameters], "fit"
    )
    errors = []
    for row in noisy:
        if row.line not in chosen:
            cell = cell_of(row)
            assert row.tokens_per_s is not None
            predicted = cell.tokens_per_step / cell.step_s(machine)
            errors.append(abs(predicted / row.tokens_per_s - 1.0))
    offs = {
        p.parameter.name: abs(math.log(p.factor / true_factor(fit, p.parameter.name, truth)))
        / p.posterior_width
        for p in fit.parameters
    }
    dram = next(p for p in fit.parameters if p.parameter.name == "host_dram")
    inside = [sum(off <= k for off in offs.values()) / len(offs) for k in (1, 2)]
    worst = max(offs, key=lambda name: offs[name])
    return (
        f"| {number} | {truth.write_cost:g} | {truth.long_slower:.0%} "
        f"| {fit.summary().left_out_mean_error:.2%} | {fmean(errors):.2%} | {max(errors):.2%} "
        f"| {dram.value:.2f} +/- {dram.posterior_width:.0%} "
        f"| {inside[0]:.0%} | {inside[1]:.0%} | {worst} {offs[worst]:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--truths", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = table()
    chosen = {r.line for r in informative_rows(load_machine("rtx5090"), candidate_rows(rows))}
    print(f"{len(chosen)} of {len(rows)} rows calibrate, chosen by predictions alone\n")
    print("| machine | write cost | long slower | left out | mean | worst | host_dram (0.88) "
          "| within 1 width | 2 | furthest, widths |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for number in range(given.truths):
        print(run(number, rows, chosen, given.seed), flush=True)


if __name__ == "__main__":
    main()
