"""How the seed system chooses what is saved of each activation that leaves the device."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.models.flops import SavedLevel

_INPUT, _ATTENTION, _FULL = SavedLevel.INPUT, SavedLevel.ATTENTION, SavedLevel.FULL


@dataclass(frozen=True)
class Levels:
    """What the choice is made from.

    `bytes_of` are bytes of one activation by level. `window_bytes` is what the link is thought to
    take away while as many activations as there are slots are made; None where a sequence is
    sliced, for which the seed system does not ask.
    """

    num_layers: int
    chunks_per_round: int
    slots: int
    bytes_of: Mapping[SavedLevel, int]
    window_bytes: float | None


def choose_levels(levels: Levels, home: int, budget_bytes: int) -> tuple[SavedLevel, ...]:
    """Levels of the home activations in (layer, chunk) order.

    They may take more than the budget, where it does not hold all of them at INPUT, or by a slip
    of the seed system's own (`_with_inputs`).

    All are INPUT, then as many as fit ATTENTION, and only if all are, as many as fit FULL, fewer
    where they would congest the link. FULL ones go into windows of as many activations as there
    are slots, equally many into each by integer division, so that fewer may be FULL than fit.
    """
    sizes = levels.bytes_of
    left = budget_bytes - home * sizes[_INPUT]
    attention = min(home, max(0, left) // (sizes[_ATTENTION] - sizes[_INPUT]))
    if attention < home:
        return _with_inputs(levels, home, home - attention)
    left = budget_bytes - home * sizes[_ATTENTION]
    full = min(home, left // (sizes[_FULL] - sizes[_ATTENTION]))
    if levels.window_bytes is not None:
        full = min(full, _uncongested(levels, home))
    return _with_fulls(levels, home, full)


def _uncongested(levels: Levels, home: int) -> int:
    """How many may be FULL so that no window brings more than the link takes; the rest is free."""
    sizes, slots = levels.bytes_of, levels.slots
    assert levels.window_bytes is not None
    windows, rest = divmod(home, slots)
    left = levels.window_bytes - slots * sizes[_ATTENTION]
    if not windows:
        return rest
    if left < 0:
        return 0
    per_window = min(slots, int(left // (sizes[_FULL] - sizes[_ATTENTION])))
    return windows * per_window + rest


def _with_fulls(levels: Levels, home: int, full: int) -> tuple[SavedLevel, ...]:
    """Each window has its FULL ones first or last, in turn; the rest takes what is left of them."""
    slots = levels.slots
    windows, rest = divmod(home, slots)
    per_window = min(slots, full // windows) if windows else 0
    found: list[SavedLevel] = []
    for window in range(windows):
        of_window = [_FULL] * per_window + [_ATTENTION] * (slots - per_window)
        found += of_window if window % 2 == 0 else of_window[::-1]
    last = min(rest, full - windows * per_window)
    return (*found, *[_FULL] * last, *[_ATTENTION] * (rest - last))


def _with_inputs(levels: Levels, home: int, inputs: int) -> tuple[SavedLevel, ...]:
    """INPUT on the earliest chunks of the layers that are wholly at home, evenly over these.

    What they have no room for is ATTENTION, so that the host may overflow after all.
    """
    chunks = levels.chunks_per_round
    layers = max(1, home // chunks)
    per_layer, more = divmod(inputs, layers)
    found: list[SavedLevel] = []
    for position in range(home):
        layer, chunk = divmod(position, chunks)
        of_layer = per_layer + (layer < more) if layer < layers else 0
        found.append(_INPUT if chunk < of_layer else _ATTENTION)
    return tuple(found)
