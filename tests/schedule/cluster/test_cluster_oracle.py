"""`verify` agrees with brute force on thousands of safe and damaged clusters."""

from collections import Counter
from random import Random

import pytest

from tests.schedule.cluster.damages import DAMAGES
from tests.schedule.cluster.oracle import Cache, problems
from tests.schedule.cluster.small_clusters import build
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate

RULES = {
    "class": {"ClassUnsafe"}, "partition": {"ClassesNotPartition"}, "axes": {"UnknownAxis"},
    "sequence": {"SequenceWrong"}, "operands": {"OperandsUnsuited"}, "mismatch": {"SidesDiffer"},
    "stuck": {"Deadlock", "SideMissing", "GroupNotSymmetric", "SidesDiffer"},
    "symmetry": {"GroupNotSymmetric"}, "order": {"OrderWrong"},
}  # fmt: skip
HARMLESS = {"add_wait_previous"}  # the pass before is always done with some time
BLOCKS, SEEDS_PER_BLOCK = 10, 38


def check_agreement(document: Schedule, rng: Random, cache: Cache) -> set[str]:
    """Both call it safe, or both do not; returns the oracle's reasons.

    `verify` stops at the first step that finds anything. Where one thing is wrong, it must
    name it; a side that is missing, or whose class has other partners, is stuck for the oracle.
    """
    reasons = problems(document, rng, cache)
    found = {type(violation).__name__ for violation in verify(document)}
    assert bool(reasons) == bool(found), (reasons, found)
    if len(reasons) == 1:
        assert found & RULES[next(iter(reasons))], (reasons, found)
    if "Deadlock" in found:
        assert "stuck" in reasons
    return reasons


def judge(seeds: range) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """How often each damage was tried, how often it was unsafe, and for which reasons."""
    tried, unsafe, why = Counter[str](), Counter[str](), Counter[str]()
    for seed in seeds:
        base, cache = build(Random(seed)), Cache()
        assert check_agreement(base, Random(seed), cache) == set()
        for name, damage in DAMAGES.items():
            damaged = damage(base, Random(f"{seed} {name}"))
            if damaged is not None:
                reasons = check_agreement(damaged, Random(seed), cache)
                tried[name] += 1
                unsafe[name] += bool(reasons)
                why.update(reasons)
    return tried, unsafe, why


def test_some_damages_are_judged_as_by_brute_force() -> None:
    tried, unsafe, _ = judge(range(10_000, 10_012))
    assert sum(tried.values()) > 300
    assert 100 < sum(unsafe.values()) < 280


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_damage_that_brute_force_calls_unsafe_is_found_and_nothing_else(block: int) -> None:
    tried, unsafe, why = judge(range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK))
    assert sum(tried.values()) + SEEDS_PER_BLOCK > 1000
    for name in DAMAGES:
        assert tried[name] > 5, name
        assert bool(unsafe[name]) == (name not in HARMLESS), name
    assert min(why[name] for name in RULES) >= 5, why


@pytest.mark.parametrize("block", range(10))
def test_several_damages_at_once_are_judged_as_by_brute_force(block: int) -> None:
    for seed in range(block * 100, (block + 1) * 100):
        rng = Random(f"several {seed}")
        document = build(rng)
        for name in rng.sample(sorted(DAMAGES), 3):
            if document.order and document.classes:
                document = DAMAGES[name](document, rng) or document
        check_agreement(document, rng, Cache())


def test_the_random_clusters_have_what_real_ones_have() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        document = build(Random(seed))
        ops = [op for one in document.classes for op in document.of(one).ops]
        talk = [op for op in ops if isinstance(op, Communicate)]
        seen.update({op.collective for op in talk})
        seen["group over several classes"] += any(
            len(exchange.sides) > 1 and ops_of(document, exchange.sides) & {"all_reduce"}
            for exchange in document.order
        )
        seen["ring"] += any(len({c for c, _ in e.sides}) < len(e.sides) for e in document.order)
        seen["shared schedule"] += len(document.schedules) < len(document.classes)
        seen["several axes"] += any(len(op.axes) > 1 for op in talk)
        seen["in place"] += any(
            op.collective == "all_gather" and len(op.operands) == 1 for op in talk
        )
        seen["waits"] += any(op.waits for op in talk)
        seen["waits across the boundary"] += any(op.waits_previous for op in talk)
    assert min(seen.values()) >= 4, seen
    assert len(seen) == 13


def ops_of(document: Schedule, sides: tuple[tuple[str, str], ...]) -> set[str]:
    names = {one.name: document.of(one).ops for one in document.classes}
    known = {(n, op.op_id): op for n, ops in names.items() for op in ops}
    found = [known[side] for side in sides]
    return {op.collective for op in found if isinstance(op, Communicate)}
