"""What of the host's memory the program gets, so that plans of whole units just fit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import LowerBound
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.decide import decider as deciding
from twinstream.planner.decide import host_room
from twinstream.planner.decide.decider import Decider
from twinstream.planner.decide.host_room import HostIsFull, HostRoom, require_room
from twinstream.planner.pack.placement import Placement
from twinstream.planner.search.congestion import Shares, full_shares
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

GIB = 2**30
KIB = 1024
CAP = 1000 * GIB

SOLVED = LowerBound(100.0, 0.0, 0.5, {}, (), (), {}, (), ())  # a GiB of the host saves 0.5 s


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A placement that takes so many GiB of the host."""
    monkeypatch.setattr(host_room, "host_bytes", lambda placement: placement.taken)
    return lambda gib: SimpleNamespace(taken=round(gib * GIB))


def test_a_placement_may_take_all_there_is_and_no_byte_more(taking):
    caps = Caps(host_bytes=CAP)
    require_room(taking(1000), caps)
    with pytest.raises(HostIsFull, match="1 bytes") as full:
        require_room(taking(1000 + 1 / GIB), caps)
    assert full.value.missing_bytes == 1
    require_room(taking(10**6), Caps())


def test_the_program_gets_a_little_less_than_there_is_and_less_with_each_that_does_not_fit():
    room = HostRoom.of(CAP)
    assert room.program_bytes == 990 * GIB
    assert room.less(990 * GIB, 8 * GIB, tried=0) == 978 * GIB
    assert room.less(978 * GIB, 8 * GIB, tried=1) == 960 * GIB
    assert room.less(960 * GIB, 0, tried=2) == 928 * GIB


def test_it_gets_most_of_what_was_left_where_that_is_worth_it(taking):
    """0.4 GiB save 0.2 s, which is 0.2 %."""
    room = HostRoom.of(CAP)
    assert room.more(990 * GIB, taking(992), SOLVED) == 996 * GIB
    assert room.more(990 * GIB, taking(999.5), SOLVED) is not None
    assert room.more(990 * GIB, taking(999.7), SOLVED) is None
    assert room.more(990 * GIB, taking(992), replace(SOLVED, host_s_per_gib=0.0)) is None


def test_without_a_cap_there_is_nothing_to_learn(taking):
    room = HostRoom.of(None)
    assert room.program_bytes is None
    assert room.less(None, GIB, tried=0) is None
    assert room.more(None, taking(1), SOLVED) is None


# --- in a search

CHAINS = {
    chunks: lower(
        small("tiny", num_layers=6),
        Workload(seq_len=64, chunk_tokens=64, chunks_per_round=chunks, rounds_per_step=2),
    )
    for chunks in (1, 2)
}


def decider(chunks: int, device_kib: int, host_kib: int) -> Decider:
    caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_kib * KIB)
    return Decider(CHAINS[chunks], MACHINE, caps, num_rounds=2)


def decided(chunks: int, device_kib: int, host_kib: int) -> tuple[int, float] | None:
    """Bytes of the host that decisions take, and the seconds a step that they come to."""
    mine = decider(chunks, device_kib, host_kib)
    found = mine.fitting(OPEN, 0, full_shares(len(mine.small.tasks)))
    if found is None:
        return None
    return found[1].host_bytes, found[0].decisions.step_s


@pytest.mark.parametrize("chunks", CHAINS)
@pytest.mark.parametrize("host_kib", [500, 700, 800, 900])
def test_whole_units_fit_the_host(chunks, host_kib):
    found = decided(chunks, 1000, host_kib)
    assert found is not None
    assert found[0] <= host_kib * KIB


@pytest.mark.parametrize(
    ("chunks", "device_kib", "host_kib"), [(2, 1000, 675), (2, 1000, 725), (2, 1400, 250)]
)
def test_what_is_left_of_the_host_is_given_to_the_program_too(
    monkeypatch, chunks, device_kib, host_kib
):
    """Once: decisions within more host memory recompute less."""
    with_more = decided(chunks, device_kib, host_kib)
    monkeypatch.setattr(HostRoom, "more", lambda *_: None)
    without = decided(chunks, device_kib, host_kib)
    assert with_more is not None
    assert without is not None
    assert without[0] < with_more[0] <= host_kib * KIB
    assert with_more[1] < 0.996 * without[1]


def test_rounding_that_does_not_change_is_no_reason_to_find_nothing():
    """Whole units are missing again with a little less for the program, until it gets far less."""
    assert decided(2, 1000, 947) is not None
    assert decided(2, 1000, 526) is not None


def test_what_does_not_fit_the_host_is_not_packed(monkeypatch):
    """Packing takes long where memory is tight."""
    happened: list[str] = []
    check, place = deciding.require_room, Decider._placed

    def checked(placement: Placement, caps: Caps) -> None:
        happened.append("checked")
        check(placement, caps)
        happened.append("fits")

    def noted(self: Decider, *args: Any) -> Any:
        happened.append("placed")
        return place(self, *args)

    monkeypatch.setattr(deciding, "require_room", checked)
    monkeypatch.setattr(Decider, "_placed", noted)
    assert decided(2, 1000, 526) is not None
    assert happened[:2] == ["checked", "checked"], "the first does not fit, the second is tried"
    assert "placed" in happened


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Bytes of the host that the program was asked to decide with."""
    found: list[int | None] = []
    decide = Decider._decided

    def noted(self: Decider, choices: Choices, caps: Caps, shares: Shares) -> LowerBound | None:
        found.append(caps.host_bytes)
        return decide(self, choices, caps, shares)

    monkeypatch.setattr(Decider, "_decided", noted)
    return found


def test_the_next_decisions_begin_with_what_the_program_got_for_the_last_that_fitted(asked):
    mine = decider(2, 1000, 675)
    mine.fitting(OPEN, 0, full_shares(len(mine.small.tasks)))
    first, asked[:] = list(asked), []
    mine.fitting(OPEN, 0, full_shares(len(mine.small.tasks)))
    assert first[0] == round(0.99 * 675 * KIB)
    assert asked[0] in first[1:]
    assert len(asked) < len(first)


def test_what_the_program_got_with_other_homes_says_nothing(asked):
    """With all state at home on the host it takes more of it."""
    mine = decider(2, 1000, 675)
    shares = full_shares(len(mine.small.tasks))
    mine.fitting(OPEN, 0, shares)
    assert len(asked) > 1
    asked.clear()
    assert mine.fitting(Choices(homes={"gradient": "host"}), 0, shares) is not None
    assert asked[0] == round(0.99 * 675 * KIB)
