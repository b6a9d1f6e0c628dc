"""Measuring sessions: the same weights in every slot, one host arena for all schedules."""

import pytest
import torch

from benchmarks.gpu.device import measuring
from benchmarks.gpu.device.measuring import MeasuringSession, fill_random
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.host_limits import AvailableMemoryError, HostMemoryError
from twinstream.executor.memory.pinned_pieces import NoBoundaryError, host_ranges, piece_ends
from twinstream.executor.state.random_weights import RandomWeights
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.tensors import HOST


@pytest.fixture(scope="module")
def schedules() -> tuple[RankSchedule, RankSchedule]:
    """Everything on the device, and everything on the host."""
    chain = tiny_chain("packed")
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    resident = planned(chain, MACHINE, Caps(), "resident")
    return resident, planned(chain, MACHINE, caps, "streaming")


def test_schedules_of_a_model_have_the_same_losses_in_one_session(schedules):
    resident, streaming = schedules
    with MeasuringSession("cpu") as session:
        found = [session.measure(one, 3) for one in (resident, streaming, resident)]
    assert found[0].losses == found[1].losses == found[2].losses
    assert len(set(found[0].losses)) == 3
    assert found[1].timeline.step_ns > 0
    assert found[0].run_s > 0


def test_the_host_arena_is_taken_once_and_grows_only_where_it_must(schedules):
    resident, streaming = schedules
    needed = Arenas.sizes(streaming)[HOST]
    with MeasuringSession("cpu", host_bytes=needed + 1000) as session:
        session.measure(resident, 2)
        (first,) = session._pieces
        assert first.numel() == needed + 1000
        session.measure(streaming, 2)
        assert session._pieces[0] is first
    with MeasuringSession("cpu") as session:
        session.take_host(16)
        session.measure(streaming, 2)
        assert session._pieces[0].numel() == needed


def test_a_host_arena_that_is_too_large_is_refused_before_it_is_taken():
    with MeasuringSession("cpu") as session, pytest.raises(HostMemoryError, match="GiB"):
        session.take_host(2**50)


def test_memory_is_taken_whatever_is_said_and_less_of_it_where_so_much_cannot_be_had(
    schedules, monkeypatch
):
    _, streaming = schedules
    needed = Arenas.sizes(streaming)[HOST]
    asked = []

    def take(self, size_bytes, *, heeds_available=True):
        asked.append((size_bytes, heeds_available))
        if heeds_available or size_bytes > needed:
            raise AvailableMemoryError("available memory leaves 20.00 GiB.")
        self._pieces = [torch.empty(size_bytes, dtype=torch.uint8)]

    monkeypatch.setattr(MeasuringSession, "take_host", take)
    with MeasuringSession("cpu", needed + 1000) as session:
        assert session._host_arena(streaming).numel() == needed
    more = needed + 1000
    assert asked == [(more, True), (more, False), (needed, True), (needed, False)]


def test_an_arena_in_pieces_is_cut_where_the_schedule_allows(schedules):
    _, streaming = schedules
    size = Arenas.sizes(streaming)[HOST]
    most = size * 2 // 3
    cut = piece_ends(size, host_ranges(streaming), most)[0]
    with MeasuringSession("cpu") as whole, MeasuringSession("cpu") as session:
        session._pieces = [torch.empty(most, dtype=torch.uint8) for _ in range(2)]
        memory = session._cut(streaming, size)
        assert memory is not None
        assert memory.numel() == size
        assert memory[0:cut].data_ptr() == session._pieces[0].data_ptr()
        assert memory[cut : cut + 1].data_ptr() == session._pieces[1].data_ptr()
        assert session.measure(streaming, 3).losses == whole.measure(streaming, 3).losses
        session._pieces[1] = session._pieces[1][: size - cut - 1]
        assert session._cut(streaming, size) is None


def test_a_schedule_that_no_cut_suits_is_a_sentence(schedules, monkeypatch):
    _, streaming = schedules
    with MeasuringSession("cpu") as session:
        monkeypatch.setattr(session, "_cut", lambda schedule, size: None)
        with pytest.raises(NoBoundaryError, match="--host-mem"):
            session.measure(streaming, 2)


def test_carried_slots_hold_weights_and_a_zero_optimizer_state(schedules):
    _, streaming = schedules
    memory = {
        tier: torch.full((size,), 0xFF, dtype=torch.uint8)
        for tier, size in Arenas.sizes(streaming).items()
    }
    arenas = Arenas(streaming, memory)
    fill_random(streaming, arenas, small("tiny"))
    tensors = {tensor.tensor_id: tensor for tensor in streaming.tensors}
    weights = RandomWeights(small("tiny"), measuring._SEED)
    for item in streaming.carried:
        tensor, found = tensors[item.tensor], arenas.view(item.tensor, item.slot)
        root = tensor.parent or item.tensor
        expected = torch.zeros_like(found)
        if root.startswith("param."):
            weights.write(root.removeprefix("param."), tensor.offset_bytes, expected)
        assert torch.equal(found, expected)
