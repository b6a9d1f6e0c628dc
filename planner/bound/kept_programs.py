"""Programs of bounds, kept from plan to plan: they are the same for all caps."""

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.lower_bound import BoundProgram
from twinstream.planner.choices import Choices
from twinstream.planner.kept import MOST_TASKS, Kept
from twinstream.schedule.chain import Chain

FEW_SEGMENTS = 300

_programs: Kept[BoundProgram] = Kept(MOST_TASKS)


def kept_program(
    chain: Chain,
    machine: Machine,
    *,
    num_rounds: int,
    choices: Choices,
    most_segments: int | None = None,
    tied: bool = False,
) -> BoundProgram:
    """As `BoundProgram`."""
    # A kept program holds its chain, whose identity is therefore no other chain's meanwhile.
    key = (id(chain), machine.content_hash, num_rounds, repr(choices), most_segments, tied)
    return _programs.get(
        key,
        lambda: BoundProgram(
            chain, machine, num_rounds=num_rounds, most_segments=most_segments, choices=choices,
            tied=tied,
        ),
        lambda program: len(program.chain.tasks),
    )  # fmt: skip


def rough_guide(
    chain: Chain, machine: Machine, *, num_rounds: int, choices: Choices
) -> BoundProgram:
    """A tied program of few segments: soon asked what plans need at the least."""
    return kept_program(
        chain, machine, num_rounds=num_rounds, choices=choices, most_segments=FEW_SEGMENTS,
        tied=True,
    )  # fmt: skip
