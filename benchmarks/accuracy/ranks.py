"""How far predictions are off of ranks that run here: eight layouts, calibrated on two of them.

python -m benchmarks.accuracy.ranks [--steps 8]

Ranks are processes of this machine, which share its cores; links are gloo over loopback. The
profile of two ranks and that of four begin with a probe of the machine, and are each fitted to one
run of so many ranks; what only the other's run has said (a sum over replicas) is taken from there.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from twinstream import api
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.running.run_ranks import (
    ClusterRun,
    inputs_of,
    joined_run,
)
from twinstream.data.text import byte_tokens, default_text
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.fidelity.ranks_fit import RanksFit, fit_ranks
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.run_settings import RunSettings
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Copy
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

SPEC = load_preset("tiny").model_copy(update={"num_layers": 8})
SEQ_LEN, ROUNDS = 256, 8
LITTLE = Caps(device_bytes=10 * 2**20)


@dataclass(frozen=True)
class Case:
    """A layout, and whether the run of it calibrates."""

    name: str
    layout: Layout
    calibrates: bool = False
    caps: Caps = field(default_factory=Caps)

    @property
    def num_ranks(self) -> int:
        return self.layout.num_gpus

    def schedule(self, machine: Machine) -> Schedule:
        """Proven safe; every layout has the same tokens a step."""
        workload = Workload(
            seq_len=SEQ_LEN, chunk_tokens=SEQ_LEN, chunks_per_round=1,
            rounds_per_step=ROUNDS // self.layout.dp,
        )  # fmt: skip
        made = plan_pipeline(Job.of_step(SPEC, workload, Recipe(), self.layout), machine, self.caps)
        require_safe(made)
        return made


CASES = (
    Case("pp 2", Layout(pp=2), calibrates=True),
    Case("pp 2, gpipe", Layout(pp=2, pipeline="gpipe")),
    Case("pp 2, interleaved", Layout(pp=2, pipeline="interleaved", virtual_stages=2)),
    Case("pp 2, ring, offload", Layout(pp=2, pipeline="ring", virtual_stages=2), caps=LITTLE),
    Case("dp 2", Layout(dp=2, zero=0)),
    Case("pp 2 x dp 2", Layout(pp=2, dp=2, zero=0), calibrates=True),
    Case("pp 4", Layout(pp=4)),
    Case("pp 4, ring", Layout(pp=4, pipeline="ring", virtual_stages=2)),
)


@dataclass(frozen=True)
class Row:
    """Seconds of a step; `probed_s` is by the probe alone, with what exchanges took."""

    case: Case
    copied_bytes: int
    probed_s: float
    predicted_s: float
    measured_s: float
    spread_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def measured(
    schedules: Mapping[str, Schedule], num_ranks: int, steps: int
) -> dict[str, ClusterRun]:
    """Runs of all schedules of so many ranks, in the same processes."""
    settings, tokens = RunSettings(backend="cpu", num_steps=steps), byte_tokens(default_text())
    found = {}
    with RankProcesses(num_ranks) as processes:
        for name, schedule in schedules.items():
            inputs = inputs_of(schedule, settings, tokens)
            outcomes = processes.execute(schedule, inputs, settings.options())
            found[name] = joined_run(schedule, outcomes, steps)
    return found


def with_curves_of(cluster: Cluster, others: Sequence[Cluster]) -> Cluster:
    """The cluster, with curves that only the others have."""
    curves = {curve.key: curve for one in (*others, cluster) for curve in one.curves}
    return cluster.model_copy(update={"curves": tuple(curves.values())})


def rows(steps: int) -> list[Row]:
    """Measure, calibrate, predict. Losses of all layouts are those of the first."""
    base = api.probe()
    schedules = {case.name: case.schedule(load_machine("cpu")) for case in CASES}
    runs: dict[str, ClusterRun] = {}
    fits: dict[int, RanksFit] = {}
    for num_ranks in sorted({case.num_ranks for case in CASES}):
        mine = [case for case in CASES if case.num_ranks == num_ranks]
        runs |= measured({case.name: schedules[case.name] for case in mine}, num_ranks, steps)
        (one,) = (case.name for case in mine if case.calibrates)
        run = schedules[one], runs[one].timeline
        fits[num_ranks] = fit_ranks(base, [run], f"here{num_ranks}", f"the run of {one}")
    first = runs[CASES[0].name].losses
    for name, run_of in runs.items():
        near = all(abs(a - b) < 1e-4 for a, b in zip(run_of.losses, first, strict=True))
        assert near, f"{name} has other losses"
    return [_row(case, schedules[case.name], runs[case.name], fits, base) for case in CASES]


def _row(
    case: Case,
    schedule: Schedule,
    run: ClusterRun,
    fits: Mapping[int, RanksFit],
    base: Machine,
) -> Row:
    fit = fits[case.num_ranks]
    cluster = with_curves_of(fit.cluster, [one.cluster for one in fits.values()])
    copied = sum(
        {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}[op.tensor]
        for part in schedule.schedules.values()
        for op in part.ops
        if isinstance(op, Copy)
    )
    return Row(
        case=case,
        copied_bytes=copied,
        probed_s=simulate(schedule, base, cluster).step_ns / 1e9,
        predicted_s=simulate(schedule, fit.machine, cluster).step_ns / 1e9,
        measured_s=run.timeline.step_ns / 1e9,
        spread_s=run.timeline.spread_ns / 1e9,
    )


def table(found: Sequence[Row]) -> str:
    """Markdown, with the mean error of the layouts that calibrated nothing."""
    lines = [
        "| layout | copied a step, MiB | by the probe | predicted | measured | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        name = f"{row.case.name} (calibrates)" if row.case.calibrates else row.case.name
        lines.append(
            f"| {name} | {row.copied_bytes / 2**20:.1f} | {row.probed_s:.3f} s | "
            f"{row.predicted_s:.3f} s | {row.measured_s:.3f} +- {row.spread_s:.3f} s | "
            f"{row.error:+.1%} |"
        )
    unseen = [abs(row.error) for row in found if not row.case.calibrates]
    lines.append(f"\nMean absolute error of the {len(unseen)} that calibrate nothing: "
                 f"{fmean(unseen):.1%}, largest {max(unseen):.1%}.")  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args(arguments).steps
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    print(table(rows(steps)))
    print(f"\nLoad {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()
