"""What the dispatch loop costs the host, and what timing and graphs change on a GPU.

pytest -m "bench and not gpu" -s tests/bench/test_bench_dispatch.py
pytest -m "bench and gpu" -s tests/bench/test_bench_dispatch.py
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import twinstream as ts
from tests.bench.test_bench_simulate import pipeline
from tests.helpers.runs import random_tokens
from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.kernels import registry
from twinstream.executor.kernels.block import block_backward, block_forward
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.probe.tasks.chain_memory import ChainMemory, in_order
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import Graphs, RunOptions
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.executor.replay.graph_classes import contents
from twinstream.executor.replay.graph_replay import GraphReplay
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.timeline import HostCost, RankTimeline
from twinstream.schedule.workload import Workload

pytestmark = pytest.mark.bench


class NoEvent:
    def record(self, stream: Any) -> None:
        return

    def wait(self, stream: Any) -> None:
        return

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


@dataclass
class NoGraph:
    def replay(self) -> None:
        return

    def reset(self) -> None:
        return


class NoGpu:
    """Does nothing at once: what is left is our own loop."""

    def __init__(self) -> None:
        self.num_streams = 0

    def stream(self, name: str) -> int:
        self.num_streams += 1
        return self.num_streams

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> NoEvent:
        return NoEvent()

    def use(self, stream: Any) -> None:
        return

    def enter_thread(self) -> None:
        return

    def capture(self, stream: Any, body: Callable[[], None]) -> NoGraph:
        return NoGraph()

    def synchronize(self) -> None:
        return

    def libraries_pool(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_allocation_count(self) -> None:
        return

    def allocated_bytes(self) -> int:
        return 0

    def release_unused(self) -> None:
        return


def loop_cost(schedule: RankSchedule, *, timed: bool, graphs: bool) -> tuple[HostCost, float]:
    """As the loop measures it, and the CPU time of the thread, ns per op."""
    program = compile_program(schedule)
    works = [lambda pass_index: None for _ in program.launches]
    backend = CudaBackend(program, works, NoGpu())
    replay = GraphReplay(program, works, contents(schedule), backend).replay if graphs else None
    before_ns = time.thread_time_ns()
    passes = run_passes(program, backend, PassOptions(6, 6 if timed else 0), replay)
    spent_ns = time.thread_time_ns() - before_ns
    assert len(passes.times) == 6
    assert passes.host_cost is not None
    return passes.host_cost, spent_ns / 6 / len(schedule.ops)


def test_bench_the_loop_alone(capsys):
    """9,999 ops on three streams with two waits each; six passes, the best of three runs."""
    schedule = pipeline(3333)
    for timed, graphs in ((False, False), (True, False), (False, True)):
        costs = [loop_cost(schedule, timed=timed, graphs=graphs) for _ in range(3)]
        cost, cpu_ns = min(costs, key=lambda found: found[1])
        calls = sum(cost.calls_per_pass.values())
        assert calls == len(schedule.ops) or graphs
        with capsys.disabled():
            print(
                f"\n{len(schedule.ops)} ops, timed {timed}, graphs {graphs}: "
                f"{cpu_ns / 1e3:.2f} us of CPU an op ({cost.ns_per_op / 1e3:.2f} elapsed), "
                f"{calls:.0f} calls a step"
            )


# --- what a kernel costs the host


class NoVector:
    """Launches nothing."""

    product_with_backward = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return does_nothing


class NoAttention:
    forward = backward = staticmethod(lambda *arguments: None)


def does_nothing(*arguments: Any, **options: Any) -> None:
    return


def test_bench_the_host_of_a_kernel(monkeypatch, capsys):
    """The compositions on tiny operands: torch's products and no other kernel, CPU time, a call.

    Bound is what an op does once, called what it does in every pass; the best of seven of 200.
    """
    monkeypatch.setattr(registry, "vector_ops", lambda name: NoVector())
    for module in (block_forward, block_backward):
        monkeypatch.setattr(module, "attention_implementation", lambda name: NoAttention)
    spec = ModelSpec(
        name="tiny", num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16,
        vocab_size=32, dtype="float32",
    )  # fmt: skip
    work = Workload(seq_len=16, chunk_tokens=16, chunks_per_round=1, rounds_per_step=1)
    chain = lower(spec, work, Recipe())
    memory = ChainMemory(chain, torch.device("cpu"))

    def cost_us(call: Callable[[], object]) -> float:
        def once() -> float:
            before_ns = time.thread_time_ns()
            for _ in range(200):
                call()
            return (time.thread_time_ns() - before_ns) / 200e3

        return min(once() for _ in range(7))

    for kernel, task in {chain.calls[t.call].kernel: t for t in in_order(chain)}.items():
        bind = partial(
            registered_kernel(kernel), memory.operands(task), chain.calls[task.call].attributes
        )
        calls = bind()
        bound_us, called_us = cost_us(bind), cost_us(calls)
        with capsys.disabled():
            print(f"\n{kernel}: bound {bound_us:.0f} us, called {called_us:.0f} us", end="")
        assert called_us < bound_us


# --- on a GPU


def measured(schedule: RankSchedule, *, timed: int, graphs: Graphs) -> RankTimeline:
    spec = ModelSpec.model_validate(schedule.model.spec)
    options = RunOptions("cuda", num_passes=9, timed_passes=timed, graphs=graphs)
    tokens = random_tokens(schedule, spec.vocab_size)
    loop = Training(lambda step, index: tokens[index], learning_rate=1e-3, seed=0)
    return execute(schedule, initial_state(spec, 1), loop.host_work(schedule), options).timeline


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_tokens", [256, 2048])
def test_bench_timing_and_graphs_on_a_gpu(chunk_tokens, capsys):
    """Step time untimed, timed, and as graphs; prints the overhead of timing and the host's cost.

    All steps of the second run are timed, so its step time has the overhead in it.
    """
    step = ts.TrainingStep(
        seq_len=256, tokens_per_step=8 * chunk_tokens, chunk_tokens=chunk_tokens, chunks_per_round=2
    )
    schedule = ts.plan("1b", "h100", step=step, device_mem="24GiB", host_mem="32GiB")
    runs: list[tuple[str, int, Graphs]] = [
        ("untimed", 1, "off"), ("timed", 9, "off"), ("graphs", 1, "on"),
    ]  # fmt: skip
    found = {name: measured(schedule, timed=timed, graphs=graphs) for name, timed, graphs in runs}
    plain_ns = found["untimed"].step_ns
    with capsys.disabled():
        for name, timeline in found.items():
            cost = timeline.provenance.host_cost
            assert cost is not None
            print(
                f"\n1b, {chunk_tokens} tokens a chunk, {name}: step "
                f"{timeline.step_ns / 1e6:.3f} ms (spread {timeline.spread_ns / 1e6:.3f}), "
                f"{timeline.step_ns / plain_ns - 1:+.2%} against untimed; "
                f"host {cost.ns_per_op / 1e3:.1f} us an op; "
                f"{timeline.provenance.detail}"
            )
    assert plain_ns > 0
