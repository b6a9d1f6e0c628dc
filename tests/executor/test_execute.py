"""Running a schedule: what is refused, what is measured, and that it learns."""

import threading
from collections.abc import Callable

import pytest
import torch

from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import random_tokens, run, training
from tests.helpers.tiny_chains import WORKLOADS, small, tiny_chain
from twinstream.data.text import TextBatches, byte_tokens, default_text
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.memory import arena_memory
from twinstream.executor.memory.host_limits import HostLimits, HostMemoryError
from twinstream.executor.program.compiled import Work, compile_program
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import RunOptions
from twinstream.executor.replay import dispatch
from twinstream.executor.run import execute as execute_module
from twinstream.executor.run.execute import (
    NoCudaError,
    choose_backend,
    execute,
)
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.lowering.lower import lower
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Feed, Fetch, Op
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.violations import (
    ReadTooEarly,
    TaskMissing,
    UnsafeSchedule,
)


@pytest.fixture(scope="module")
def schedule() -> RankSchedule:
    return planned(tiny_chain("packed"), MACHINE, Caps(), "streaming")


def within_a_minute(call: Callable[[], object]) -> BaseException | None:
    """What the call raises; fails if it never returns."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "deadlock"
    return raised[0] if raised else None


def start(schedule: RankSchedule) -> dict[str, torch.Tensor]:
    return initial_state(small(schedule.model.name), seed=1)


# --- training


def test_ten_steps_on_real_text_lower_the_loss():
    spec = small("tiny", num_layers=3)
    plan = planned(lower(spec, WORKLOADS["packed"]), MACHINE, Caps(), "streaming")
    batches = TextBatches(byte_tokens(default_text()), plan.workload)
    loop = Training(
        lambda step, index: torch.from_numpy(batches.chunk(step, index)), 1e-2, seed=0
    )  # fmt: skip
    execute(plan, initial_state(spec, 0), loop.host_work(plan), RunOptions(num_passes=10))
    assert len(loop.losses) == 10
    # 256 ids at random: ln 256 = 5.55
    assert loop.losses[0] == pytest.approx(5.55, abs=0.1)
    assert loop.losses[-1] < loop.losses[0] - 1.0


def test_the_state_given_is_left_alone_and_the_state_after_has_its_shape(schedule):
    before = start(schedule)
    copy = {name: flat.clone() for name, flat in before.items()}
    execution = execute(schedule, before, training(schedule).host_work(schedule), RunOptions())
    assert all(torch.equal(before[name], copy[name]) for name in before)
    assert {name: flat.shape for name, flat in execution.state.items()} == {
        name: flat.shape for name, flat in before.items()
    }


# --- the measured timeline


def test_measured_spans_respect_every_wait_within_and_between_passes(schedule):
    timeline = run(schedule, RunOptions(num_passes=4))[0].timeline
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    passes = [timeline.cold, *timeline.passes]
    free: dict[str, int] = {}
    for number, spans in enumerate(passes):
        for i, op in enumerate(schedule.ops):
            begun_after = [free.get(str(op.stream), 0)]
            begun_after += [spans.end_ns[position[w]] for w in op.waits]
            if number:
                begun_after += [passes[number - 1].end_ns[position[w]] for w in op.waits_previous]
            assert spans.start_ns[i] >= max(begun_after)
            assert spans.end_ns[i] >= spans.start_ns[i]
            free[str(op.stream)] = spans.end_ns[i]


# --- refused before anything runs


def refuse_host_work() -> HostWork:
    def feed(op: Feed, pass_index: int) -> torch.Tensor:
        raise AssertionError(f"'{op.op_id}' ran")

    def fetch(op: Fetch, pass_index: int, taken: torch.Tensor) -> None:
        raise AssertionError(f"'{op.op_id}' ran")

    return HostWork(feed, fetch)


def assert_refused(
    schedule: RankSchedule, violation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_arena(*args: object) -> None:
        raise AssertionError("memory was allocated")

    monkeypatch.setattr(execute_module, "arena_memory", no_arena)
    with pytest.raises(UnsafeSchedule) as raised:
        execute(schedule, start(schedule), refuse_host_work(), RunOptions())
    assert any(isinstance(found, violation) for found in raised.value.violations)


def test_a_schedule_without_one_of_its_waits_is_refused(schedule, monkeypatch):
    ops = list(schedule.ops)
    index = next(i for i, op in enumerate(ops) if op.kind == "compute" and op.waits)
    ops[index] = ops[index].model_copy(update={"waits": ()})
    damaged = schedule.model_copy(update={"ops": tuple(ops)})
    assert_refused(damaged, ReadTooEarly, monkeypatch)


def test_a_schedule_without_one_of_its_optimizer_tasks_is_refused(schedule, monkeypatch):
    """What is left is safe: the layer is frozen instead, and not copied back."""
    gone = {"optimizer.1", "d2h.param.1.0", "d2h.opt.1.0"}
    kept = [op for op in schedule.ops if op.op_id not in gone]
    assert len(kept) == len(schedule.ops) - len(gone)
    ops = derive_waits(tuple(kept), schedule.tensors, schedule.slots)
    damaged = schedule.model_copy(update={"ops": ops})
    assert verify_rank(damaged) == []
    assert_refused(damaged, TaskMissing, monkeypatch)


def test_arenas_larger_than_the_memory_there_is_are_refused(schedule, monkeypatch):
    little = HostLimits(memlock_bytes=0, cgroup_left_bytes=None, available_bytes=1000)
    monkeypatch.setattr(arena_memory, "host_limits", lambda: little)
    with pytest.raises(HostMemoryError, match=r"available memory leaves 0\.98 KiB"):
        execute(schedule, start(schedule), refuse_host_work(), RunOptions())


# --- errors while it runs


class BrokenError(Exception):
    pass


def test_an_error_in_a_kernel_surfaces_and_stops_everything(schedule, monkeypatch):
    calls = []
    kernel = registered_kernel("block_backward/eager")

    def broken(operands, attributes):
        calls_of_op = kernel(operands, attributes)

        def run():
            calls.append(1)
            if len(calls) == 3:
                raise BrokenError("the third backward fails")
            calls_of_op()

        return run

    monkeypatch.setattr(
        "twinstream.executor.providers.provider.registered_kernel",
        lambda key: broken if key == "block_backward/eager" else registered_kernel(key),
    )
    loop = training(schedule)
    before = threading.active_count()
    error = within_a_minute(
        lambda: execute(schedule, start(schedule), loop.host_work(schedule), RunOptions())
    )
    assert isinstance(error, BrokenError)
    assert len(calls) == 3
    assert loop.losses == []  # of the first step, whose backward never ended
    assert threading.active_count() == before


def test_an_error_of_the_data_surfaces_too(schedule):
    tokens = random_tokens(schedule, 256)

    def source(step: int, index: int) -> torch.Tensor:
        if step == 2:
            raise BrokenError("the text has ended")
        return tokens[index]

    host_work = Training(source, 1e-3, seed=0).host_work(schedule)
    error = within_a_minute(
        lambda: execute(schedule, start(schedule), host_work, RunOptions(num_passes=3))
    )
    assert isinstance(error, BrokenError)


def test_an_error_in_the_copy_of_one_stream_does_not_leave_the_others_waiting(schedule):
    def work(op: Op) -> Work:
        def body(pass_index: int) -> None:
            if op.stream.queue == "d2h":
                raise BrokenError(op.op_id)

        return body

    program = compile_program(schedule)
    backend = CpuBackend(program, [work(op) for op in schedule.ops])
    error = within_a_minute(lambda: dispatch.run_passes(program, backend, dispatch.PassOptions(3)))
    assert isinstance(error, BrokenError)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(2, 31, dtype=torch.int32), r"torch.int32 \[2, 31\], the schedule needs"),
        (torch.zeros(2, 32, dtype=torch.int64), r"torch.int64 \[2, 32\], the schedule needs"),
    ],
)
def test_tokens_of_another_shape_or_type_are_refused(schedule, tokens, message):
    host_work = Training(lambda step, index: tokens, 1e-3, seed=0).host_work(schedule)
    with pytest.raises(TwinstreamError, match=message):
        execute(schedule, start(schedule), host_work, RunOptions())


# --- backends


def test_cuda_is_refused_where_there_is_none_with_what_to_do_instead(schedule, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        NoCudaError, match=r"no CUDA device here; run on the CPU with --backend cpu"
    ):
        choose_backend("cuda")
    with pytest.raises(NoCudaError):
        execute(schedule, start(schedule), refuse_host_work(), RunOptions(backend="cuda"))
    assert choose_backend("auto") == "cpu"


def test_backends_are_chosen_by_name(monkeypatch):
    assert choose_backend("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend("auto") == choose_backend("cuda") == "cuda"
    with pytest.raises(TwinstreamError, match="unknown backend 'tpu'; known: auto, cpu, cuda"):
        choose_backend("tpu")
