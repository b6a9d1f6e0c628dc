"""`python -m benchmarks.gpu.report.terms`: what a GPU's timelines say of terms that plans lack.

Two terms hide each other in the time of a step: a direction of the link is slower while the other
is busy, and a device at its power limit runs faster after it has waited. The rates are read off the
copies; the second is fitted to ops of all cells but one, and that one's step is predicted.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.results import Results
from benchmarks.gpu.report.like_with_like import measured_cells, plan_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy, Op
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.sizes import parse_bytes
from twinstream.schedule.timeline import Provenance
from twinstream.simulator.costs import MachineCosts, OpCost
from twinstream.simulator.flows import Flow
from twinstream.simulator.replay import replay

_LEAST_BYTES, _BESIDE = 16 * 2**20, 0.97  # a copy counts if the other way is busy for so much of it
_WINDOW_NS, _LEAST_NS = 70e6, 1e6
_REPLAYS = 4  # until idle shares and the times that follow from them agree

Array = npt.NDArray[np.float64]
CampaignFile = Annotated[Path, typer.Argument(help="results.json of a campaign.")]
TimelinesFile = Annotated[Path, typer.Argument(help="Its timelines, .json.gz.")]
PlannedOn = Annotated[Path, typer.Option(help="The profile that its plans were made with.")]
HostMem = Annotated[str, typer.Option(help="--host-mem of the campaign.")]


@dataclass(frozen=True)
class Ran:
    """A cell's plan, when its ops started and for how long they ran, and its step."""

    key: str
    schedule: RankSchedule
    starts_ns: Array
    durations_ns: Array
    step_s: float

    @property
    def computes(self) -> list[int]:
        """Positions of the ops on the compute stream."""
        return [at for at, op in enumerate(self.schedule.ops) if isinstance(op, Compute)]


def ran_cells(
    results: Results, timelines: Mapping[str, Any], planned_on: Machine, host_bytes: int
) -> list[Ran]:
    """All cells that were measured and whose plan still has as many ops."""
    found = []
    for cell, measured, recipe in measured_cells(results, host_bytes):
        work = plan_of(cell, recipe, planned_on).workload
        short = cell.shortened(work, measured.rounds_measured[-1])
        schedule, told = plan_of(short, recipe, planned_on), timelines[cell.key]["measured"]
        if len(told["starts_us"]) == len(schedule.ops):
            starts, took = (np.array(told[k]) * 1e3 for k in ("starts_us", "durations_us"))
            found.append(Ran(cell.key, schedule.only, starts, took, measured.short_steps_s[-1]))
    return found


def read_campaign(
    campaign: Path, timelines: Path, planned_on: Path, host_mem: str
) -> tuple[Results, list[Ran]]:
    """Results of a campaign, and its cells with their timelines."""
    results = Results.model_validate_json(campaign.read_text(encoding="utf-8"))
    told = json.loads(gzip.decompress(timelines.read_bytes()))
    return results, ran_cells(results, told, load_machine(planned_on), parse_bytes(host_mem))


def rates_at_once(cells: Sequence[Ran]) -> dict[str, float]:
    """Bytes per second of copies of each direction beside which the other is busy all the time."""
    moved = {"h2d": [0.0, 0.0], "d2h": [0.0, 0.0]}
    for ran in cells:
        access = AccessMap(ran.schedule.tensors, ran.schedule.slots)
        ops = ran.schedule.ops
        for way, other in (("h2d", "d2h"), ("d2h", "h2d")):
            beside = _busy(ran, [at for at, op in enumerate(ops) if op.stream.queue == other])
            for at, op in enumerate(ops):
                if op.stream.queue != way or not isinstance(op, Copy):
                    continue
                low, high = access.extent(op.tensor, op.num_parts)
                start, took = ran.starts_ns[at], ran.durations_ns[at]
                if high - low < _LEAST_BYTES or took <= 0:
                    continue
                if beside(start + took) - beside(start) >= _BESIDE * took:
                    moved[way][0] += high - low
                    moved[way][1] += took
    return {way: size / took * 1e9 for way, (size, took) in moved.items() if took}


def _busy(ran: Ran, positions: Sequence[int]) -> Any:
    """How long ops one after the other have run by a time, of this pass and the one before."""
    return busy_until(ran.starts_ns[positions], ran.durations_ns[positions], ran.step_s * 1e9)


def busy_until(starts: Array, durations: Array, step_ns: float) -> Any:
    """A function of the time; passes follow one another every `step_ns`.

    >>> busy = busy_until(np.array([0.0, 6.0]), np.array([2.0, 4.0]), 10.0)
    >>> [float(busy(t)) for t in (-3.0, 0.0, 1.0, 5.0, 10.0)]
    [3.0, 6.0, 7.0, 8.0, 12.0]
    """
    order = np.argsort(starts)
    begin = np.concatenate([starts[order] - step_ns, starts[order]])
    took = np.concatenate([durations[order], durations[order]])
    before = np.concatenate([[0.0], np.cumsum(took)])

    def until(time: Any) -> Any:
        last = np.maximum(np.searchsorted(begin, time, side="right") - 1, 0)
        return before[last] + np.clip(time - begin[last], 0.0, took[last])

    return until


def idle_shares(starts: Array, durations: Array, step_ns: float) -> Array:
    """Of the 70 ms before the middle of each op, the share in which none ran."""
    until, middle = busy_until(starts, durations, step_ns), starts + durations / 2
    busy: Array = (until(middle) - until(middle - _WINDOW_NS)) / _WINDOW_NS
    return np.clip(1 - busy, 0.0, 1.0)


def given_back(cells: Sequence[Ran], machine: Machine) -> float:
    """How much faster ops run for each share of idle time: least squares over their durations."""
    idle, ratio, weight = [], [], []
    for ran in cells:
        costs, at = MachineCosts(ran.schedule, machine), ran.computes
        shares = idle_shares(ran.starts_ns[at], ran.durations_ns[at], ran.step_s * 1e9)
        for share, position in zip(shares, at, strict=True):
            alone = _alone_ns(costs.cost(ran.schedule.ops[position]))
            if alone >= _LEAST_NS:
                idle.append(share)
                ratio.append(ran.durations_ns[position] / alone)
                weight.append(alone**0.5)
    design = np.stack([np.ones(len(idle)), -np.array(idle)], axis=1) * np.array(weight)[:, None]
    return float(np.linalg.lstsq(design, np.array(ratio) * np.array(weight), rcond=None)[0][1])


def _alone_ns(cost: OpCost) -> float:
    return cost.fixed_ns + (cost.flow.alone_ns if cost.flow else 0.0)


class _Clocked:
    """A machine's prices, with a factor for each op that computes."""

    def __init__(self, priced: MachineCosts, factors: Mapping[str, float]) -> None:
        self._priced, self._factors = priced, factors
        self.wait_ns, self.capacity = priced.wait_ns, priced.capacity
        self._known: dict[str, OpCost] = {}

    def cost(self, op: Op) -> OpCost:
        cost, factor = self._priced.cost(op), self._factors.get(op.op_id)
        if factor is None or cost.flow is None:
            return cost
        if op.op_id not in self._known:
            amounts = tuple((n, a * factor if n == "compute" else a) for n, a in cost.flow.amounts)
            flow = Flow(cost.flow.alone_ns * factor, amounts)
            self._known[op.op_id] = OpCost(cost.fixed_ns, flow)
        return self._known[op.op_id]


def error_of(ran: Ran, machine: Machine, given: float) -> float:
    """Predicted over measured step, less one, where waits give so much back to the clock."""
    priced, at = MachineCosts(ran.schedule, machine), ran.computes
    factors: dict[str, float] = {}
    for _ in range(_REPLAYS if given else 1):
        told = Provenance(kind="simulated", where=machine.name)
        found = replay(ran.schedule, _Clocked(priced, factors), told)
        starts, ends = (np.array(x, float)[at] for x in (found.passes[-1].start_ns,
                                                        found.passes[-1].end_ns))  # fmt: skip
        shares = idle_shares(starts, ends - starts, found.step_ns)
        factors = {
            ran.schedule.ops[i].op_id: 1 - given * float(s) for i, s in zip(at, shares, strict=True)
        }
    return found.step_ns / 1e9 / ran.step_s - 1


def table(cells: Sequence[Ran], machine: Machine) -> str:
    """Markdown: each cell's error with neither, either and both terms; the fit leaves it out.

    Args:
        machine: states what each direction has while both are busy.
    """
    alike = machine.model_copy(update={"duplex_h2d_share": None})
    lines = [
        "| cell | neither | a rate for each direction | the clock | both | fitted to the others |",
        "|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[tuple[float, ...]]] = {}
    for ran in cells:
        model = ran.key.split()[0]
        given = given_back([one for one in cells if one is not ran], alike)
        found = tuple(error_of(ran, m, g) for g in (0.0, given) for m in (alike, machine))
        errors.setdefault(model, []).append(found)
        lines.append(f"| {ran.key} | {' | '.join(map(_percent, found))} | {given:.2f} |")
    for model, rows in errors.items():
        columns = [[abs(error) for error in column] for column in zip(*rows, strict=True)]
        told = (f"{mean(c):.2%}, {max(c):.2%}".replace("%", " %") for c in columns)
        lines.append(f"| {model}: mean, worst | {' | '.join(told)} | |")
    return "\n".join(lines)


def _percent(error: float) -> str:
    return f"{error:+.1%}".replace("%", " %")


def _command(
    campaign: CampaignFile, timelines: TimelinesFile, planned_on: PlannedOn,
    machine: Annotated[str, typer.Option(help="The profile to predict on.")] = "h200",
    host_mem: HostMem = "100GiB",
) -> None:  # fmt: skip
    """Say what two terms are worth on the timelines of a campaign."""
    _, cells = read_campaign(campaign, timelines, planned_on, host_mem)
    each = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates_at_once(cells).items())
    print(f"while both directions are busy: {each}\n")
    print(table(cells, load_machine(machine)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(_command, arguments)


if __name__ == "__main__":
    main()
