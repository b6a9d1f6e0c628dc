"""Packing under a cap: shorter ranges are what it gives way with, and nothing else."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from twinstream.planner.pack.address_map import Ranges, SoftItem
from twinstream.planner.pack.soft_packing import SoftPacking, pack_soft

KIB = 1024
ALIGNMENT = 256


@st.composite
def soft_items(draw) -> SoftItem:
    """One or two ranges of tasks; in every further life they are cut at either end."""
    begin = draw(st.integers(0, 12))
    ranges = [(begin, begin + draw(st.integers(1, 10)))]
    if draw(st.booleans()):
        again = ranges[0][1] + draw(st.integers(1, 4))
        ranges.append((again, again + draw(st.integers(1, 6))))
    lives: list[Ranges] = [tuple(ranges)]
    for _ in range(draw(st.integers(0, 2))):
        ranges = [cut(draw, low, high) for low, high in ranges]
        lives.append(tuple(ranges))
    return SoftItem(tuple(lives), draw(st.sampled_from([100, 256, 700, 1024, 3000])))


def cut(draw, low: int, high: int) -> tuple[int, int]:
    first = draw(st.integers(low, high - 1))
    return first, draw(st.integers(first + 1, high))


ITEMS = st.lists(soft_items(), max_size=12)
SHARES = st.one_of(st.none(), st.floats(0.2, 1.2))


def ranges_of(items: list[SoftItem], packed: SoftPacking) -> list[Ranges]:
    return [item.lives[life] for item, life in zip(items, packed.lives.tolist(), strict=True)]


def meet(one: Ranges, other: Ranges) -> bool:
    return any(a < d and c < b for a, b in one for c, d in other)


def cap_of(items: list[SoftItem], share: float | None) -> int | None:
    """A share of what the items need where nothing is cut short."""
    return None if share is None else int(share * pack_soft(items, None).extent_bytes)


@given(ITEMS, SHARES)
@settings(max_examples=300)
def test_what_is_alive_at_the_same_time_shares_no_bytes(items, share):
    packed = pack_soft(items, cap_of(items, share))
    placed = list(zip(items, packed.offsets.tolist(), ranges_of(items, packed), strict=True))
    for item, offset, _ in placed:
        assert offset % ALIGNMENT == 0
        assert 0 <= offset < offset + item.size_bytes <= packed.extent_bytes
    for (one, low, alive), (other, other_low, also_alive) in combinations(placed, 2):
        if meet(alive, also_alive):
            assert low + one.size_bytes <= other_low or other_low + other.size_bytes <= low


@given(ITEMS, st.floats(0.2, 1.2))
@settings(max_examples=300)
def test_what_sticks_out_of_the_cap_is_as_short_as_it_can_be(items, share):
    cap = cap_of(items, share)
    packed = pack_soft(items, cap)
    for item, offset, alive in zip(
        items, packed.offsets.tolist(), ranges_of(items, packed), strict=True
    ):
        if offset + item.size_bytes > cap:
            assert alive == item.lives[-1]


@given(ITEMS)
def test_without_a_cap_or_with_one_that_is_wide_enough_nothing_is_cut_short(items):
    free = pack_soft(items, None)
    assert not free.lives.any()
    wide = pack_soft(items, free.extent_bytes)
    assert wide.extent_bytes == free.extent_bytes
    assert not wide.lives.any()


@given(ITEMS, st.floats(0.2, 1.0))
@settings(max_examples=300)
def test_an_item_is_cut_short_only_where_a_longer_range_has_no_room(items, share):
    cap = cap_of(items, share)
    packed = pack_soft(items, cap)
    alive, offsets = ranges_of(items, packed), packed.offsets.tolist()
    for i, item in enumerate(items):
        for longer in item.lives[: packed.lives[i]]:
            if longer == alive[i]:
                continue
            taken = [
                (offsets[j], offsets[j] + -(-other.size_bytes // ALIGNMENT) * ALIGNMENT)
                for j, other in enumerate(items)
                if j != i and meet(longer, alive[j])
            ]
            size = -(-item.size_bytes // ALIGNMENT) * ALIGNMENT
            for offset in range(0, cap - size + 1, ALIGNMENT):
                assert any(offset < high and low < offset + size for low, high in taken)


def test_where_only_less_time_for_a_copy_fits_it_gets_less_time():
    first = SoftItem((((0, 5),),), KIB)
    early = SoftItem((((3, 10),), ((4, 10),), ((5, 10),)), KIB)
    other = SoftItem((((0, 10),),), KIB)
    packed = pack_soft([first, early, other], 2 * KIB)
    assert packed.extent_bytes == 2 * KIB
    assert packed.lives.tolist() == [0, 2, 0]
    assert packed.offsets[0] == packed.offsets[1]


def test_an_item_without_room_in_one_order_goes_ahead_in_the_next():
    """By bytes x time the large one comes last, with the middle one in the middle of its bytes."""
    large = SoftItem((((2, 3),),), 3 * KIB)
    middle = SoftItem((((2, 6),),), KIB)
    last = SoftItem((((4, 9),),), KIB)
    packed = pack_soft([large, middle, last], 4 * KIB)
    assert packed.extent_bytes == 4 * KIB


def test_the_offsets_of_no_items_take_no_bytes():
    assert pack_soft([], 0).extent_bytes == 0


def test_where_the_largest_areas_first_do_not_fit_another_order_does():
    alive_and_units = [((1, 2), 1), ((3, 5), 1), ((0, 4), 3), ((4, 5), 4), ((2, 6), 1)]
    items = [SoftItem(((alive,),), units * ALIGNMENT) for alive, units in alive_and_units]
    assert pack_soft(items, 7 * ALIGNMENT).extent_bytes <= 7 * ALIGNMENT
