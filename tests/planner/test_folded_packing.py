"""Residencies of many rounds on the timeline of few: the number of rounds does not matter."""

from functools import cache
from itertools import combinations

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.decide.margins import Allowances, QueueModel
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.pack.folded_packing import FoldedPacking, pack_folded, trimmed
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

LONGEST_NS = 1e6
FOLDED = range(4, 10)
SHAPES = {
    "packed": {"seq_len": 16, "chunk_tokens": 32, "chunks_per_round": 2},
    "sliced": {"seq_len": 48, "chunk_tokens": 16, "chunks_per_round": 3},
}
CAPS = {"packed": (None, 230_000, 300_000), "sliced": (None, 230_000, 270_000)}
CASES = [(shape, cap) for shape, caps in CAPS.items() for cap in caps]

# What one round has on the device: (unit, first task, last task, offset), counted from its start.
Piece = tuple[str, int, int, int]


@cache
def chain_of(shape: str, rounds: int) -> Chain:
    workload = Workload(**SHAPES[shape], rounds_per_step=rounds)
    return lower(small("tiny", num_layers=3), workload)


@cache
def decided(shape: str) -> tuple[Decisions, Allowances]:
    """What `optimal` would decide where little more than half fits, with time for its copies."""
    view = ChainView(chain_of(shape, 3))
    program = BoundProgram(view, MACHINE, 9, ProgramKind(tied=True))
    solved = program.fewest_copies(Caps(device_bytes=170_000))
    assert solved is not None
    decisions = Decisions.of(solved, view)
    sequence = sequence_of(shape, 3, decisions)
    queues = QueueModel(MACHINE, LONGEST_NS)
    return decisions, queues.allowances(sequence, sequence.residencies(decisions), None)


def sequence_of(shape: str, rounds: int, decisions: Decisions) -> TaskSequence:
    view = ChainView(chain_of(shape, rounds))
    return TaskSequence.of(view, decisions, view.call_ns(MACHINE))


def packed(shape: str, rounds: int, cap: int | None) -> tuple[TaskSequence, FoldedPacking]:
    decisions, allowances = decided(shape)
    sequence = sequence_of(shape, rounds, decisions)
    residencies = allowances.widened(sequence, sequence.residencies(decisions))
    return sequence, pack_folded(residencies, sequence.units, sequence.folding, cap)


def pieces(sequence: TaskSequence, found: FoldedPacking, round_: int) -> set[Piece]:
    low, high = sequence.folding.starts[round_], sequence.folding.starts[round_ + 1]
    return {
        (residency.unit, max(residency.begin, low) - low, min(residency.end, high) - low, offset)
        for residency, offset in zip(found.residencies, found.offsets, strict=True)
        if residency.begin < high and residency.end > low
    }


@pytest.mark.parametrize(("shape", "cap"), CASES)
def test_the_extent_does_not_depend_on_the_number_of_rounds(shape, cap):
    assert len({packed(shape, rounds, cap)[1].extent_bytes for rounds in FOLDED}) == 1


@pytest.mark.parametrize(("shape", "cap"), CASES)
def test_all_middle_rounds_have_the_same_on_the_device_at_the_same_offsets(shape, cap):
    sequence, first = packed(shape, 4, cap)
    steady = pieces(sequence, first, 1)
    assert len(steady) > 20
    for rounds in FOLDED:
        sequence, found = packed(shape, rounds, cap)
        for middle in range(1, rounds - 1):
            assert pieces(sequence, found, middle) == steady


@pytest.mark.parametrize(("shape", "cap"), CASES)
def test_first_and_last_rounds_are_the_same_whatever_is_between(shape, cap):
    sequence, few = packed(shape, 4, cap)
    ends = pieces(sequence, few, 0), pieces(sequence, few, 3)
    for rounds in FOLDED:
        sequence, found = packed(shape, rounds, cap)
        assert (pieces(sequence, found, 0), pieces(sequence, found, rounds - 1)) == ends


@pytest.mark.parametrize(("shape", "cap"), CASES)
def test_residencies_of_all_rounds_that_meet_share_no_bytes(shape, cap):
    sequence, found = packed(shape, 7, cap)
    units = sequence.units.units
    placed = list(zip(found.residencies, found.offsets, strict=True))
    assert max(o + units[s.unit].tensor.size_bytes for s, o in placed) <= found.extent_bytes
    for (one, low), (other, other_low) in combinations(placed, 2):
        if one.begin < other.end and other.begin < one.end:
            assert (
                low + units[one.unit].tensor.size_bytes <= other_low
                or other_low + units[other.unit].tensor.size_bytes <= low
            )


@pytest.mark.parametrize(("shape", "cap"), CASES)
def test_residencies_lose_time_for_copies_but_never_a_use(shape, cap):
    decisions, allowances = decided(shape)
    sequence, found = packed(shape, 5, cap)
    wanted = allowances.widened(sequence, sequence.residencies(decisions))
    shorter = 0
    for residency, before in zip(found.residencies, wanted, strict=True):
        assert (residency.unit, residency.uses) == (before.unit, before.uses)
        assert before.begin <= residency.begin <= residency.uses[0].position
        assert residency.uses[-1].position < residency.end <= before.end
        shorter += residency != before
    assert (shorter > 0) == (cap is not None)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_sticks_out_is_said_by_task_of_the_folded_timeline(shape):
    sequence, roomy = packed(shape, 5, 300_000)
    assert roomy.extent_bytes <= 300_000
    assert roomy.over_bytes == {}
    sequence, tight = packed(shape, 5, 120_000)
    # Offsets are aligned, sizes of tensors need not be.
    assert 0 <= tight.extent_bytes - 120_000 - max(tight.over_bytes.values()) < 256
    three, _ = packed(shape, 3, None)
    assert max(tight.over_bytes) < len(three.tasks) < len(sequence.tasks)


def test_a_residency_at_a_share_of_its_time_keeps_what_goes_over_the_boundary():
    _, found = packed("packed", 3, None)
    uses = next(residency for residency in found.residencies if residency.uses[0].position > 8).uses
    first, last = uses[0].position, uses[-1].position + 1
    residency = Residency("x", first - 8, last + 8, uses)
    assert trimmed(residency, 0.5) == Residency("x", first - 4, last + 4, uses)
    assert trimmed(residency, 0.0) == Residency("x", first, last, uses)
    through = Residency("x", first - 8, last + 8, uses, enters=True, leaves=True)
    assert trimmed(through, 0.0) is through
