"""Speed of lowering and simulating a cluster of 131,072 GPUs in 16 classes.

pytest tests/bench/test_bench_cluster.py -m bench -s
"""

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from twinstream.clusters.assembling import assembled
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_model
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.network_costs import ClusterCosts
from twinstream.simulator.replay import cold_step_ns

Made = TypeVar("Made")
REF = MachineRef(name="h100_dgx", content_hash="")


def timed(run: Callable[[], Made]) -> tuple[Made, float]:
    begun = time.perf_counter()
    return run(), time.perf_counter() - begun


def hints(run: Callable[[], object]) -> str:
    """Where the time goes: the functions with most time of their own."""
    profile = cProfile.Profile()
    profile.runcall(run)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    most = sorted(stats.items(), key=lambda item: -item[1][2])[:6]
    total = sum(one[2] for one in stats.values())
    return ", ".join(f"{name} {100 * one[2] / total:.0f} %" for (_, _, name), one in most)


@pytest.mark.bench
@pytest.mark.parametrize("microbatches", [16, 32])
def test_bench_131072_gpus(microbatches, capsys):
    """Llama 3 405B, tp 8, pp 16, dp 1024: one class a stage."""
    layout = Layout(tp=8, pp=16, dp=1024)
    batch = microbatches * layout.dp
    job = Job(shape=load_model("llama3-405b"), layout=layout, seq_len=8192, global_batch=batch)
    document, lowering_s = timed(lambda: assembled(job, 8, REF))
    assert document.mesh.size == 131_072 and len(document.classes) == 16
    cluster = load_cluster("h100_dgx").model_copy(update={"most_nodes": None})
    levels = cluster.levels
    wide = levels[-1].nodes.model_copy(update={"value": 16384.0})
    cluster = cluster.model_copy(
        update={"levels": (*levels[:-1], levels[-1].model_copy(update={"nodes": wide}))}
    )
    machine = machine_of(cluster)
    costs, pricing_s = timed(lambda: ClusterCosts(document, cluster, machine))
    step_ns, simulating_s = timed(lambda: cold_step_ns(document, costs))
    mfu = document.model_flops / (step_ns / 1e9 * document.mesh.size * 989e12)
    assert 0.15 < mfu < 0.5  # pp - 1 of m + pp - 1 microbatches' time is bubble
    ops = sum(len(part.ops) for part in document.schedules.values())
    with capsys.disabled():
        print(
            f"\ncluster of 131,072 in 16 classes, {microbatches} microbatches: {ops:,} ops, "
            f"lowered in {lowering_s:.2f} s ({1e6 * lowering_s / ops:.0f} us an op), priced in "
            f"{pricing_s:.2f} s, simulated in {simulating_s:.2f} s "
            f"({1e6 * simulating_s / ops:.0f} us an op); MFU {mfu:.2f}"
        )
        if microbatches == 16:
            print(f"lowering: {hints(lambda: assembled(job, 8, REF))}")
            print(f"simulating: {hints(lambda: cold_step_ns(document, costs))}")
