"""Plan a training step: choose how to cut it, then where every tensor lives."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.spec import ModelSpec
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.choices import OPEN, ChoiceError, Choices
from twinstream.planner.infeasible import InfeasiblePlan, least_short
from twinstream.planner.judge import Judge
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.plan import UnknownPolicyError, plan_chain, policies, recipe_of
from twinstream.planner.refuse.lattice import FamilyWithin, Lattice
from twinstream.planner.refuse.refusal import with_smallest
from twinstream.planner.search.chunking import ChunkingError, TrainingStep, chunkings, of_few_blocks
from twinstream.planner.search.family import Family
from twinstream.planner.seed_system.policy import POLICY as SEED_POLICY
from twinstream.planner.seed_system.step import plan_seed_step
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.workload import Workload

_MANY_ROUNDS = 128
_MOST_BLOCKS = 10_000  # planned by rules: half a minute
_MOST_CHUNKS_BOUNDED = 8
_SPARE_ROUNDS = 8


def plan_step(  # noqa: PLR0913
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    policy: str,
    judge: Judge | None = None,
    choices: Choices = OPEN,
    *,
    name_caps: bool = True,
) -> Schedule:
    """A verified, conforming schedule of a training step, with its lower bounds.

    `optimal` chooses the chunking with the least step time; every other policy takes the preferred
    one that fits. Where the step leaves tokens per step open, `proposed_tokens` says how many, for
    every policy alike. `ml_dataflow` cuts the step by rules of its own (`plan_seed_step`). Where
    `optimal` finds nothing, to name caps that would do takes longest; it need not.

    Raises:
        ChunkingError: what is fixed of the step contradicts itself.
        UnknownPolicyError: the message lists the policies there are.
        ChoiceError: something is fixed that the chain lacks, or that only `optimal` decides.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
        NoTimeError: the step takes no time on the machine.
    """
    with gc_paused():
        if policy != "optimal" and choices != OPEN:
            raise ChoiceError(
                f"policy '{policy}' decides by its own rules; homes, levels, prefetch and effort "
                "can be fixed of 'optimal' only"
            )
        if policy == SEED_POLICY:
            return plan_seed_step(spec, step, machine, caps)
        if policy not in policies():
            raise UnknownPolicyError(
                f"unknown policy '{policy}'; known: {', '.join(policy_names())}"
            )
        whole = with_tokens(spec, step, machine, caps)
        try:
            if policy == "optimal":
                family_within = partial(Family, spec, whole, machine, judge, choices)
                return _optimal(family_within, caps, choices, name_caps=name_caps)
            return _first_that_fits(spec, whole, machine, caps, policy, judge)
        except InfeasiblePlan as error:
            cut = {
                "--chunk-tokens": step.chunk_tokens, "--chunks-per-round": step.chunks_per_round,
            }  # fmt: skip
            fixed = [flag for flag, value in cut.items() if value is not None]
            device, host = (
                None if memory is None else memory.value
                for memory in (machine.device_memory_bytes, machine.host_memory_bytes)
            )
            refusal = error.on(device, host, fixed)
        raise refusal  # out here: raised there it would keep all that led to it


def policy_names() -> tuple[str, ...]:
    """All that `plan_step` plans by, those that plan a given chain first."""
    return (*policies(), SEED_POLICY)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Planning makes millions of small objects, few of them in cycles; looking takes a quarter.

    Those are found at the end, by one look at what was made meanwhile and at nothing older.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect(1)


def _first_that_fits(
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    policy: str,
    judge: Judge | None,
) -> Schedule:
    recipe = recipe_of(policy, step.recipe)
    failed: list[InfeasiblePlan] = []
    for workload in of_few_blocks(spec, chunkings(spec, step), PROGRAM_ROUNDS, _MOST_BLOCKS):
        try:
            return plan_chain(lower(spec, workload, recipe), machine, caps, policy, judge)
        except InfeasiblePlan as error:
            failed.append(error)
    raise least_short(failed)


def _optimal(
    family_within: FamilyWithin, caps: Caps, choices: Choices, *, name_caps: bool
) -> Schedule:
    if choices.effort != "thorough":
        return family_within(caps).best(name_caps=name_caps)
    lattice = Lattice(family_within)
    if (found := lattice.best(caps)) is not None:
        return found.finished()
    try:
        return family_within(caps).best(name_caps=name_caps)
    except InfeasiblePlan as error:

        def fits(within: Caps) -> bool:
            return lattice.fits(within) or family_within(within).fits()

        raise with_smallest(error, caps, fits) from None


def with_tokens(spec: ModelSpec, step: TrainingStep, machine: Machine, caps: Caps) -> TrainingStep:
    """The step itself, with the proposed tokens per step where they are open."""
    if step.tokens_per_step is not None:
        return step
    return replace(step, tokens_per_step=proposed_tokens(spec, step, machine, caps))


def proposed_tokens(spec: ModelSpec, step: TrainingStep, machine: Machine, caps: Caps) -> int:
    """The fewest tokens per step at which the optimizer takes at most its share of the step.

    The share is `step.optimizer_overhead`. The optimizer takes what a step takes beyond its rounds,
    each as long as a further one would be; both by the lower bound within the caps, or without
    them where nothing fits. They are whole rounds of the preferred chunking; where that is not
    fixed, up to an eighth more, so that rounds can be merged into larger ones.

    Raises:
        ChunkingError: a round takes no time.
    """
    workload = chunkings(spec, step)[0]
    short = _shortened(workload)
    round_s, beyond_s = _round_and_beyond_s(spec, short, step, machine, caps)
    share = step.optimizer_overhead
    if not round_s:
        raise ChunkingError(
            f"a round takes no time on machine '{machine.name}' by its lower bound, so no number "
            f"of them makes the optimizer {share:.0%} of the step: give tokens per step"
        )
    rounds = max(1, ceil(beyond_s * (1.0 - share) / (share * round_s)))
    rounds = ceil(rounds * short.chunks_per_round / workload.chunks_per_round)
    if step.chunk_tokens is None or step.chunks_per_round is None:
        several = 1
        while several < _SPARE_ROUNDS and several * 2 * _SPARE_ROUNDS <= rounds:
            several *= 2
        rounds = ceil(rounds / several) * several
    return workload.chunk_tokens * workload.chunks_per_round * rounds


def _shortened(workload: Workload) -> Workload:
    """Rounds of few chunks instead, with no more work per token: quick to bound."""
    per_sequence = min(workload.chunks_per_sequence, _MOST_CHUNKS_BOUNDED)
    sequences = min(workload.chunks_per_round, _MOST_CHUNKS_BOUNDED) // per_sequence
    return Workload(
        seq_len=min(workload.seq_len, workload.chunk_tokens * per_sequence),
        chunk_tokens=workload.chunk_tokens,
        chunks_per_round=per_sequence * sequences,
        rounds_per_step=PROGRAM_ROUNDS,
        sequence_lengths=workload.sequence_lengths,
    )


def _round_and_beyond_s(
    spec: ModelSpec, workload: Workload, step: TrainingStep, machine: Machine, caps: Caps
) -> tuple[float, float]:
    """Seconds of a further round, and of a step beyond its rounds, by the lower bound."""
    recipe = recipe_of("optimal", step.recipe)
    chain = lower(spec, workload, recipe)
    some = lower_bound(chain, machine, caps, num_rounds=_MANY_ROUNDS)
    more = lower_bound(chain, machine, caps, num_rounds=2 * _MANY_ROUNDS)
    if some is None or more is None:
        return _round_and_beyond_s(spec, workload, step, machine, Caps())
    round_s = (more.step_s - some.step_s) / _MANY_ROUNDS
    return round_s, max(0.0, some.step_s - _MANY_ROUNDS * round_s)
