"""Which attention is fastest for packed documents: one call for all, or one for each."""

from collections.abc import Sequence

from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.curve_choice import curve_for
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.work import ChunkWork
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.workload import Packing, Workload

# What a call for each document costs beside its launch: the host waits for the lengths, and a short
# document does not fill the device. Assumed, on the safe side; no GPU has timed it.
_OF_EACH_CALL_NS = 100_000.0


def fastest_of_packed(
    machine: Machine, spec: ModelSpec, for_all: str, for_each: Sequence[str], lengths: Sequence[int]
) -> str:
    """`for_all`, which takes documents of any lengths in one call, or a faster one of `for_each`.

    The others are called for one document after the other. One of which the profile states no rate
    of its own is never taken.

    Args:
        lengths: tokens of the documents of a chunk, as they are expected.
    """
    best, best_ns = for_all, _pack_ns(machine, spec, for_all, lengths)
    for name in for_each:
        ns = _pack_ns(machine, spec, name, lengths)
        if ns is not None and best_ns is not None and ns < best_ns:
            best, best_ns = name, ns
    return best


def _pack_ns(
    machine: Machine, spec: ModelSpec, name: str, lengths: Sequence[int]
) -> float | None:  # fmt: skip
    """Attention forward and backward of a block; None where nothing is known of it."""
    tokens, packing = sum(lengths), Packing.of(tuple(lengths))
    workload = Workload(
        seq_len=tokens, chunk_tokens=tokens, chunks_per_round=1, rounds_per_step=1, packing=packing
    )
    recipe = Recipe(kernels=KernelChoice(attention=name))
    work = ChunkWork(spec, workload, 0, recipe)
    both = (work.attention_forward(), work.attention_backward())
    takes_all = attention_limits(name).variable_length
    try:
        if not takes_all and any(curve_for(one, machine).of != name for one in both):
            return None
        alone_ns = sum(work_time(one, machine).alone_ns for one in both)
    except MissingNumberError:
        return None
    return alone_ns + (0 if takes_all else len(both) * len(lengths) * _OF_EACH_CALL_NS)
