"""Ways to cut a training step into rounds, and rounds into chunks."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from twinstream.models.decoders.sizes import layer_parameters
from twinstream.models.kernel_costs.attention_shape import lengths_text
from twinstream.models.lowering.lower import saved_per_token
from twinstream.models.providers.model import AnyModel, chunk_refusal
from twinstream.planner.limits import LIMITS, SearchLimits
from twinstream.planner.request import ChunkingError, TrainingStep
from twinstream.schedule.workload import Workload

_MOST_TRIED = 10_000  # to name those that fit
_MOST_BLOCKS = 500_000  # a schedule of them takes gigabytes


def chunkings(spec: AnyModel, step: TrainingStep, limits: SearchLimits = LIMITS) -> list[Workload]:
    """Return admissible workloads, the preferred first, then ever smaller chunks (less memory).

    Preferred are chunks of about 8,192 tokens, and as many chunks a round as make the saved
    activations of a layer about as large as its parameters. Without `tokens_per_step` a step is
    one round.

    Raises:
        ChunkingError: the fixed numbers contradict each other; says which.
    """
    _check(spec, step)
    found: list[Workload] = []
    misfits: list[ChunkingError] = []
    for size in [step.chunk_tokens] if step.chunk_tokens else _chunk_sizes(spec, step, limits):
        try:
            found.append(_workload(spec, step, size))
        except ChunkingError as error:
            misfits.append(error)
    if not found:
        raise misfits[0]
    possible = [workload for workload in found if _blocks(spec, workload) <= _MOST_BLOCKS]
    if not possible:
        least = min(found, key=lambda workload: _blocks(spec, workload))
        raise _too_large(least.tokens_per_step, least.chunk_tokens, _blocks(spec, least))
    return possible


def _too_large(step_tokens: int, chunk_tokens: int, num_blocks: int) -> ChunkingError:
    return ChunkingError(
        f"a step of {step_tokens:,} tokens in chunks of {chunk_tokens:,} has {num_blocks:,} blocks "
        f"to compute, and no schedule may have more than {_MOST_BLOCKS:,}; take fewer tokens per "
        "step, or larger chunks"
    )


def admissible(spec: AnyModel, step: TrainingStep, limits: SearchLimits = LIMITS) -> list[Workload]:
    """Return all workloads among which `optimal` chooses, the preferred one first.

    Chunks of half, once and twice the preferred size (of long sequences once, twice and four
    times); 1, 2, 4, 8 or 16 times the chunks that one sequence or one chunk takes in a round, up to
    8, or what hides the parameters of experts (or one sequence). What the user fixed stays.

    Raises:
        ChunkingError: the fixed numbers contradict each other; says which.
    """
    preferred, hiding = chunkings(spec, step, limits), hiding_tokens(spec, limits)
    short = step.pack_tokens <= limits.chunks_per_round * preferred[0].chunk_tokens
    found = [preferred[0]] if short else []
    for size in dict.fromkeys(_sizes_around(spec, step, preferred[0].chunk_tokens, limits)):
        per_sequence = max(1, step.pack_tokens // size)
        most = max(limits.chunks_per_round, -(-hiding // size))
        for times in (1, 2, 4, 8, 16):
            chunks = step.chunks_per_round or times * per_sequence
            if times > 1 and chunks > most:
                continue
            try:
                found.append(_workload(spec, replace(step, chunks_per_round=chunks), size))
            except ChunkingError:
                continue
    return list(dict.fromkeys(found))


def hiding_tokens(spec: AnyModel, limits: SearchLimits = LIMITS) -> int:
    """Tokens of a round whose work takes as long as copying the parameters twice over a slow link.

    A token of a model with experts has work on few of its parameters.

    >>> from twinstream.models.presets import load_preset
    >>> [hiding_tokens(load_preset(name)) for name in ("8b", "mixtral-8x7b", "qwen3-30b-a3b")]
    [2400, 8833, 26288]
    """
    if (decoder := spec.decoder) is None:
        return 0
    layer = layer_parameters(decoder)
    active = layer.active(decoder.experts.per_token if decoder.experts else 0)
    # tokens x 6 active FLOPs (forward and backward) = 2 x itemsize x total bytes x FLOPs per byte
    return round(2 * spec.itemsize * limits.flops_per_byte * layer.total / (6 * active))


def possible(spec: AnyModel, step: TrainingStep, limits: SearchLimits = LIMITS) -> list[Workload]:
    """Return those, and ever smaller chunks with as many ways to cut rounds of each.

    Raises:
        ChunkingError: as `admissible`.
    """
    preferred = chunkings(spec, step, limits)
    found = [*admissible(spec, step, limits), *preferred]
    for workload in preferred:
        found += admissible(spec, replace(step, chunk_tokens=workload.chunk_tokens), limits)
    return list(dict.fromkeys(found))


def with_few_blocks(
    spec: AnyModel, workloads: Sequence[Workload], most_rounds: int, most_blocks: int
) -> list[Workload]:
    """Return the workloads of at most so many blocks, forward and backward; the shortest if none.

    Planning takes time and memory by block: long sequences in small chunks have too many.
    """

    def blocks(workload: Workload) -> int:
        return _blocks(spec, workload, most_rounds)

    few = [workload for workload in workloads if blocks(workload) <= most_blocks]
    return few or sorted(workloads, key=blocks)[:1]


def _blocks(spec: AnyModel, workload: Workload, most_rounds: float = inf) -> int:
    """Return how many blocks are computed forward and backward, in at most so many rounds."""
    rounds = int(min(workload.rounds_per_step, most_rounds))
    return 2 * spec.num_layers * workload.chunks_per_round * rounds


def _sizes_around(
    spec: AnyModel, step: TrainingStep, preferred: int, limits: SearchLimits
) -> list[int]:
    if step.chunk_tokens:
        return [step.chunk_tokens]
    wanted = [preferred, preferred * 2, preferred // 2]
    if step.pack_tokens > limits.chunks_per_round * preferred:
        wanted = [preferred * 4, preferred * 2, preferred]
    return [
        size
        for size in wanted
        if size >= limits.chunk_tokens // 8
        and (
            size % step.pack_tokens == 0
            or (step.pack_tokens % size == 0 and _may_slice(spec, step))
        )
        and (step.tokens_per_step is None or step.tokens_per_step % size == 0)
    ]


def _check(spec: AnyModel, step: TrainingStep) -> None:
    tokens, chunk = step.tokens_per_step, step.chunk_tokens
    if not 0.0 < step.optimizer_overhead < 1.0:
        raise ChunkingError(
            f"the optimizer cannot take {step.optimizer_overhead:g} of a step; give a share "
            "between 0 and 1, such as 1% or 0.01"
        )
    pack, packing = step.pack_tokens, step.packing
    if packing is not None and not packing.longest <= step.seq_len <= pack:
        raise ChunkingError(
            f"sequences of {_lengths(step)} tokens, together {pack}, do not go with a seq_len of "
            f"{step.seq_len}: it is the longest that there may be, and all of it lies in a chunk"
        )
    if tokens is not None and tokens % pack:
        of_unequal = f", together {pack}" if packing else ""
        raise ChunkingError(
            f"{tokens} tokens per step are not whole sequences of {_lengths(step)} tokens"
            f"{of_unequal}; the nearest are {_nearest(tokens, pack)}"
        )
    if chunk is None:
        return
    if packing and chunk % pack:
        raise ChunkingError(
            f"chunks of {chunk} tokens do not pack sequences of {_lengths(step)} tokens, together "
            f"{pack}; the nearest are {_nearest(chunk, pack)}"
        )
    if chunk < pack and not spec.slices_sequences:
        raise ChunkingError(
            f"chunks of {chunk} tokens are less than a sequence of {pack}, which only twinstream's "
            f"own kernels compute in slices: '{spec.name}' is a traced module"
        )
    longer, shorter = max(chunk, pack), min(chunk, pack)
    if longer % shorter:
        raise ChunkingError(
            f"chunks of {chunk} tokens neither pack nor slice sequences of {step.seq_len} "
            "tokens: one must be a multiple of the other"
        )
    if tokens is not None and tokens % chunk:
        raise ChunkingError(
            f"{tokens} tokens per step are not whole chunks of {chunk} tokens; "
            f"the nearest are {_nearest(tokens, chunk)}"
        )


def _may_slice(spec: AnyModel, step: TrainingStep) -> bool:
    return spec.slices_sequences and step.packing is None and step.cache is None


def _lengths(step: TrainingStep) -> str:
    return lengths_text(step.packing.expected_lengths if step.packing else (step.seq_len,))


def _nearest(tokens: int, unit: int) -> str:
    below = tokens // unit * unit
    return f"{below + unit}" if not below else f"{below} and {below + unit}"


def _chunk_sizes(spec: AnyModel, step: TrainingStep, limits: SearchLimits) -> list[int]:
    """Packed sizes that divide the step, then slices of a sequence, largest first."""
    sequences = step.tokens_per_step // step.pack_tokens if step.tokens_per_step else None
    target = limits.chunk_tokens
    most_packed = max(1, target // step.pack_tokens)
    packed = [
        n * step.pack_tokens
        for n in range(most_packed, 0, -1)
        if sequences is None or sequences % n == 0
    ]
    slices = [
        step.pack_tokens // n
        for n in range(2, step.pack_tokens // (limits.chunk_tokens // 8) + 1)
        if step.pack_tokens % n == 0 and _may_slice(spec, step)
    ]
    sizes = packed + slices
    above = [size for size in sizes if size > target]
    preferred = min(above) if above and sizes.count(target) == 0 else None
    if preferred is None:
        return [size for size in sizes if size <= target]
    return [preferred, *(size for size in sizes if size <= target)]


def _workload(spec: AnyModel, step: TrainingStep, chunk_tokens: int) -> Workload:
    longest = step.recipe.loss.longest(step.seq_len, step.packing)
    if (why := chunk_refusal(spec, step.seq_len, chunk_tokens, longest)) is not None:
        raise ChunkingError(why)
    per_sequence = max(1, step.pack_tokens // chunk_tokens)
    groups = step.tokens_per_step // (chunk_tokens * per_sequence) if step.tokens_per_step else None
    if step.chunks_per_round is not None:
        chunks = step.chunks_per_round
        if chunks % per_sequence or (groups and groups % (chunks // per_sequence)):
            raise _misfit(chunks, chunk_tokens, per_sequence, groups)
    else:
        group_tokens = chunk_tokens * per_sequence
        chunks = per_sequence * _groups_per_round(
            spec, group_tokens, groups, forward_only=step.forward_only
        )
    rounds = groups // (chunks // per_sequence) if groups else 1
    if step.forward_only and rounds > 1:
        raise ChunkingError(
            f"{chunks} chunks of {chunk_tokens:,} tokens are not the {step.tokens_per_step:,} of a "
            f"pass, which is one round: leave chunks per round out"
        )
    if rounds > _MOST_BLOCKS:
        num_blocks = 2 * spec.num_layers * chunks * rounds
        raise _too_large(chunk_tokens * chunks * rounds, chunk_tokens, num_blocks)
    return Workload(
        seq_len=step.seq_len,
        chunk_tokens=chunk_tokens,
        chunks_per_round=chunks,
        rounds_per_step=rounds,
        packing=step.packing_of(chunk_tokens),
        forward_only=step.forward_only,
        cache=step.cache,
        result=step.result,
    )


def _misfit(chunks: int, chunk_tokens: int, per_sequence: int, groups: int | None) -> ChunkingError:
    """Rounds of so many chunks are not whole sequences, or a step not whole rounds."""
    most = min(groups or chunks, 2 * chunks, _MOST_TRIED)
    fit = [n * per_sequence for n in range(1, most + 1) if (groups or n) % n == 0]
    near = sorted(sorted(fit, key=lambda n: abs(n - chunks))[:2])
    sequences = f", {per_sequence} to a sequence" if per_sequence > 1 else ""
    whole = (groups or 0) * per_sequence
    step = f"a step of {whole} chunk{'s' if whole > 1 else ''}" if groups else "chunks"
    return ChunkingError(
        f"{chunks} chunks per round do not fit {step} of {chunk_tokens:,} tokens{sequences}; "
        f"{' or '.join(map(str, near))} would"
    )


def _groups_per_round(
    spec: AnyModel, group_tokens: int, groups: int | None, *, forward_only: bool
) -> int:
    """So many that a layer's saved activations come to about its parameters; a divisor."""
    if forward_only and groups is not None:
        return groups
    # a round loads a layer's parameters once for all chunks, and holds their activations
    wanted = max(1, round(spec.layer_bytes / (group_tokens * saved_per_token(spec))))
    if groups is None:
        return wanted
    return max(n for n in range(1, min(wanted, groups) + 1) if groups % n == 0)
