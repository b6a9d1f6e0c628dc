"""Offline allocation: bytes for intervals in time."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstream.planner.lifetimes.live_bytes import align_up, live_peak
from twinstream.planner.pack.address_map import SoftItem
from twinstream.planner.pack.soft_packing import pack_soft

ALIGNMENT = 256


def interval(most_bytes: int):
    return st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, most_bytes)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    )


INTERVALS = st.lists(st.one_of(interval(300), interval(5000)), max_size=30)


def rounded_up(size_bytes: int) -> int:
    while size_bytes % ALIGNMENT:
        size_bytes += 1
    return size_bytes


def alive_at(intervals, moment: int) -> int:
    return sum(rounded_up(size) for begin, end, size in intervals if begin <= moment < end)


def pack(
    intervals: list[tuple[int, int, int]], cap_bytes: int | None = None
) -> tuple[list[int], int]:
    """Offsets and the extent, with no time to cut short."""
    items = [SoftItem((((begin, end),),), size) for begin, end, size in intervals]
    packed = pack_soft(items, cap_bytes)
    return packed.offsets.tolist(), packed.extent_bytes


@given(INTERVALS)
@settings(max_examples=300)
def test_what_is_alive_at_the_same_time_shares_no_bytes(intervals):
    offsets, extent = pack(intervals)
    placed = list(zip(intervals, offsets, strict=True))
    for index, ((begin, end, size), offset) in enumerate(placed):
        assert offset % ALIGNMENT == 0
        assert 0 <= offset <= offset + size <= extent
        for (other_begin, other_end, other_size), other in placed[:index]:
            if begin < other_end and other_begin < end:
                assert offset + size <= other or other + other_size <= offset


@given(INTERVALS)
def test_the_extent_is_no_less_than_what_is_alive_at_once(intervals):
    _, extent = pack(intervals)
    peak, position = live_peak(intervals)
    moments = range(max((end for _, end, _ in intervals), default=0))
    assert peak == max((alive_at(intervals, m) for m in moments), default=0)
    assert not peak or position == min(m for m in moments if alive_at(intervals, m) == peak)
    assert peak <= extent <= sum(rounded_up(size) for _, _, size in intervals)


def test_bytes_are_given_again_once_an_interval_has_ended():
    offsets, extent = pack([(0, 2, 512), (2, 4, 512), (0, 4, 256)])
    assert offsets == [0, 0, 512]
    assert extent == 768


def test_equal_sizes_that_nest_need_no_more_than_their_peak():
    """What backward consumes in the reverse order of forward: a stack."""
    intervals = [(i, 20 - i, 1000) for i in range(10)]
    assert pack(intervals)[1] == live_peak(intervals)[0] == 10 * 1024


def test_sizes_are_rounded_up_to_the_alignment():
    assert [align_up(size) for size in (1, 255, 256, 257)] == [256, 256, 256, 512]
    assert [align_up(size, 4096) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_nothing_needs_nothing():
    assert pack([]) == ([], 0)
    assert live_peak([]) == (0, 0)


def test_where_the_largest_first_waste_bytes_others_go_elsewhere():
    intervals = [(7, 8, 1024), (2, 8, 256), (2, 3, 1280), (3, 9, 512), (2, 8, 256), (10, 11, 512)]
    assert live_peak(intervals)[0] == 2048
    assert pack(intervals)[1] == 2304
    assert pack(intervals, 2048)[1] == 2048
    assert pack(intervals, 2048) == pack(intervals, 2048)


@pytest.mark.parametrize("seed", range(12))
def test_of_many_pieces_the_extent_is_little_more_than_what_is_alive_at_once(seed):
    chance = Random(seed)
    sizes = [chance.choice([1, 2, 3, 5, 8, 13, 40]) * 2**20 + 256 * seed for _ in range(8)]
    begins = [chance.randrange(200) for _ in range(800)]
    intervals = [
        (begin, min(201, begin + 1 + int(chance.expovariate(1 / 10))), chance.choice(sizes))
        for begin in begins
    ]
    most = round(1.03 * live_peak(intervals)[0])
    assert pack(intervals, most)[1] <= most
