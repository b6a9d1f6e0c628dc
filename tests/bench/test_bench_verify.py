"""Speed of `verify`, `conforms` and of loading a document, on a streamed step.

pytest tests/bench/test_bench_verify.py -m bench -s
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.plans import planned
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.files import read_document, write_document
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.violations import ReadTooEarly, TaskMissing
from twinstream.schedule.workload import Workload


def fastest(run: Callable[[], object], repeats: int = 7) -> str:
    """The fastest of some runs, by the wall and by the CPU: other work only ever adds."""
    wall, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return f"{min(wall):.2f} s (CPU {min(cpu):.2f} s), best of {repeats}"


def streamed(rounds: int) -> tuple[Chain, RankSchedule]:
    """A step of 8B within 12 GiB: some 2,690 ops a round."""
    workload = Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=8, rounds_per_step=rounds)
    chain = lower(load_preset("8b"), workload)
    caps = Caps(device_bytes=12 * 2**30)
    return chain, planned(chain, load_machine("h100"), caps, "streaming")


@pytest.fixture(scope="module")
def loop() -> tuple[Chain, RankSchedule]:
    return streamed(rounds=38)


@pytest.mark.bench
def test_bench_verify(loop: tuple[Chain, RankSchedule]) -> None:
    _, schedule = loop
    assert len(schedule.ops) >= 100_000
    taken = fastest(lambda: verify_rank(schedule))
    print(f"\nverify {len(schedule.ops)} ops: {taken}")
    assert verify_rank(schedule) == []
    # Its answer is worth something: without one wait out of all it is another.
    late = len(schedule.ops) - next(
        i for i, op in enumerate(reversed(schedule.ops)) if op.kind == "compute" and op.waits
    ) - 1  # fmt: skip
    ops = list(schedule.ops)
    ops[late] = ops[late].model_copy(update={"waits": ()})
    found = verify_rank(schedule.model_copy(update={"ops": tuple(ops)}))
    assert any(isinstance(v, ReadTooEarly) and v.ops[0] == ops[late].op_id for v in found)


@pytest.mark.bench
def test_bench_conforms(loop: tuple[Chain, RankSchedule]) -> None:
    chain, schedule = loop
    print(f"\nconforms, {len(chain.tasks)} tasks: {fastest(lambda: conforms(schedule, chain))}")
    assert conforms(schedule, chain) == []
    dropped = next(op for op in reversed(schedule.ops) if op.kind == "compute")
    ops = tuple(op for op in schedule.ops if op is not dropped)
    assert conforms(schedule.model_copy(update={"ops": ops}), chain) == [
        TaskMissing(f"task '{dropped.task}' is not carried out at the end")
    ]


@pytest.mark.bench
def test_bench_load(tmp_path: Path) -> None:
    _, schedule = streamed(rounds=19)
    path = tmp_path / "schedule.json"
    write_document(schedule, path)
    taken = fastest(lambda: read_document(RankSchedule, path))
    print(f"\nload {len(schedule.ops)} ops, {path.stat().st_size / 1e6:.1f} MB: {taken}")
    assert read_document(RankSchedule, path) == schedule
