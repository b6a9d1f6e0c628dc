"""Arenas as windows of NCCL's communicators, on stand-ins for torch's pool and NCCL's backend."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.executor.ranks.test_pipelines import SPEC, WORKLOAD
from tests.helpers.plans import MACHINE
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.executor.program.options import DevicePool
from twinstream.executor.ranks.errors import GpusError
from twinstream.executor.ranks.groups import SYMMETRIC, ChannelGroup, SymmetricPool, rank_pool
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import all_channels

GPU = torch.device("cuda", 0)


class Backend:
    """What a process group has on a GPU; it notes what is registered with it."""

    mem_allocator = "nccl's"

    def __init__(self, told: list[object], error: Exception | None = None) -> None:
        self.told, self.error = told, error

    def register_mem_pool(self, pool: object, *, symm: bool) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(("registered", pool, symm))

    def deregister_mem_pool(self, pool: object) -> None:
        self.told.append(("deregistered", pool))


def group_of(members: tuple[int, ...], backend: Backend | None) -> ChannelGroup:
    if backend is None:
        return ChannelGroup(members, 0, None)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    return ChannelGroup(members, 0, group)  # type: ignore[arg-type]


@pytest.fixture
def told(monkeypatch) -> list[object]:
    """What happens to torch's pools, in order."""
    found: list[object] = []

    @contextlib.contextmanager
    def used(pool: object):
        found.append(("used", pool))
        yield
        found.append(("left", pool))

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"a pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", used)
    return found


def test_an_arena_is_a_window_of_each_group_while_it_is_there(told):
    pool = SymmetricPool(GPU, [group_of((0, 1), Backend(told)), group_of((0,), None)])
    for _ in range(2):  # a rank may run twice
        told.clear()
        with pool.allocating():
            told.append("the arena")
        pool.release()
        own = "a pool of nccl's"
        assert told == [
            ("used", own), "the arena", ("left", own), ("registered", own, True),
            ("deregistered", own),
        ]  # fmt: skip


def test_a_rank_alone_allocates_as_ever(told):
    pool = SymmetricPool(GPU, [group_of((0,), None)])
    with pool.allocating():
        told.append("the arena")
    pool.release()
    assert told == ["the arena"]


def test_what_nccl_cannot_do_is_said_with_what_to_do(told):
    pool = SymmetricPool(GPU, [group_of((0, 1), Backend(told, RuntimeError("no NVLS\nmore")))])
    with (
        pytest.raises(GpusError, match=r"arena \(no NVLS\).* NVLink .*Unset it"),
        pool.allocating(),
    ):
        pass


def test_only_collectives_of_ranks_with_one_arena_have_it_and_only_where_asked_for(
    told, monkeypatch
):
    """Replicas of a stage do; neighbours of a pipeline, who exchange messages, do not."""
    layout = Layout(pp=2, dp=2)
    schedule = plan_pipeline(Job.of_step(SPEC, WORKLOAD, Recipe(), layout), MACHINE)
    backends = {channel: Backend(told) for channel in all_channels(schedule)}
    groups = {
        channel: group_of(channel.members, one)
        for channel, one in backends.items()
        if 0 in channel.members
    }
    assert any(channel.communicator.shift for channel in groups)
    monkeypatch.delenv(SYMMETRIC, raising=False)
    assert type(rank_pool(schedule, groups, GPU)) is DevicePool
    monkeypatch.setenv(SYMMETRIC, "1")
    assert type(rank_pool(schedule, groups, torch.device("cpu"))) is DevicePool
    pool = rank_pool(schedule, groups, GPU)
    with pool.allocating():
        pass
    expected = sum(not channel.communicator.shift for channel in groups)
    assert [entry[0] for entry in told].count("registered") == expected > 0
