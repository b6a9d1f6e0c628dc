"""Time to plan the ranks of a pipeline that fits its devices, and what its messages take.

pytest tests/bench/test_bench_pipeline.py -m bench -s
"""

import time

import pytest

from twinstream.clusters.conforms import conforms
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_model
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.workload import Workload


@pytest.mark.bench
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 16), (4, 32), (4, 64)])
def test_bench_planning_of_a_pipeline(pp, microbatches, capsys):
    """8B, sequences of 8,192 tokens, dp 2, ZeRO 1, 1f1b, 80 GiB a rank."""
    recipe = Recipe(kernels=KernelChoice(vector="triton", attention="sdpa_flash"))
    workload = Workload(
        seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=microbatches
    )
    stages = Job.of_step(load_model("8b"), workload, recipe, Layout(pp=pp, dp=2, zero=1))
    begun = time.perf_counter()
    document = plan_pipeline(stages, load_machine("h100"), Caps(device_bytes=80 * 2**30))
    planned_s = time.perf_counter() - begun
    assert verify(document) == [] == conforms(document)
    most = max(arena_bytes(part, DEVICE) for part in document.schedules.values())
    ops = sum(len(part.ops) for part in document.schedules.values())
    with capsys.disabled():
        print(
            f"\npp {pp}, {microbatches} microbatches: {ops:,} ops planned in {planned_s:.2f} s, "
            f"{most / 2**30:.1f} GiB on the fullest rank"
        )
