"""Round the fractions of the bound's program to whole decisions on units and blocks.

A fraction of 0.4 becomes: of any ten consecutive blocks the same four, in all rounds (dithering).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.lifetimes.host_tasks import device_uses
from twinstream.planner.lifetimes.residencies import content_gaps
from twinstream.planner.lifetimes.rounds import Place
from twinstream.planner.lifetimes.uses import Unit
from twinstream.planner.lifetimes.view import ChainView

GapKey = tuple[str, Place]
_ALWAYS_KEPT = ("input", "loss", "scratch")
_NOTHING = 1e-6
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Decisions:
    """Over which gaps units leave the device, which blocks are recomputed, and how long tasks take.

    A place is (class of the round, offset in it), the same for all middle rounds; a gap's key is
    its unit and the place where it begins (`Folding.gap_place`). What is not among `kept` stays,
    too: its gap is too short for the program. What has a fixed home in `choices` is not to change.
    `step_s` is what the program's decisions come to.
    """

    kept: Mapping[GapKey, bool]
    levels: Mapping[Place, str]
    interval_ns: Mapping[Place, float]
    choices: Choices = OPEN
    step_s: float = 0.0

    @staticmethod
    def of(solved: Relaxation, view: ChainView, choices: Choices = OPEN) -> "Decisions":
        """Round a solution for the same chain, of at most three rounds.

        Shares hold for every stretch of the chain: what is half offloaded is offloaded every other
        time.
        """
        folding, dither = view.folding, _Dither()
        levels = _levels(solved, view, dither)
        interval_ns = {folding.place(i): ms * 1e6 for i, ms in enumerate(solved.interval_ms)}
        kept: dict[GapKey, bool] = {}
        for key, (kept_bytes, moved_bytes) in _shares(solved, view).items():
            unit = view.units.units[key[0]]
            threshold = dither.threshold((unit.tensor.role, unit.tensor.size_bytes), key[0])
            kept[key] = kept_bytes >= threshold * (kept_bytes + moved_bytes) - _NOTHING
        return Decisions(kept, levels, interval_ns, choices, solved.step_s)

    def with_kept(self, kept: Mapping[GapKey, bool]) -> "Decisions":
        return replace(self, kept=kept)

    def recomputes(self, view: ChainView) -> dict[str, str]:
        """Return the recompute level of every group of a chain of any number of rounds."""
        found: dict[str, str] = {}
        for recompute in view.chain.recomputes:
            level = self.levels.get(view.folding.place(view.position[recompute.before]))
            if level is not None:
                found[recompute.group] = level
        return found

    def keeps(self, unit: Unit, place: Place) -> bool:
        """Whether a unit stays on the device over the gap that begins at a place."""
        return is_kept(unit) or self.kept.get((unit.unit_id, place), True)

    def is_fixed(self, unit: Unit) -> bool:
        """Whether the user has fixed over which gaps a unit stays."""
        return is_kept(unit) or self.choices.home(unit.tensor.role) is not None

    def is_away(self, unit: Unit) -> bool:
        """Whether a unit is on the device around its uses only."""
        at_home = self.choices.home(unit.tensor.role) == "host"
        return at_home and self.choices.strict_homes and not is_kept(unit)


def is_kept(unit: Unit) -> bool:
    """Whether a unit always stays: it is too small to be worth a copy, or nobody reads it later."""
    return unit.tensor.role in _ALWAYS_KEPT


class _Dither:
    """Thresholds in (0, 1) by kind and name, spread evenly over any stretch of names as they come.

    A name's is the same in all rounds, so that what is moved in one is moved in the others where
    shares are alike, and needs one home. (Multiples of the golden ratio, modulo 1.)
    """

    def __init__(self) -> None:
        self._number: dict[Hashable, dict[Hashable, int]] = {}

    def threshold(self, kind: Hashable, name: Hashable) -> float:
        known = self._number.setdefault(kind, {})
        number = known.setdefault(name, len(known))
        return (0.5 + number * _GOLDEN) % 1.0


def _shares(solved: Relaxation, view: ChainView) -> dict[GapKey, tuple[float, float]]:
    """Bytes of every gap that are kept, and bytes that are moved."""
    chain, units = view.chain, view.units
    segment = solved.segment_of_task
    share = {
        (leaf, of_gap.gap.begin): (of_gap.kept, of_gap.loaded)
        for of_gap in solved.fractions
        if not of_gap.between_middles
        for leaf in of_gap.element.leaves
    }
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    found: dict[GapKey, tuple[float, float]] = {}
    for name, before, after in content_gaps(device_uses(chain, chain.tasks, units), units):
        key = (name, view.folding.gap_place(before, after))
        for leaf in units.units[name].leaves:
            # over the end of a pass the program's gap begins where the host has made it
            begin = view.made_on_host.get(leaf, before) if after <= before else before
            shares = share.get((leaf, segment[begin]))
            if shares is None or (segment[before] == segment[after] and after > before):
                continue
            kept, moved = found.get(key, (0.0, 0.0))
            size = sizes[leaf]
            found[key] = kept + shares[0] * size, moved + shares[1] * size
    return found


def _levels(solved: Relaxation, view: ChainView, dither: _Dither) -> dict[Place, str]:
    """Return the level of each block that is recomputed."""
    shares: dict[int, dict[str, float]] = {}
    for recompute in view.chain.recomputes:
        level = recompute.task.label.level or ""
        mine = shares.setdefault(view.position[recompute.before], {})
        mine[level] = solved.recomputed[recompute.task.task_id]
    in_round: dict[int, int] = {}
    found: dict[Place, str] = {}
    for at, levels in sorted(shares.items()):
        place = view.folding.place(at)
        number = in_round[place[0]] = in_round.get(place[0], -1) + 1
        left = dither.threshold("level", number)
        for level, share in levels.items():
            left -= share
            if left < -_NOTHING:
                found[place] = level
                break
    return found
