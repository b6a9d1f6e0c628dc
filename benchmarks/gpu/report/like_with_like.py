"""`python -m benchmarks.gpu.report.like_with_like`: each measured step beside its own plan.

A campaign measures steps of a few rounds. Here their plans are made again on the profile that they
were made with, which gives them to the nanosecond, and predicted on any other: no step is extended,
and no other plan is predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.gpu.cells.plans import extended_s
from benchmarks.gpu.exits import run_app
from benchmarks.gpu.jobs.campaign import Cell, campaign_of
from benchmarks.gpu.jobs.results import CellFound, KernelsFound, Results
from benchmarks.gpu.jobs.store import CampaignError
from twinstream import api
from twinstream.api import simulate
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.schedule.document import Schedule
from twinstream.schedule.sizes import parse_bytes

_SAME = 1e-9  # seconds are kept as decimal fractions


@dataclass(frozen=True)
class Compared:
    """A cell's measured step of `rounds` rounds, and what each profile predicts of the same plan.

    `extension_bias` is by how much the prediction of the whole step, extended from few rounds, is
    above the prediction of the whole step itself. `plan_change` is how far the prediction of the
    whole step is from that of the campaign: 0 where the plan that ran comes out again.
    """

    key: str
    rounds: int
    measured_s: float
    predicted_s: tuple[float, ...]
    extension_bias: float
    plan_change: float

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured seconds, less one: - is a step that took longer."""
        return tuple(s / self.measured_s - 1 for s in self.predicted_s)


def compared(
    results: Results, planned_on: Machine, machines: Sequence[Machine], host_bytes: int
) -> list[Compared]:
    """All cells that were measured.

    Raises:
        CampaignError: the results are of no CUDA device.
    """
    return [
        _compared(cell, measured, recipe, planned_on, machines)
        for cell, measured, recipe in measured_cells(results, host_bytes)
    ]


def measured_cells(
    results: Results, host_bytes: int
) -> Iterator[tuple[Cell, CellFound, Recipe]]:  # fmt: skip
    """Each cell that was measured, what was found, and the recipe that it ran with.

    Raises:
        CampaignError: the results are of no CUDA device.
    """
    kernels = results.found("kernels")
    if not isinstance(kernels, KernelsFound):
        raise CampaignError("these results name no kernels: they have no probe of a CUDA device")
    for cell in campaign_of("full", host_bytes, "cuda").cells:
        measured = results.found(cell.key)
        if isinstance(measured, CellFound):
            yield cell, measured, recipe_of(kernels.kernels, cell)


def recipe_of(best: KernelChoice, cell: Cell) -> Recipe:
    """With the kernels that a campaign chose, or the attention that the cell names."""
    if cell.attention is None:
        return Recipe(kernels=best)
    named = best.model_copy(update={"attention": cell.attention, "deterministic": False})
    return Recipe(kernels=named)


def _compared(
    cell: Cell, measured: CellFound, recipe: Recipe, planned_on: Machine,
    machines: Sequence[Machine],
) -> Compared:  # fmt: skip
    whole = plan_of(cell, recipe, planned_on)
    work, few_more = whole.workload, measured.rounds_measured
    shorts = [plan_of(cell.shortened(work, rounds), recipe, planned_on) for rounds in few_more]
    own_s = [simulate(schedule, planned_on).step_ns / 1e9 for schedule in (whole, *shorts)]
    few, more = few_more
    extended = extended_s(work.rounds_per_step, (few, more), (own_s[1], own_s[2]))
    last = shorts[-1]
    return Compared(
        cell.key, more, measured.short_steps_s[-1],
        tuple(simulate(last, machine).step_ns / 1e9 for machine in machines),
        extended / own_s[0] - 1, own_s[0] / measured.predicted_step_s - 1,
    )  # fmt: skip


def plan_of(cell: Cell, recipe: Recipe, machine: Machine) -> Schedule:
    """The cell's plan, as a campaign made it."""
    return api.plan(
        cell.spec, machine, step=cell.step(recipe), device_mem=cell.device_bytes,
        host_mem=cell.host_bytes, policy=cell.policy,
    )  # fmt: skip


def table(found: Sequence[Compared], names: Sequence[str]) -> str:
    """Markdown: an error for each profile, and what extending the step adds."""
    heads = ["cell", "measured s", *(f"error of {name}" for name in names), "extension", "plan"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for one in found:
        errors = [f"{error:+.1%}" for error in one.errors]
        cells = [one.key, f"{one.measured_s:.3f}", *errors, f"{one.extension_bias:+.1%}"]
        cells.append("same" if abs(one.plan_change) < _SAME else f"{one.plan_change:+.1%}")
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    for model in dict.fromkeys(one.key.split()[0] for one in found):
        of_model = [one for one in found if one.key.split()[0] == model]
        columns = list(zip(*(one.errors for one in of_model), strict=True))
        told = [
            f"{mean(map(abs, c)):.1%}, {max(map(abs, c)):.1%}".replace("%", " %") for c in columns
        ]
        lines.append(f"| {model}: mean, worst | | {' | '.join(told)} | | |")
    return "\n".join(lines)


def _command(
    campaign: Annotated[Path, typer.Argument(help="results.json of a campaign, or its folder.")],
    planned_on: Annotated[Path, typer.Option(help="The profile that its plans were made with.")],
    machine: Annotated[list[str], typer.Option(help="Profiles to predict on; several.")],
    host_mem: Annotated[str, typer.Option(help="--host-mem of the campaign.")] = "100GiB",
) -> None:
    """Predict each measured step's own plan on several profiles."""
    path = campaign if campaign.is_file() else campaign / "results.json"
    results = Results.model_validate_json(path.read_text(encoding="utf-8"))
    machines = [load_machine(name) for name in machine]
    found = compared(results, load_machine(planned_on), machines, parse_bytes(host_mem))
    print(table(found, machine))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(_command, arguments)


if __name__ == "__main__":
    main()
