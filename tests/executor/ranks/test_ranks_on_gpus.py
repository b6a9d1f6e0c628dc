"""The CUDA path of ranks, on stand-ins: GPUs of the tests, events that happen when told to."""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import active_count, get_ident

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tests.executor.ranks.faulty import summing
from tests.executor.ranks.gpu_ranks import train_on_gpus
from tests.executor.ranks.talks import fed, taken, value
from tests.executor.ranks.test_pipelines import SPEC, WORKLOAD
from tests.helpers.fake_gpu import FakeGpu
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import bits_of
from tests.helpers.waiting import comes
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.executor.backends import cuda
from twinstream.executor.launch.rank_processes import RankProcesses, execute_ranks
from twinstream.executor.program.compiled import compile_program
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks import gpus, groups, world
from twinstream.executor.ranks.device_waiting import DeviceWaiting
from twinstream.executor.ranks.errors import CommunicationError, GpusError
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.executor.ranks.waiting import Wait
from twinstream.executor.replay.dispatch import PassOptions, run_passes
from twinstream.executor.replay.graph_segments import cut_segments
from twinstream.executor.state.training_state import initial_state
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import Recipe
from twinstream.run_settings import RunSettings
from twinstream.schedule.cluster.projecting import RankPart, rank_part
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE


def pipeline(order: str, virtual: int, share: float = 1.0) -> Schedule:
    """Of four stages, each in a share of the memory that it would use."""
    layout = Layout(pp=4, pipeline=order, virtual_stages=virtual)
    stages = Job.of_step(SPEC, WORKLOAD, Recipe(), layout)
    ample = plan_pipeline(stages, MACHINE)
    if share == 1.0:
        return ample
    used = [arena_bytes(part, DEVICE) for part in ample.schedules.values()]
    caps = {stage: Caps(device_bytes=int(size * share)) for stage, size in enumerate(used)}
    return plan_pipeline(stages, MACHINE, caps)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(
    ("order", "virtual", "share"), [("1f1b", 1, 0.6), ("gpipe", 1, 1.0), ("ring", 2, 0.6)]
)
def test_pipelines_on_gpus_have_the_bits_of_one_device(order, virtual, share, graphs):
    """In whatever order their streams run, by ops and by graphs, with messages without tags."""
    schedule = pipeline(order, virtual, share)
    options = RunOptions("cuda", num_passes=4, graphs=graphs)
    ran = train_on_gpus(schedule, initial_state(SPEC, seed=1), options, seed=virtual)
    expected = bits_of(planned(lower(SPEC, WORKLOAD), MACHINE, Caps(), "resident"), 4)
    assert tuple(loss for one in ran for loss in one.losses) == expected.losses
    for one in ran:
        assert ("graphs for" in one.graphs) == (graphs == "on")
        assert "refused" not in one.graphs
        for name, flat in one.state.items():
            assert torch.equal(flat, expected.state[name]), name


def test_graphs_are_cut_at_communication_which_keeps_its_order():
    """One communicator has one order on all its ranks, whatever streams its ops are of."""
    schedule = pipeline("ring", 2, 0.6)
    for rank in range(4):
        program = compile_program(rank_part(schedule, rank).schedule)
        talks = [isinstance(launch.op, Communicate) for launch in program.launches]
        segments = cut_segments(program, [not talk for talk in talks])
        with_talk = [one for one in segments if any(talks[at] for at in one.positions)]
        assert all(len(one.positions) == 1 and not one.captured for one in with_talk)
        alone = [one.positions[0] for one in with_talk]
        assert alone == sorted(alone)
        assert len(alone) == sum(talks) > 0


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(gpus, "expand_segments", lambda: chosen.append("expandable"))
    assert world.device_of("cpu", 5) == torch.device("cpu")
    assert world.device_of("cuda", 1) == torch.device("cuda", 1)
    assert chosen == [1, "expandable"]  # before groups allocate there
    with pytest.raises(GpusError, match=r"3 ranks .* need a GPU each, and it has 2"):
        world.device_of("cuda", 2)


def test_more_ranks_than_gpus_are_refused_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(RankProcesses, "__init__", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(GpusError, match="2 ranks"):
        execute_ranks(summing(2), fed, RunOptions("cuda"))


def test_graphs_and_profilers_ranges_are_as_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = RunSettings(num_steps=5, backend="cuda", timed_steps=2, graphs="off", nvtx=True)
    assert settings.options() == RunOptions("cuda", 5, timed_passes=2, graphs="off", nvtx=True)


@pytest.mark.parametrize(
    ("environment", "gpu"), [({"LOCAL_RANK": "1"}, 1), ({}, 3)], ids=["local", "alone"]
)
def test_ranks_of_torchrun_take_the_gpu_of_their_place_on_the_machine(
    environment, gpu, monkeypatch
):
    told = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"} | environment
    for name, text in told.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(world, "rendezvous", lambda *_, **__: iter([(None, 3, 4)]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(world.World, "require_same", lambda *_: None)
    opened: dict[str, object] = {}

    def init(backend, **told):
        opened.update(told, backend=backend)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with world.world_of_environment("cuda", world.Patience(timeout_s=5)) as met:
        assert met.device == torch.device("cuda", gpu)
        assert met.group_timeout > timedelta(days=1)  # NCCL's would count from the enqueueing
    assert (opened["backend"], opened["timeout"]) == ("gloo", timedelta(seconds=5))


@pytest.mark.parametrize(("device", "is_gone"), [("cpu", True), ("cuda:0", False)])
def test_an_error_on_a_gpu_is_told_before_nccl_is_left(device, is_gone, monkeypatch):
    """To leave it would wait for the other ranks."""
    gone: list[None] = []
    monkeypatch.setattr(world.World, "require_same", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: gone.append(None))
    met = world.World(0, 1, HashStore(), device=torch.device(device))
    with pytest.raises(ZeroDivisionError), world.in_groups(met):
        raise ZeroDivisionError
    assert bool(gone) == is_gone
    with world.in_groups(met):
        gone.clear()
    assert gone


def test_all_ranks_open_their_groups_and_meet_in_one_order(monkeypatch):
    schedule = pipeline("ring", 2)
    made: list[tuple[str, tuple[int, ...]]] = []
    met: list[tuple[int, ...]] = []

    def new_group(ranks, timeout, backend):
        made.append((backend, tuple(ranks)))
        return "group"

    def meet(group, members, device, *, is_message):
        assert (group, is_message) == ("group", True)
        met.append((len(made), *sorted(members)))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(groups, "connect_group", meet)
    of_all = []
    for rank in range(4):
        made.clear()
        met.clear()
        opened = groups.open_groups(schedule, rank, torch.device("cuda", rank), timedelta(days=1))
        assert len(met) == len(opened) == 4  # of a ring, to and from both neighbours
        assert all(rank in ranks for _, *ranks in met)
        # each meets as soon as its group is made, before the next one is
        assert [("nccl", tuple(ranks)) for _, *ranks in met] == [made[at - 1] for at, *_ in met]
        of_all.append(list(made))
    assert all(one == of_all[0] for one in of_all)


def meeting(part: RankPart) -> RankInputs:
    """In a rank's process: its whole group and a pair meet."""
    device, size = torch.device("cpu"), dist.get_world_size()
    for _ in range(2):
        group = dist.new_group()
        gpus.connect_group(group, tuple(range(size)), device, is_message=False)
        pair = dist.new_group([0, size - 1])
        if part.rank in (0, size - 1):
            gpus.connect_group(pair, (size - 1, 0), device, is_message=True)
    return fed(part)


def test_a_first_meeting_leaves_nothing_behind(four):
    outcomes = four.execute(summing(4), partial(meeting), RunOptions(num_passes=2))
    total = sum(value(rank, "x", 1, 1000, "float32") for rank in range(4))
    assert all(torch.equal(taken(outcome, "x", 1), total) for outcome in outcomes)


@dataclass
class Mark:
    """An event that happens when told to."""

    happened: bool = False

    def query(self) -> bool:
        return self.happened


@dataclass
class Watched:
    """A rank's waiting, the events around its ops, and what has failed."""

    marks: list[Mark] = field(default_factory=list)
    failures: list[CommunicationError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads: list[int] = []  # that were put on the rank's GPU
        enter = lambda: self.threads.append(get_ident())  # noqa: E731
        self.waiting = DeviceWaiting(self._mark, 10.0, self.failures.append, enter)
        self.part = rank_part(summing(2), 0)

    def _mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]

    def enqueue(self, pass_number: int) -> None:
        with self.waiting.during("dp", Wait("x", "all_reduce", pass_number, (1,), 0)):
            assert self.look() == []  # enqueued is not begun

    def look(self) -> list[int]:
        """The passes of the ops that wait for others."""
        self.waiting.look(self.part)
        return [one.pass_number for one in self.waiting.now.values()]


def test_an_op_waits_for_others_from_when_its_stream_has_come_to_it(monkeypatch):
    now_ns = 0
    monkeypatch.setattr("twinstream.executor.ranks.device_waiting.perf_counter_ns", lambda: now_ns)
    monkeypatch.setattr("twinstream.executor.ranks.waiting.perf_counter_ns", lambda: now_ns)
    rank = Watched()
    rank.enqueue(0)
    rank.enqueue(1)
    begun, ended, next_begun, _ = rank.marks
    now_ns = 60_000_000_000
    assert rank.look() == []  # its own kernels took a minute
    begun.happened = True
    assert rank.look() == [0]
    now_ns += 9_000_000_000
    assert rank.look() == [0]
    ended.happened = True
    assert rank.look() == []
    next_begun.happened = True
    assert rank.look() == [1]
    now_ns += 9_000_000_000
    assert rank.look() == [1]
    assert not rank.failures
    now_ns += 2_000_000_000
    rank.look()
    rank.look()
    assert [str(one) for one in rank.failures] == [
        "rank 0 (dp 0) waited 11 s for rank 1 in op 'x' (all_reduce) of pass 1"
    ]
    assert (rank.failures[0].cause, rank.failures[0].peers) == ("timeout", (1,))


def test_an_op_whose_call_holds_the_host_up_is_seen():
    rank = Watched()
    with rank.waiting.during("dp", Wait("x", "all_reduce", 2, (1,), 0)):
        rank.marks[0].happened = True
        assert rank.look() == [2]
    assert rank.look() == [2]
    rank.marks[1].happened = True
    assert rank.look() == []


def test_gpus_that_never_meet_are_told():
    rank = Watched()
    with rank.waiting.opening(0, 0.05):
        assert comes(lambda: rank.failures)
    assert str(rank.failures[0]).startswith(
        "rank 0 waited 0.05 s for the GPUs of all ranks to meet"
    )
    rank, before = Watched(), active_count()
    with rank.waiting.opening(0, 60):
        assert active_count() == before + 1
    assert comes(lambda: active_count() == before)
    assert not rank.failures


def test_a_thread_looks_while_the_passes_run():
    rank = Watched()
    rank.enqueue(3)
    rank.marks[0].happened = True
    with rank.waiting.watched_over(rank.part):
        assert comes(lambda: rank.waiting.now)
    assert [one.pass_number for one in rank.waiting.now.values()] == [3]
    assert len(rank.threads) == 1 and rank.threads != [get_ident()]


@pytest.mark.parametrize("drift", [1.0, 1.001])
def test_a_gpu_s_times_are_on_the_clock_of_all_ranks(drift, monkeypatch):
    """Its clock begins elsewhere, and may go a little faster."""
    gpu, zero_ns = FakeGpu(seed=3), 5_000_000
    monkeypatch.setattr(
        cuda, "perf_counter_ns", lambda: round(gpu.now_ns / drift) + zero_ns + 70_000
    )
    schedule = planned(lower(SPEC, WORKLOAD), MACHINE, Caps(), "resident")
    program = compile_program(schedule)
    works = gpu.works(program, [lambda pass_index: None for _ in program.launches])
    backend = cuda.CudaBackend(program, works, gpu, zero_ns)
    gpu.now_ns = 0
    times = run_passes(program, backend, PassOptions(3)).times
    ends = [max(one.spans.end_ns) for one in times if one.spans is not None]
    assert ends == sorted(ends)
    on_host_ns = round(gpu.now_ns / drift) + 70_000  # now, since the zero of all ranks
    assert abs(ends[-1] - on_host_ns) <= backend.clock_error_ns + 1000
    assert backend.clock_error_ns < 0.0003 * on_host_ns
