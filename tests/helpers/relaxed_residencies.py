"""The residencies that a relaxation of a small chain decides, and its tasks in order."""

from tests.helpers.plans import MACHINE
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.decide.decisions import Decisions
from twinstream.planner.decide.task_sequence import TaskSequence
from twinstream.planner.lifetimes.residencies import Residency
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.document import Caps


def sequence_and_residencies(view: ChainView) -> tuple[TaskSequence, list[Residency]]:
    """Of three rounds, where little more than half fits."""
    program = BoundProgram(view, MACHINE, 3, ProgramKind(tied=True))
    solved = program.fewest_copies(Caps(device_bytes=170_000))
    assert solved is not None
    decisions = Decisions.of(solved, view)
    sequence = TaskSequence.of(view, decisions, view.call_ns(MACHINE))
    return sequence, sequence.residencies(decisions)
