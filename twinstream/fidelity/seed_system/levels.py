"""The seed system's choice of what is saved of each activation that leaves the device."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.models.flops import SavedLevel

_INPUT, _ATTENTION, _FULL = SavedLevel.INPUT, SavedLevel.ATTENTION, SavedLevel.FULL


@dataclass(frozen=True)
class Levels:
    """The facts that the choice is made from.

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
    windows, rest = divmod(home, levels.slots)
    if windows and levels.window_bytes is not None:
        most = _uncongested(levels, rest)
        if full > windows * most[0] + most[1]:
            return _with_fulls(levels, home, *most)
    per_window = min(levels.slots, full // windows) if windows else 0
    in_rest = min(rest, full - windows * per_window)
    return _with_fulls(levels, home, per_window, in_rest)


def _uncongested(levels: Levels, rest: int) -> tuple[int, int]:
    """Count how many of a window may be FULL so that it brings no more than the link takes, and of
    the activations after the last window: all, unless a window is too much without any."""
    sizes, slots = levels.bytes_of, levels.slots
    assert levels.window_bytes is not None
    left = levels.window_bytes - slots * sizes[_ATTENTION]
    if left < 0:
        return 0, 0
    return min(slots, int(left // (sizes[_FULL] - sizes[_ATTENTION]))), rest


def _with_fulls(levels: Levels, home: int, per_window: int, in_rest: int) -> tuple[SavedLevel, ...]:
    """Each window has its FULL ones last or first, in turn.

    The rules say that windows alternate, not which begins; recorded speeds fit better this way.
    """
    slots = levels.slots
    windows, rest = divmod(home, slots)
    found: list[SavedLevel] = []
    for window in range(windows):
        of_window = [_FULL] * per_window + [_ATTENTION] * (slots - per_window)
        found += of_window if window % 2 else of_window[::-1]
    return (*found, *[_FULL] * in_rest, *[_ATTENTION] * (rest - in_rest))


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
