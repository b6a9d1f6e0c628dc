"""The ways to cut a step of several ranks that layouts which run here may have."""

from collections.abc import Sequence
from dataclasses import replace

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.planner.search.chunking import admissible, chunkings
from twinstream.planner.search.tokens import proposed_tokens
from twinstream.schedule.workload import Workload

ROUNDS_OF_A_RANK = 2  # so many microbatches for each rank, or the bubble is most of the step


def cuts_of_ranks(
    spec: ModelSpec, step: TrainingStep, machine: Machine, num_ranks: int,
    most_tokens: int | None = None,
) -> list[Workload]:  # fmt: skip
    """Ways to cut a step; the first has rounds enough for a pipeline of all ranks.

    A round is a microbatch of one chunk, unless `chunks_per_round` says otherwise. Chunks of the
    first are as large as leave two rounds for each rank, or as small as they get. With less than a
    sequence a chunk is a slice of one, and a round has all of a sequence's.

    Args:
        most_tokens: of a step, where tokens per step are open and data are few.

    Raises:
        ChunkingError: the numbers given contradict each other.
    """
    whole = step.pack_tokens
    steps = _with_microbatches(spec, step)
    if step.tokens_per_step is None:
        tokens = proposed_tokens(PlanRequest.of(spec, machine, step=steps[0]))
        if most_tokens is not None and most_tokens < tokens:
            tokens = max(1, most_tokens // whole) * whole
        least = ROUNDS_OF_A_RANK * num_ranks * whole
        tokens = -(-tokens // least) * least
        steps = [replace(one, tokens_per_step=tokens) for one in steps]
    cuts = (cut for one in steps for cut in (*chunkings(spec, one), *admissible(spec, one)))
    found = list(dict.fromkeys(cuts))
    enough = [w for w in found if w.rounds_per_step >= ROUNDS_OF_A_RANK * num_ranks]
    first = enough[0] if enough else max(found, key=lambda workload: workload.rounds_per_step)
    return [first, *(workload for workload in found if workload is not first)]


def _with_microbatches(spec: ModelSpec, step: TrainingStep) -> list[TrainingStep]:
    """The step with rounds of one chunk; or of one sequence, by each size of its slices, where
    chunks are to be chosen and one does not hold a sequence."""
    if step.chunks_per_round is not None:
        return [step]
    whole, chunk = step.pack_tokens, step.chunk_tokens
    sizes = [cut.chunk_tokens for cut in chunkings(spec, step)] if chunk is None else [chunk]
    if sizes[0] >= whole:
        return [replace(step, chunks_per_round=1)]
    each = ((size, whole // size) for size in dict.fromkeys(sizes))
    return [replace(step, chunk_tokens=size, chunks_per_round=count) for size, count in each]


def jobs_of_ranks(spec: ModelSpec, recipe: Recipe, cuts: Sequence[Workload]) -> list[Job]:
    """The step of all ranks by each way to cut it, as a job that is not laid out yet."""
    named = recipe.model_copy(update={"kernels": recipe.implementations})
    layout = Layout(zero=0, recompute="auto", offload=True)
    return [Job.of_step(spec, workload, named, layout) for workload in cuts]
