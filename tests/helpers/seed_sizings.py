"""Plans of the seed system for the tiny model, drawn by hand."""

from dataclasses import replace

from twinstream.fidelity.seed_system.sizing import Sizing
from twinstream.models.providers.flops import SavedLevel

LAYERS = 4
_LEVELS = {"I": SavedLevel.INPUT, "A": SavedLevel.ATTENTION, "F": SavedLevel.FULL}


def sizing(levels: str, *, params: int, grads: int, adam: int = 1, rounds: int = 3) -> Sizing:
    """One chunk a round, of two packed sequences; what is not at home stays on the device."""
    return Sizing(
        seq_len=32,
        chunk_tokens=64,
        chunks_per_round=1,
        rounds_per_step=rounds,
        param_blocks=params,
        grad_blocks=grads,
        device_acts=LAYERS - len(levels),
        num_optimizer_blocks=adam,
        levels=tuple(_LEVELS[letter] for letter in levels),
        used_host_bytes=0,
        used_device_bytes=0,
    )


def sliced(levels: str, *, chunks: int = 3, sequences: int = 1, **blocks: int) -> Sizing:
    """Rounds of sequences in slices of 32 tokens."""
    few = sizing(levels[: LAYERS - 1], **blocks)
    return replace(
        few,
        seq_len=32 * chunks,
        chunk_tokens=32,
        chunks_per_round=chunks * sequences,
        device_acts=LAYERS * chunks * sequences - len(levels),
        levels=tuple(_LEVELS[letter] for letter in levels),
    )


SIZINGS = {
    "all on the device": sizing("", params=4, grads=4, adam=4),
    "one block of each": sizing("FAI", params=1, grads=1),
    "an odd block": sizing("AF", params=3, grads=2, adam=2),
    "one round": sizing("II", params=2, grads=2, rounds=1),
    "two rounds": sizing("II", params=2, grads=1, rounds=2),
    "sliced, few slots": sliced("IIAIIAIIAA", params=1, grads=1),
    "sliced, as many slots as chunks": sliced("FAFAFAFAF", params=1, grads=1, adam=3),
    "sliced, more slots": sliced("IAIAIA", params=3, grads=2, adam=2),
    "sliced, all on the device": sliced("", params=4, grads=4, adam=4),
    "two sequences a round": sliced("IIAIIAIIAIIA", sequences=2, params=2, grads=1),
    "two sequences, few slots": sliced("A" * 14, chunks=2, sequences=2, params=1, grads=1),
}
