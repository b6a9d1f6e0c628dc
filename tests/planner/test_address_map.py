"""Items at addresses: what is in the way is evicted and placed elsewhere; nothing overlaps."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstream.planner.pack.address_map import AddressMap, SoftItem
from twinstream.planner.pack.soft_packing import pack_soft

UNIT = 256

# (begin, end, units)
Rectangle = tuple[int, int, int]

RECTANGLES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 5)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    min_size=1,
    max_size=14,
)


def items_of(rectangles: list[Rectangle]) -> list[SoftItem]:
    return [SoftItem((((begin, end),),), units * UNIT) for begin, end, units in rectangles]


def overlaps(items: list[SoftItem], offsets: list[int]) -> list[tuple[int, int]]:
    def meet(i: int, j: int) -> bool:
        ((a, b),), ((c, d),) = items[i].lives[0], items[j].lives[0]
        low, other = offsets[i], offsets[j]
        apart = low + items[i].size_bytes <= other or other + items[j].size_bytes <= low
        return a < d and c < b and not apart

    return [pair for pair in combinations(range(len(items)), 2) if meet(*pair)]


def cut_up(seed: int, tasks: int, units: int, pieces: int) -> list[Rectangle]:
    """Rectangles that fill `tasks` x `units` without a gap."""
    random, found = Random(seed), [(0, tasks, 0, units)]
    while len(found) < pieces:
        begin, end, low, high = found.pop(random.randrange(len(found)))
        if random.random() < 0.5 and end - begin > 1:
            at = random.randint(begin + 1, end - 1)
            found += [(begin, at, low, high), (at, end, low, high)]
        elif high - low > 1:
            at = random.randint(low + 1, high - 1)
            found += [(begin, end, low, at), (begin, end, at, high)]
        else:
            found.append((begin, end, low, high))
    random.shuffle(found)
    return [(begin, end, high - low) for begin, end, low, high in found]


@given(RECTANGLES, st.integers(5, 20), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_what_was_rearranged_lies_within_the_bytes_and_nothing_overlaps(rectangles, most, steps):
    items = items_of(rectangles)
    address_map = AddressMap(items)
    fits = address_map.rearrange(range(len(items)), most * UNIT, [(0,)] * len(items), steps)
    if fits:
        offsets = address_map.offsets.tolist()
        assert overlaps(items, offsets) == []
        assert address_map.extent_bytes <= most * UNIT
        assert min(offsets) >= 0
    else:
        tight = (
            max(sum(u for b, e, u in rectangles if b <= at < e) for at in range(16)) > 0.5 * most
        )
        assert tight or steps < len(items)


@pytest.mark.parametrize("seed", range(12))
def test_memory_that_is_all_in_use_all_the_time_is_packed_with_little_more(seed):
    """In no order do these all find room one after the other."""
    items = items_of(cut_up(seed, tasks=60, units=64, pieces=120))
    assert pack_soft(items, 68 * UNIT).extent_bytes <= 68 * UNIT


def test_the_one_in_the_way_goes_elsewhere():
    early, late, long, wide = items_of([(0, 2, 1), (2, 4, 1), (0, 4, 1), (1, 3, 2)])
    items = [early, late, long, wide]
    address_map = AddressMap(items)
    address_map.place(0, 0, 0)
    address_map.place(1, 3 * UNIT, 0)
    address_map.place(2, UNIT, 0)
    assert not address_map.place_if_free(3, 4 * UNIT, (0,))
    assert address_map.rearrange([3], 4 * UNIT, [(0,)] * 4, 20)
    assert overlaps(items, address_map.offsets.tolist()) == []
    assert address_map.extent_bytes == 4 * UNIT


@given(RECTANGLES, st.integers(5, 12), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_what_is_evicted_is_the_fewest_bytes_of_all_places(rectangles, most, seed):
    random, items = Random(seed), items_of([*rectangles, (0, 15, 4)])
    address_map = AddressMap(items)
    for item in range(len(rectangles)):
        address_map.place(item, random.randint(0, most) * UNIT, 0)
    in_the_way = {
        offset: [
            item
            for item in range(len(rectangles))
            if address_map.offsets[item] < (offset + 4) * UNIT
            and address_map.offsets[item] + address_map.sizes[item] > offset * UNIT
        ]
        for offset in range(most - 3)
    }
    fewest = min(sum(address_map.sizes[item] for item in items) for items in in_the_way.values())
    address_map.rearrange([len(rectangles)], most * UNIT, [range(1)] * len(items), most_steps=1)
    at = int(address_map.offsets[-1]) // UNIT
    assert sum(address_map.sizes[item] for item in in_the_way[at]) == fewest


def test_a_search_without_end_is_given_up():
    items = items_of([(0, 2, 3), (0, 2, 3)])
    assert not AddressMap(items).rearrange([0, 1], 5 * UNIT, [(0,)] * 2, 50)


def test_off_the_board_an_item_is_in_nobodys_way():
    items = items_of([(0, 2, 3), (1, 2, 1)])
    address_map = AddressMap(items)
    address_map.place(0, 0, 0)
    assert address_map.lowest(1, 0) == 3 * UNIT
    address_map.remove(0)
    assert address_map.lowest(1, 0) == 0
