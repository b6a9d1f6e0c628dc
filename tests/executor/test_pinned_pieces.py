"""Where the pinned arena is cut: never inside what is used in one go, and in few pieces."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.pinned_pieces import (
    ALIGNMENT_BYTES,
    MAX_PIECE_BYTES,
    HostRange,
    NoBoundaryError,
    host_ranges,
    piece_ends,
)
from twinstream.schedule.document import Caps
from twinstream.schedule.tensors import HOST

GIB = 2**30
UNIT = ALIGNMENT_BYTES


@st.composite
def used(draw) -> tuple[int, list[HostRange]]:
    """(arena size, ranges in it), in steps that are not all multiples of the alignment."""
    size = draw(st.integers(1, 40)) * UNIT
    bounds = st.tuples(st.integers(0, size - 1), st.integers(1, 6 * UNIT))
    ranges = [
        HostRange(start, min(start + length, size), f"slot{i}")
        for i, (start, length) in enumerate(draw(st.lists(bounds, max_size=8)))
    ]
    return size, ranges


def admissible(size: int, ranges: list[HostRange]) -> list[int]:
    return [
        cut
        for cut in range(0, size, UNIT)
        if not any(r.start < cut < r.end for r in ranges) and cut > 0
    ]


def fewest(size: int, ranges: list[HostRange], most: int) -> int | None:
    """By trying all sets of cuts."""
    cuts = admissible(size, ranges)
    for count in range(min(len(cuts), 6) + 1):
        for chosen in combinations(cuts, count):
            if all(b - a <= most for a, b in pairwise((0, *chosen, size))):
                return count + 1
    return None


@given(used(), st.integers(2, 16))
@settings(max_examples=300)
def test_pieces_cover_the_arena_and_no_range_lies_in_two(arena, units):
    size, ranges = arena
    try:
        ends = piece_ends(size, ranges, units * UNIT)
    except NoBoundaryError:
        cuts = [0, *admissible(size, ranges), size]
        assert any(b - a > units * UNIT for a, b in pairwise(cuts))
        return
    assert ends[-1] == size
    for start, end in pairwise([0, *ends]):
        assert 0 < end - start <= units * UNIT
        assert start % UNIT == 0
    for cut in ends[:-1]:
        assert not any(r.start < cut < r.end for r in ranges)


@given(used(), st.integers(6, 16))
@settings(max_examples=60)
def test_there_are_as_few_pieces_as_can_be(arena, units):
    size, ranges = arena
    try:
        found = len(piece_ends(size, ranges, units * UNIT))
    except NoBoundaryError:
        return
    assert found == fewest(size, ranges, units * UNIT)


def test_a_large_arena_is_cut_where_slots_end():
    slots = [HostRange(i * 15 * GIB, (i + 1) * 15 * GIB, f"s{i}") for i in range(10)]
    assert piece_ends(150 * GIB, slots) == [60 * GIB, 120 * GIB, 150 * GIB]
    assert MAX_PIECE_BYTES == 64 * GIB


def test_a_slot_that_is_too_large_is_named_with_its_size():
    ranges = [HostRange(0, GIB, "small"), HostRange(GIB, 71 * GIB, "host.kv.0")]
    told = (
        r"at most 64\.00 GiB, and host slots 'host.kv.0' to 'host.kv.0' hang together over 70\.00"
    )
    with pytest.raises(NoBoundaryError, match=told):
        piece_ends(100 * GIB, ranges)


def test_slots_that_overlap_without_end_are_named_with_their_extent():
    ranges = [HostRange(i * 10 * GIB, (i * 10 + 11) * GIB, f"s{i}") for i in range(8)]
    with pytest.raises(NoBoundaryError, match=r"'s0' to 's7' hang together over 81\.00 GiB"):
        piece_ends(81 * GIB, ranges)


# --- of schedules


@pytest.mark.parametrize("policy", ["streaming", "optimal"])
def test_planned_host_arenas_can_be_cut_small(policy):
    chain = tiny_chain("sliced")
    caps = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    schedule = planned(chain, MACHINE, caps, policy)
    ranges = host_ranges(schedule)
    size = Arenas.sizes(schedule)[HOST]
    largest = max(r.end - r.start for r in ranges)
    ends = piece_ends(size, ranges, largest + 2 * ALIGNMENT_BYTES)
    assert len(ends) > 2
    cuts = ends[:-1]
    for found in ranges:
        assert not any(found.start < cut < found.end for cut in cuts)
