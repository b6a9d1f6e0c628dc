"""A run on CUDA from warm-up to timeline, with torch's few calls replaced."""

import pytest
import torch

from tests.helpers.fake_cuda import on_cuda
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import training
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.device_memory import DeviceMemoryError
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions, choose_nvtx
from twinstream.executor.replay.dispatch import Passes
from twinstream.executor.run import cuda_run
from twinstream.executor.run.cuda_run import CudaJob, run_on_cuda
from twinstream.executor.run.measured import measured_timeline
from twinstream.executor.run.work import bind_works
from twinstream.executor.state.training_state import fill_carried, initial_state
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.timeline import Provenance


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    return on_cuda(monkeypatch, FakeGpu())


def ran(gpu: FakeGpu, schedule: RankSchedule, options: RunOptions) -> tuple[Passes, Provenance]:
    memory = {
        tier: torch.zeros(size, dtype=torch.uint8) for tier, size in Arenas.sizes(schedule).items()
    }
    arenas, program = Arenas(schedule, memory), compile_program(schedule)
    host_work = training(schedule).host_work(schedule)
    works = gpu.works(program, bind_works(schedule, arenas, host_work), arenas)
    state = initial_state(small(schedule.model.name), 1)
    job = CudaJob(schedule, program, arenas, works, lambda: fill_carried(schedule, arenas, state))
    return run_on_cuda(job, options)


@pytest.fixture
def schedule() -> RankSchedule:
    return planned(tiny_chain("packed"), MACHINE, Caps(), "streaming")


def test_a_timeline_says_where_and_how_it_was_measured(gpu, schedule):
    run = ran(gpu, schedule, RunOptions("cuda", num_passes=4, graphs="on"))
    found = measured_timeline(schedule, *run).provenance
    assert found.where == "a GPU of the tests"
    assert f"torch {torch.__version__}, " in found.detail
    assert " graphs for " in found.detail
    assert found.timed_passes == 2
    assert found.host_cost is not None
    memory = found.device_memory
    assert memory is not None
    assert memory.arena_bytes == arena_bytes(schedule, DEVICE)
    assert memory.peak_bytes == 10**9
    assert memory.libraries_bytes == 5 * 10**8 - memory.arena_bytes
    assert set(memory.temporary_bytes) == set(schedule.calls)


@pytest.mark.parametrize(("graphs", "why"), [("off", "not asked for"), ("auto", "no graphs")])
def test_without_graphs_it_says_why(gpu, schedule, graphs, why, monkeypatch):
    monkeypatch.setattr(cuda_run, "graphs_pay", lambda program, times: False)
    assert why in ran(gpu, schedule, RunOptions("cuda", graphs=graphs))[1].detail
    assert gpu.graphs == []


def test_libraries_without_room_are_told_of_in_a_sentence(gpu, schedule, monkeypatch):
    def none_left(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(cuda_run, "warm_up", none_left)
    with pytest.raises(DeviceMemoryError, match=r"Tried to allocate 2\.00 GiB\. Plan with a smal"):
        ran(gpu, schedule, RunOptions("cuda"))


def test_every_op_and_every_graph_has_a_named_range_when_asked(gpu, schedule):
    ran(gpu, schedule, RunOptions("cuda", num_passes=4, graphs="on", nvtx=True))
    graphs = [name for name in gpu.named if name.startswith("graph ")]
    assert len(graphs) == sum(graph.num_launches for graph in gpu.graphs)
    assert {op.op_id for op in schedule.ops} <= set(gpu.named)


def test_named_ranges_on_the_cpu_are_refused():
    with pytest.raises(TwinstreamError, match="leave --nvtx away"):
        choose_nvtx("cpu", requested=True)
    assert choose_nvtx("cuda", requested=True)
