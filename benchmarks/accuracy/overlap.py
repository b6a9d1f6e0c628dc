"""What it brings to sum gradients beside the backward pass: steps with sums so, and apart.

python -m benchmarks.accuracy.overlap [--measure] [--steps 12]

Predicted for four replicas on cluster profiles, under caps of a device too; with --measure also on
two and on four processes of this machine, in turns.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.running.run_ranks import (
    ClusterRun,
    inputs_of,
    joined_run,
)
from twinstream.data.text import byte_tokens, default_text
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.run_settings import RunSettings
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

_ROUNDS, _REPEATS = 2, 3


@dataclass(frozen=True)
class Case:
    """Replicas of a model; `where` is a cluster's profile, or "here"."""

    where: str
    model: str
    seq_len: int
    dp: int
    zero: int
    cap_gib: float | None = None

    def stages(self, *, overlaps: bool) -> Job:
        layout = Layout.model_validate({"dp": self.dp, "zero": self.zero, "dp_overlap": overlaps})
        workload = Workload(
            seq_len=self.seq_len, chunk_tokens=self.seq_len, chunks_per_round=1,
            rounds_per_step=_ROUNDS,
        )  # fmt: skip
        return Job.of_step(load_preset(self.model), workload, Recipe(), layout)

    @property
    def caps(self) -> Caps:
        cap = self.cap_gib
        return Caps(device_bytes=None if cap is None else int(cap * 2**30))


PREDICTED = [
    *(Case("h100_dgx", "1b", 2048, 4, zero) for zero in (0, 3)),
    *(Case("h100_dgx", "8b", 4096, 4, zero, 70) for zero in (0, 3)),
    *(Case("h100_roce", "1b", 2048, 4, zero, cap) for cap in (8, 5) for zero in (0, 2, 3)),
    *(Case("rtx4090_ethernet", "1b", 2048, 4, zero, 8) for zero in (0, 3)),
]
MEASURED = [Case("here", "tiny", 256, dp, zero) for dp in (2, 4) for zero in (0, 3)]


def predicted_ms(case: Case, *, overlaps: bool) -> tuple[float, bool]:
    """The step, and whether sums overlap in the end."""
    cluster = load_cluster(case.where)
    machine = machine_of(cluster)
    schedule = plan_pipeline(case.stages(overlaps=overlaps), machine, case.caps)
    step_ns = simulate(schedule, machine, cluster).step_ns
    return step_ns / 1e6, bool(schedule.layout["dp_overlap"])


def measured_ms(case: Case, steps: int) -> tuple[list[float], list[float]]:
    """Steps apart and beside, of runs in turns; their losses are the same bits."""
    machine = load_machine("cpu")
    found: dict[bool, list[float]] = {False: [], True: []}
    losses = []
    with RankProcesses(case.dp) as processes:
        for overlaps in [False, True] * _REPEATS:
            schedule = plan_pipeline(case.stages(overlaps=overlaps), machine)
            run = _run(processes, schedule, steps)
            found[overlaps].append(run.timeline.step_ns / 1e6)
            losses.append(run.losses)
    assert all(one == losses[0] for one in losses), "sums beside have other bits"
    return found[False], found[True]


def _run(processes: RankProcesses, schedule: Schedule, steps: int) -> ClusterRun:
    settings = RunSettings(backend="cpu", num_steps=steps)
    inputs = inputs_of(schedule, settings, byte_tokens(default_text()))
    outcomes = processes.execute(schedule, inputs, settings.options())
    return joined_run(schedule, outcomes, steps)


def predicted_table() -> Iterator[str]:
    """Markdown, line by line."""
    yield "| cluster | model | cap | ZeRO | sums apart | beside | |"
    yield "|---|---|---|---|---|---|---|"
    for case in PREDICTED:
        apart_ms, _ = predicted_ms(case, overlaps=False)
        beside_ms, overlaps = predicted_ms(case, overlaps=True)
        cap = f"{case.cap_gib} GiB" if case.cap_gib else "-"
        gain = f"{beside_ms / apart_ms - 1:+.1%}" if overlaps else "apart"
        yield (
            f"| {case.where} | {case.model} | {cap} | {case.zero} | {apart_ms:.1f} ms | "
            f"{beside_ms:.1f} ms | {gain} |"
        )


def measured_table(steps: int) -> Iterator[str]:
    """Markdown, line by line."""
    yield "| ranks | ZeRO | sums apart | beside |"
    yield "|---|---|---|---|"
    for case in MEASURED:
        told = " | ".join(
            f"{median(found):.1f} ms ({min(found):.1f} to {max(found):.1f})"
            for found in measured_ms(case, steps)
        )
        yield f"| {case.dp} | {case.zero} | {told} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args(arguments)
    for line in predicted_table():
        print(line, flush=True)
    if asked.measure:
        print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before\n")
        for line in measured_table(asked.steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()
