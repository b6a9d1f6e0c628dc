"""The CUDA backend on a GPU of the tests: the bits of the CPU, in whatever order streams run."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from tests.helpers.fake_gpu import FakeGpu, FakeGraph, FakeStream
from tests.helpers.host_chains import tiny_chain_of
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.runs import Bits, assert_same_bits, bits_of, training
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceMemoryError, DeviceMeter, MemoryReading
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import Graphs, RunOptions
from twinstream.executor.replay.dispatch import Passes
from twinstream.executor.run.cuda_run import CudaJob, run_on_gpu
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import fill_carried, initial_state, read_carried
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Feed

NUM_STEPS = 5


@cache
def schedule_of(policy: str, workload: str = "packed", preset: str = "tiny") -> RankSchedule:
    if policy in ("optimizer_offload", "layer_offload"):  # which the host's cores update
        return planned(tiny_chain_of(policy, workload, preset), MACHINE, Caps(), policy)
    chain = tiny_chain(workload, preset)
    caps = Caps()
    if policy != "resident":
        caps = Caps(device_bytes=enough_device_bytes(chain, "streaming") * 5 // 4)
    return planned(chain, MACHINE, caps, policy)


@cache
def expected_bits(policy: str, workload: str, preset: str) -> Bits:
    return bits_of(schedule_of(policy, workload, preset), NUM_STEPS)


@dataclass(frozen=True)
class Ran:
    bits: Bits
    passes: Passes
    graphs: str
    gpu: FakeGpu


def on_fake_gpu(
    schedule: RankSchedule,
    options: RunOptions,
    gpu: FakeGpu,
    change: Callable[[HostWork], HostWork] = lambda work: work,
    meter: DeviceMeter | None = None,
) -> Ran:
    loop = training(schedule)
    state = initial_state(small(schedule.model.name), seed=1)
    assert ModelSpec.model_validate(schedule.model.spec) == small(schedule.model.name)
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    arenas = Arenas(schedule, memory)
    host_work = change(loop.host_work(schedule))
    program = compile_program(schedule)
    bound = bind_works(schedule, arenas, host_work, replace(options, backend="cuda"))
    works = gpu.works(program, bound, arenas)

    def fill() -> None:
        if options.poison:
            arenas.poison()
        fill_carried(schedule, arenas, state)

    meter = meter or DeviceMeter(Caps(), 0, lambda: MemoryReading(0, 0))
    job = CudaJob(schedule, program, arenas, works, fill)
    passes, graphs = run_on_gpu(gpu, job, options, meter)
    bits = Bits(tuple(loop.losses), read_carried(schedule, arenas, state))
    return Ran(bits, passes, graphs, gpu)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("eager", [0.0, 0.5])
@pytest.mark.parametrize(
    ("policy", "workload", "preset"),
    [
        ("optimizer_offload", "packed", "tiny"),
        ("layer_offload", "packed", "tiny"),
        ("resident", "packed", "tiny"),
        ("streaming", "packed", "tiny"),
        ("streaming", "sliced", "tiny-qwen3"),
        ("optimal", "sliced", "tiny"),
        ("streaming", "unequal", "tiny-qwen3"),
    ],
)
def test_every_order_of_the_streams_gives_the_bits_of_the_cpu(
    policy, workload, preset, eager, graphs: Graphs
):
    schedule = schedule_of(policy, workload, preset)
    for seed in range(2):
        options = RunOptions(num_passes=NUM_STEPS, graphs=graphs, poison=seed == 1)
        found = on_fake_gpu(schedule, options, FakeGpu(seed, eager))
        assert_same_bits(found.bits, expected_bits(policy, workload, preset))
        assert bool(found.gpu.graphs) == (graphs == "on")


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_inputs_that_come_late_are_waited_for(graphs: Graphs):
    schedule = schedule_of("streaming")

    def slow(host_work: HostWork) -> HostWork:
        def feed(op: Feed, pass_index: int) -> torch.Tensor:
            time.sleep(0.003)
            return host_work.feed(op, pass_index)

        return HostWork(feed, host_work.fetch)

    options = RunOptions(num_passes=4, graphs=graphs)
    found = on_fake_gpu(schedule, options, FakeGpu(eager=0.9), slow)
    assert_same_bits(found.bits, bits_of(schedule, 4))
    assert found.passes.host_cost is not None
    assert found.passes.host_cost.waited_ns_per_pass > 0


def test_graphs_hold_most_ops_and_are_given_back():
    schedule = schedule_of("streaming")
    found = on_fake_gpu(schedule, RunOptions(num_passes=5, graphs="on"), FakeGpu())
    cost = found.passes.host_cost
    assert cost is not None
    # three of the four passes after the first are replayed; the last one, timed, is not counted
    launches = sum(graph.num_launches for graph in found.gpu.graphs)
    assert (cost.num_passes, cost.calls_per_pass["graph"]) == (3, launches / 3)
    assert not any(graph.alive for graph in found.gpu.graphs)
    captured = int(found.graphs.split()[3])
    assert 0.7 * len(schedule.ops) < captured < len(schedule.ops)


def test_spans_respect_every_wait_and_passes_end_with_their_last_compute():
    schedule = schedule_of("streaming")
    found = on_fake_gpu(
        schedule, RunOptions(num_passes=4, timed_passes=4, graphs="off"), FakeGpu(3)
    )
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    device = [op.stream.queue != "host" for op in schedule.ops]
    all_spans = [times.spans for times in found.passes.times]
    for number, spans in enumerate(all_spans):
        assert spans is not None
        free: dict[str, int] = {}
        for i, op in enumerate(schedule.ops):
            begun_after = [free.get(str(op.stream), 0)]
            begun_after += [spans.end_ns[position[w]] for w in op.waits if device[position[w]]]
            if number:
                before = all_spans[number - 1]
                assert before is not None
                waits = [position[w] for w in op.waits_previous]
                begun_after += [before.end_ns[w] for w in waits if device[w]]
            if device[i]:
                assert spans.start_ns[i] >= max(begun_after)
                free[str(op.stream)] = spans.end_ns[i]
        last = max(i for i, op in enumerate(schedule.ops) if op.kind == "compute")
        assert found.passes.times[number].end_ns >= spans.end_ns[last]


def test_a_kernel_that_cannot_be_captured_runs_op_by_op_and_splits_the_graphs():
    schedule = schedule_of("streaming")
    refused = frozenset(
        op.call for op in schedule.ops if op.kind == "compute" and op.label.kind == "block_backward"
    )
    gpu = FakeGpu(2, refused=refused)
    found = on_fake_gpu(schedule, RunOptions(num_passes=NUM_STEPS, graphs="on"), gpu)
    assert_same_bits(found.bits, expected_bits("streaming", "packed", "tiny"))
    assert found.graphs.endswith(f"{len(refused)} refused")
    assert any(graph.num_launches for graph in gpu.graphs)


# --- errors


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_an_error_of_the_data_surfaces_and_leaves_nothing_running(graphs: Graphs):
    def ending(host_work: HostWork) -> HostWork:
        def feed(op: Feed, pass_index: int) -> torch.Tensor:
            if pass_index == 2:
                raise BrokenError("the text has ended")
            return host_work.feed(op, pass_index)

        return HostWork(feed, host_work.fetch)

    before, gpu = threading.active_count(), FakeGpu()
    with pytest.raises(BrokenError):
        on_fake_gpu(schedule_of("streaming"), RunOptions(num_passes=5, graphs=graphs), gpu, ending)
    assert threading.active_count() == before
    assert not any(stream.items for stream in gpu.streams)
    assert not any(graph.alive for graph in gpu.graphs)


@pytest.mark.parametrize("stage", ["warm-up", "capture", "pass"])
def test_an_interrupt_at_any_stage_leaves_nothing_running(stage, monkeypatch):
    class Interrupted(FakeGpu):
        def capture(self, stream: FakeStream, body: Callable[[], None]) -> FakeGraph:
            if stage == "capture" and len(self.graphs) == 20:
                raise KeyboardInterrupt
            return super().capture(stream, body)

    calls = []
    kernel = registered_kernel("block_backward/eager")

    def interrupted(operands, attributes):
        calls_of_op = kernel(operands, attributes)

        def run():
            calls.append(1)
            if len(calls) == {"warm-up": 2, "pass": 6}.get(stage):
                raise KeyboardInterrupt
            calls_of_op()

        return run

    monkeypatch.setattr(
        "twinstream.executor.providers.provider.registered_kernel",
        lambda key: interrupted if key == "block_backward/eager" else registered_kernel(key),
    )
    before, gpu = threading.active_count(), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        on_fake_gpu(schedule_of("streaming"), RunOptions(num_passes=4, graphs="on"), gpu)
    assert threading.active_count() == before
    assert not any(stream.items for stream in gpu.streams)
    assert not any(graph.alive for graph in gpu.graphs)


# --- device memory


def over_from(reading: int, *, refuses_excess: bool = True) -> DeviceMeter:
    """The driver's figure is over the cap from its so manyeth reading on."""
    count = iter(range(100))
    caps = Caps(device_bytes=100, device_reserve_bytes=10)
    return DeviceMeter(
        caps,
        90,
        lambda: MemoryReading(101 if next(count) >= reading else 100, 90),
        refuses_excess=refuses_excess,
    )


def test_more_than_the_cap_once_warm_is_refused_before_the_state_is_filled():
    def untouched(host_work: HostWork) -> HostWork:
        def feed(op: Feed, pass_index: int) -> torch.Tensor:
            raise AssertionError("training began")

        return HostWork(feed, host_work.fetch)

    before, gpu = threading.active_count(), FakeGpu()
    with pytest.raises(DeviceMemoryError):
        on_fake_gpu(schedule_of("resident"), RunOptions(), gpu, untouched, over_from(1))
    assert threading.active_count() == before
    assert gpu.graphs == []


def test_excess_that_is_only_reported_ends_neither_the_run_nor_its_graphs():
    meter = over_from(1, refuses_excess=False)
    options = RunOptions(num_passes=NUM_STEPS, graphs="on")
    found = on_fake_gpu(schedule_of("streaming"), options, FakeGpu(), meter=meter)
    assert not found.graphs.startswith("no graphs")
    assert_same_bits(found.bits, expected_bits("streaming", "packed", "tiny"))
    assert meter.report().excess_bytes == 1


def test_graphs_whose_memory_does_not_fit_are_given_back_and_the_bits_stay():
    gpu = FakeGpu()
    options = RunOptions(num_passes=NUM_STEPS, graphs="on")
    # readings: at the start, two once warm, then with graphs
    found = on_fake_gpu(schedule_of("streaming"), options, gpu, meter=over_from(3))
    assert found.graphs == "no graphs (their memory would exceed the cap)"
    assert gpu.num_releases == 1
    assert not any(graph.num_launches for graph in gpu.graphs)
    assert_same_bits(found.bits, expected_bits("streaming", "packed", "tiny"))
