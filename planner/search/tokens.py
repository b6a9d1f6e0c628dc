"""Propose the tokens of a step, where the user leaves them open."""

from dataclasses import replace
from math import ceil

from twinstream.models.lowering.lower import lower
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.request import ChunkingError, PlanRequest
from twinstream.planner.search.chunking import chunkings
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

_MANY_ROUNDS = 128
_MOST_CHUNKS_BOUNDED = 8
_SPARE_ROUNDS = 8
_MOST_DOUBLINGS = 8


def proposed_tokens(request: PlanRequest) -> int:
    """Return the fewest tokens per step at which the optimizer takes at most its share of the step.

    The share is the step's `optimizer_overhead`. The optimizer takes what a step takes beyond its
    rounds, each as long as a further one would be; both by the lower bound within the caps, or
    without them where nothing fits. They are whole rounds of the preferred chunking; where that is
    not fixed, up to an eighth more, so that rounds can be merged into larger ones. Where nothing is
    updated they are those of a pass with which twice as many gain less than that share.

    Raises:
        ChunkingError: a round takes no time.
    """
    step = request.step
    if step.forward_only:
        return _tokens_of_a_pass(request)
    workload = chunkings(request.spec, step)[0]
    short = _shortened(workload)
    round_s, beyond_s = _round_and_beyond_s(request, short, request.caps)
    share = step.optimizer_overhead
    if not round_s:
        raise ChunkingError(
            f"a round takes no time on machine '{request.machine.name}' by its lower bound, so no "
            f"number of them makes the optimizer {share:.0%} of the step: give tokens per step"
        )
    # beyond <= share x (beyond + rounds x round)
    rounds = max(1, ceil(beyond_s * (1.0 - share) / (share * round_s)))
    rounds = ceil(rounds * short.chunks_per_round / workload.chunks_per_round)
    if step.chunk_tokens is None or step.chunks_per_round is None:
        several = 1
        while several < _SPARE_ROUNDS and several * 2 * _SPARE_ROUNDS <= rounds:
            several *= 2
        rounds = ceil(rounds / several) * several
    return workload.chunk_tokens * workload.chunks_per_round * rounds


def _tokens_of_a_pass(request: PlanRequest) -> int:
    """Return the fewest tokens of a forward pass, doubled from a chunk's on, with which parameters
    that stream in cost next to nothing."""
    step = request.step
    chunk = chunkings(request.spec, step)[0]
    tokens = chunk.chunk_tokens * chunk.chunks_per_sequence
    least = _seconds_per_token(request, tokens)
    for _ in range(_MOST_DOUBLINGS):
        more = _seconds_per_token(request, 2 * tokens)
        if more >= (1.0 - step.optimizer_overhead) * least:
            break
        tokens, least = 2 * tokens, more
    return tokens


def _seconds_per_token(request: PlanRequest, tokens: int) -> float:
    """By the lower bound within the caps, or without them where nothing fits."""
    workload = chunkings(request.spec, replace(request.step, tokens_per_step=tokens))[0]
    chain = lower(request.spec, workload, request.recipe)
    bound = lower_bound(chain, request.machine, request.caps)
    bound = bound or lower_bound(chain, request.machine, Caps())
    assert bound is not None, "without caps all fits"
    return bound.step_s / tokens


def _shortened(workload: Workload) -> Workload:
    """Rounds of few chunks instead, with no more work per token: quick to bound."""
    per_sequence = min(workload.chunks_per_sequence, _MOST_CHUNKS_BOUNDED)
    sequences = min(workload.chunks_per_round, _MOST_CHUNKS_BOUNDED) // per_sequence
    return Workload(
        seq_len=min(workload.seq_len, workload.chunk_tokens * per_sequence),
        chunk_tokens=workload.chunk_tokens,
        chunks_per_round=per_sequence * sequences,
        rounds_per_step=PROGRAM_ROUNDS,
        packing=workload.packing,
    )


def _round_and_beyond_s(
    request: PlanRequest, workload: Workload, caps: Caps
) -> tuple[float, float]:
    """Seconds of a further round, and of a step beyond its rounds, by the lower bound."""
    chain = lower(request.spec, workload, request.recipe)
    some = lower_bound(chain, request.machine, caps, num_rounds=_MANY_ROUNDS)
    more = lower_bound(chain, request.machine, caps, num_rounds=2 * _MANY_ROUNDS)
    if some is None or more is None:
        return _round_and_beyond_s(request, workload, Caps())
    # a step is a line in its rounds, once they are many: slope and intercept of two points
    round_s = (more.step_s - some.step_s) / _MANY_ROUNDS
    return round_s, max(0.0, some.step_s - _MANY_ROUNDS * round_s)
