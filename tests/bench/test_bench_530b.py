"""CPU seconds of vTrain's first case: 530B on A100 by cost, one layout and all of its table.

pytest tests/bench/test_bench_530b.py -m bench -s
"""

import time

import pytest

from twinstream.clusters.kernel_sets import with_kernels
from twinstream.clusters.predict import Prediction, Prepared, gpu_caps, predict
from twinstream.clusters.timed_step import TimedStep, document_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_model
from twinstream.simulator.states import KnownStates

pytestmark = pytest.mark.bench
CLUSTER = load_cluster("a100_dgx")
MACHINE = machine_of(CLUSTER)
TP, PP = (4, 8, 16), (3, 5, 7, 15, 21, 35, 105)
DP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30)
SEQUENCES = 1920


def job_of(microbatches: int | None = None, **degrees: int) -> Job:
    """As VIA-Research/vTrain@f8dda84, config/case_study_1, has them: whole layers again."""
    layout = Layout(**degrees, recompute="full")
    batch = SEQUENCES if microbatches is None else microbatches * layout.dp
    shape = load_model("gpt-530b")
    return with_kernels(Job(shape=shape, layout=layout, seq_len=2048, global_batch=batch), MACHINE)


def test_bench_one_layout(capsys):
    begun = time.process_time()
    found = predict(job_of(tp=8, dp=12, pp=35), CLUSTER)
    fast_s = time.process_time() - begun
    steps_ns = []
    for count in (70, 105):
        document = document_of(job_of(count, tp=8, dp=12, pp=35), CLUSTER)
        steps_ns.append(TimedStep.simulated(document, CLUSTER, MACHINE).step_ns)
    whole_s = time.process_time() - begun - fast_s
    few, more = steps_ns
    assert found.step_s == (more + (more - few) * (160 - 105) / (105 - 70)) / 1e9
    with capsys.disabled():
        print(f"\n530B on 3,360 A100: {found.step_s:.3f} s a step, in {fast_s:.2f} CPU s; "
              f"op by op in {whole_s:.1f}")  # fmt: skip


def test_bench_all_layouts(capsys):
    begun, num_layouts, fastest = time.process_time(), 0, list[tuple[float, str, Prediction]]()
    for tp in TP:
        for pp in PP:
            known: KnownStates = {}
            for dp in DP:
                num_layouts += 1
                prepared = Prepared(job_of(tp=tp, dp=dp, pp=pp), CLUSTER)
                caps = gpu_caps(CLUSTER, MACHINE, prepared.job.layout.num_gpus)
                room_bytes = (caps.device_bytes or 0) - caps.device_reserve_bytes
                if sum(prepared.memory().values()) <= room_bytes:
                    found = prepared.on(CLUSTER, MACHINE, caps, known)
                    cost = found.step_s * found.num_gpus
                    fastest.append((cost, prepared.job.layout.text, found))
    cpu_s = time.process_time() - begun
    assert num_layouts == 294 and all(one.fits for _, _, one in fastest)
    by_cost = sorted(fastest, key=lambda one: one[0])
    with capsys.disabled():
        print(f"\n{num_layouts} layouts, {len(fastest)} fit and were simulated: {cpu_s:.0f} CPU s")
        for cost, text, found in by_cost[:5]:
            print(f"{text}: {found.step_s:.2f} s, {cost / 3600:.1f} GPU-hours a step")
