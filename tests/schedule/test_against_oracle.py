"""`verify` and `conforms` agree with brute force on thousands of valid and damaged schedules."""

from collections import Counter
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.helpers.schedule_oracle import LAYOUT, RACE, problems
from tests.helpers.schedules import build, schedules
from tests.schedule.conformity_oracle import TASKS, conformity_problems
from tests.schedule.damages import DAMAGES
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.violations import Violation

RACES = {"ReadTooEarly", "OverwriteTooEarly", "OperandsOverlap"}
ABOUT_TASKS = {"TaskMissing", "TaskUnexpected", "OperandsDiffer"}

# Damage that can only break `conforms`, and damage that `conforms` does not look at.
HARMLESS_TO_RUN = {"change_call", "change_kernel", "change_flops"}
SAME_TASKS = {
    "drop_wait", "drop_wait_previous", "retarget_wait", "retarget_wait_previous", "swap_copies",
    "drop_copy", "double_copy", "drop_write_back", "move_operand", "change_copy",
    "shift_offset", "shift_origin", "shrink_slot", "lower_cap", "move_slot",
}  # fmt: skip
BLOCKS, SEEDS_PER_BLOCK = 6, 50


def rules_of_verify(schedule: RankSchedule) -> set[str]:
    names = {type(v).__name__ for v in verify_rank(schedule)}
    return names - RACES | ({RACE} if names & RACES else set())


def rules_of_conforms(schedule: RankSchedule, chain: Chain) -> set[str]:
    def name(violation: Violation) -> str:
        kind = type(violation).__name__
        of_an_op = kind == "CallDiffers" and violation.ops
        return TASKS if of_an_op or kind in ABOUT_TASKS else kind

    return {name(v) for v in conforms(schedule, chain)}


def check_agreement(schedule: RankSchedule, chain: Chain) -> tuple[set[str], set[str]]:
    """Both name the same rules; returns the oracle's.

    Where parts are malformed there is no telling what else is wrong. Where content is wrong as
    well, a race may or may not be named: who reads what depends on how far one follows.
    """
    expected, found = problems(schedule), rules_of_verify(schedule)
    assert bool(expected) == bool(found), (expected, found)
    if "BadPart" in expected:
        assert "BadPart" in found
    elif expected & LAYOUT or not {RACE} < expected:
        assert found == expected
    else:
        assert found - {RACE} == expected - {RACE}
    differences = conformity_problems(schedule, chain)
    assert rules_of_conforms(schedule, chain) == differences
    return expected, differences


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_damage_that_the_oracle_calls_unsafe_is_caught_and_nothing_else(block: int) -> None:
    tried, unsafe, different = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        chain, schedule = build(Random(seed))
        assert check_agreement(schedule, chain) == (set(), set())
        for name, damage in DAMAGES.items():
            damaged = damage(schedule, Random(f"{seed} {name}"))
            if damaged is None:
                continue
            rules, differences = check_agreement(damaged, chain)
            tried[name] += 1
            unsafe[name] += bool(rules)
            different[name] += bool(differences)
    assert sum(tried.values()) > 20 * SEEDS_PER_BLOCK
    for name in DAMAGES:
        assert tried[name] > SEEDS_PER_BLOCK / 2, name
        assert bool(unsafe[name]) == (name not in HARMLESS_TO_RUN), name
        assert bool(different[name]) == (name not in SAME_TASKS), name


@settings(max_examples=200)
@given(
    pair=schedules(),
    names=st.lists(st.sampled_from(sorted(DAMAGES)), min_size=1, max_size=3),
    rng=st.randoms(use_true_random=True),
)
def test_several_damages_at_once_are_judged_like_the_oracle(
    pair: tuple[Chain, RankSchedule], names: list[str], rng: Random
) -> None:
    chain, schedule = pair
    for name in names:
        schedule = DAMAGES[name](schedule, rng) or schedule
    rules, differences = check_agreement(schedule, chain)
    for rule in rules | differences or {"harmless"}:
        event(rule)


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_the_oracle_says_the_same_for_every_byte_and_for_three_passes(seed: int) -> None:
    _, schedule = build(Random(seed))
    candidates = [damage(schedule, Random(seed)) for damage in DAMAGES.values()]
    for candidate in [schedule, *candidates]:
        if candidate is not None:
            expected = problems(candidate)
            assert problems(candidate, every_byte=True) == expected
            assert problems(candidate, num_passes=3) == expected


def test_the_random_schedules_have_what_real_ones_have() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        _, schedule = build(Random(seed))
        operands = [o for op in schedule.ops if isinstance(op, Compute) for o in op.operands]
        pairs = Counter(item.tensor for item in schedule.carried)
        seen["parents"] += any(t.parent for t in schedule.tensors)
        seen["prefixes"] += any(o.num_parts for o in operands)
        seen["recomputes"] += any("again" in op.op_id for op in schedule.ops)
        seen["copies on the compute stream"] += any(
            op.kind == "copy" and op.stream.queue == "compute" for op in schedule.ops
        )
        seen["feeds"] += any(op.kind == "feed" for op in schedule.ops)
        seen["fetches"] += any(op.kind == "fetch" for op in schedule.ops)
        seen["several carried pairs of a tensor"] += max(pairs.values()) > 1
        seen["copies over the boundary"] += _a_copy_crosses_the_boundary(schedule)
        seen["overlapping slots"] += _slots_overlap(schedule)
        for mode in ("read", "write", "update", "scratch"):
            seen[mode] += any(o.mode == mode for o in operands)
    assert min(seen.values()) >= 10, seen
    assert len(seen) == 13


def _a_copy_crosses_the_boundary(schedule: RankSchedule) -> bool:
    """Some op is unsafe unless it waits for a copy of the pass before."""
    copies = {op.op_id for op in schedule.ops if isinstance(op, Copy)}
    for i, op in enumerate(schedule.ops):
        ops = list(schedule.ops)
        kept = tuple(w for w in op.waits_previous if w not in copies)
        ops[i] = op.model_copy(update={"waits_previous": kept})
        if kept != op.waits_previous and problems(schedule.model_copy(update={"ops": tuple(ops)})):
            return True
    return False


def _slots_overlap(schedule: RankSchedule) -> bool:
    spans = [(s.tier.kind, s.offset_bytes, s.offset_bytes + s.size_bytes) for s in schedule.slots]
    return any(
        a is not b and a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in spans for b in spans
    )
