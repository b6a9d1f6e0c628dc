"""Between steps a run can be at rest, looked at, and ended; on a GPU of the tests, too."""

from time import perf_counter_ns

import pytest
import torch

from tests.executor.test_cuda_logic import on_fake_gpu, schedule_of
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.runs import bits_of, run, training
from twinstream.executor.backends.cpu import CpuBackend
from twinstream.executor.backends.cuda import CudaBackend
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.replay import dispatch
from twinstream.executor.run.execute import execute_in, prove
from twinstream.executor.state.training_state import (
    carried_names,
    initial_state,
    put_carried,
    take_carried,
)
from twinstream.models.decoders.spec import ModelSpec


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_at_rest_the_state_is_that_of_the_steps_so_far_and_a_run_can_end_there(policy):
    """Filled and read tensor by tensor, as a checkpoint does; looking changes nothing."""
    schedule = schedule_of(policy)
    prove(schedule, "cpu")
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    arenas, loop = Arenas(schedule, memory), training(schedule)
    state = initial_state(ModelSpec.model_validate(schedule.model.spec), seed=1)
    seen = {}

    def between(number, synchronize):
        synchronize()
        assert len(loop.losses) == number
        names = carried_names(schedule)
        seen[number] = {n: take_carried(schedule, arenas, n).clone() for n in names}
        return number < 3

    def fill(into):
        for name in carried_names(schedule):
            put_carried(schedule, into, name, state[name])

    options = RunOptions(num_passes=5, between=between)
    execute_in(schedule, memory, fill, loop.host_work(schedule), options)
    assert list(seen) == [1, 2, 3]
    for number, found in seen.items():
        expected = bits_of(schedule, number).state
        assert found.keys() == expected.keys()
        assert all(torch.equal(flat, expected[name]) for name, flat in found.items())


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_what_is_saved_is_read_in_place_and_what_lies_in_parts_in_pieces(policy):
    """So a save holds one piece beside the arenas, whatever the model's size."""
    schedule, most = schedule_of(policy), 5000
    memory = {t: torch.zeros(n, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()}
    arenas = Arenas(schedule, memory)
    state = initial_state(ModelSpec.model_validate(schedule.model.spec), seed=1)
    ends = [(one.data_ptr(), one.data_ptr() + one.numel()) for one in memory.values()]
    whole = {t.tensor_id for t in schedule.tensors if t.parent is None}
    split = {t.parent for t in schedule.tensors if t.parent is not None}
    for name in carried_names(schedule):
        put_carried(schedule, arenas, name, state[name])
        found = take_carried(schedule, arenas, name)
        assert torch.equal(found, state[name])
        if name in whole - split:
            assert any(low <= found.data_ptr() < high for low, high in ends), name
        starts = range(0, found.numel(), most)
        pieces = [
            take_carried(schedule, arenas, name, start, min(start + most, found.numel())).clone()
            for start in starts
        ]
        assert max(piece.numel() for piece in pieces) <= most
        assert torch.equal(torch.cat(pieces), state[name])


def test_without_rest_passes_overlap_as_ever():
    schedule = schedule_of("streaming")
    asked = []

    def between(number, synchronize):
        asked.append(number)
        return True

    found = run(schedule, RunOptions(num_passes=4, between=between))[1]
    assert asked == [1, 2, 3]
    assert found.losses == bits_of(schedule, 4).losses


def test_what_is_done_at_rest_is_no_part_of_a_step(monkeypatch):
    """The clock of the dispatch loop is put back by an hour while the run is at rest."""
    schedule, clock, hour_ns, at_rest = schedule_of("resident"), perf_counter_ns, 3600 * 10**9, []
    monkeypatch.setattr(dispatch, "perf_counter_ns", lambda: clock() - hour_ns * len(at_rest))

    def between(number, synchronize):
        if number == 2:
            synchronize()
            at_rest.append(number)
        return True

    timeline = run(schedule, RunOptions(num_passes=3, between=between))[0].timeline
    assert timeline.step_ns == pytest.approx(hour_ns / 2, rel=0.01)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_on_a_gpu_too(graphs):
    schedule, numbers = schedule_of("streaming"), []

    def between(number, synchronize):
        synchronize()
        numbers.append(number)
        return number < 3

    options = RunOptions("cuda", num_passes=5, graphs=graphs, between=between)
    found = on_fake_gpu(schedule, options, FakeGpu(3, 0.5))
    assert numbers == [1, 2, 3]
    assert found.bits.losses == bits_of(schedule, 3).losses
    assert all(torch.equal(a, b) for a, b in zip(
        found.bits.state.values(), bits_of(schedule, 3).state.values(), strict=True
    ))  # fmt: skip


def test_after_a_rest_streams_are_made_current_whatever_was_meanwhile():
    program, gpu = compile_program(schedule_of("resident")), FakeGpu()
    backend = CudaBackend(program, [], gpu)
    number = next(launch.stream for launch in program.launches if not launch.on_host)
    mine = backend.use(number)
    gpu.use(gpu.stream("another"))  # as another run does in between
    backend.synchronize()
    assert backend.use(number) is mine is gpu.current
    backend.abort()


def test_what_another_run_thaws_is_frozen_again(monkeypatch):
    frozen = []
    monkeypatch.setattr(dispatch.gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(dispatch.gc, "freeze", lambda: frozen.append(1))
    run(schedule_of("resident"), RunOptions(num_passes=3, between=lambda number, synchronize: True))
    assert len(frozen) == 3  # at the begin, and after each of two asks


def test_an_error_is_told_at_rest(monkeypatch):
    schedule = schedule_of("resident")

    def work(op):
        def body(pass_index):
            raise RuntimeError("broken")

        return body

    program = compile_program(schedule)
    backend = CpuBackend(program, [work(op) for op in schedule.ops])
    options = dispatch.PassOptions(3, between=lambda number, synchronize: synchronize() or True)
    with pytest.raises(RuntimeError, match="broken"):
        dispatch.run_passes(program, backend, options)
