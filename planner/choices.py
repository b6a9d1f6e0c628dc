"""What the user may fix of a plan by `optimal`, and how hard to search for the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from twinstream.models.providers.flops import SavedLevel
from twinstream.schedule.chain import Chain
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.tensors import Role

Home = Literal["device", "host"]
Effort = Literal["quick", "normal"]
UpdatePlaces = Literal["recipe", "host", "auto"]
EFFORTS: tuple[Effort, ...] = ("quick", "normal")
NO_RECOMPUTE = "none"
RECOMPUTE_LEVELS: Mapping[str, str] = {
    NO_RECOMPUTE: NO_RECOMPUTE,
    "full": SavedLevel.INPUT.value,
    "attention": SavedLevel.ATTENTION.value,
    "experts": SavedLevel.EXPERTS.value,
}
"""By the word that says how a block is recomputed, what it is recomputed from."""

_KINDS: Mapping[Role, str] = {
    "parameter": "parameter",
    "gradient": "gradient",
    "optimizer_state": "optimizer_state",
    "activation": "activation",
    "context": "activation",
}
KINDS = tuple(dict.fromkeys(_KINDS.values()))


def recompute_level(word: str) -> str:
    """The level of a block that a word stands for.

    >>> recompute_level("full"), recompute_level("ATTENTION"), recompute_level("none")
    ('INPUT', 'ATTENTION', 'none')
    """
    return RECOMPUTE_LEVELS.get(word, word)


def recompute_word(level: str) -> str:
    """The word for a level.

    >>> recompute_word("INPUT"), recompute_word("none"), recompute_word("selective")
    ('full', 'none', 'selective')
    """
    words = {found: word for word, found in RECOMPUTE_LEVELS.items()}
    return words.get(level, level)


class ChoiceError(TwinstreamError):
    """The user has fixed something that cannot be."""


def require_known(flag: str, name: str | None, known: tuple[str, ...]) -> None:
    """Refuse a name that is none of those.

    Raises:
        ChoiceError: it lists them.
    """
    if name is not None and name not in known:
        raise ChoiceError(f"{flag} '{name}' is unknown; known: {', '.join(known)}")


@dataclass(frozen=True)
class Choices:
    """What the user has fixed of a plan; the planner decides the rest.

    Args:
        homes: by kind of tensor (parameter, gradient, optimizer_state, activation): `device`, it
            never leaves it; `host`, it is on the device only around its uses.
        recompute: the level that every block is recomputed from, or "none"; None is left open.
        prefetch_blocks: a load is issued at most so long before its first use, and an offload is
            given so long after the last, in times of the longest task; None is left open.
        optimizer: where updates are made: where the recipe says; all on the `host`; or `auto`, each
            group where that makes the step faster.
        effort: `quick` plans one cut of the step and simulates it once, and once for less memory
            wherever that may be faster.

    Raises:
        ChoiceError: a kind, a home or a number is not one of those.
    """

    homes: Mapping[str, Home] = field(default_factory=dict)
    recompute: str | None = None
    prefetch_blocks: float | None = None
    effort: Effort = "normal"
    optimizer: UpdatePlaces = "recipe"
    strict_homes: ClassVar[bool] = True  # what is at home on the host leaves over every gap

    def __post_init__(self) -> None:
        for kind, home in self.homes.items():
            if kind not in KINDS:
                raise ChoiceError(f"'{kind}' has no home to fix; known: {', '.join(KINDS)}")
            if home not in ("device", "host"):
                raise ChoiceError(f"the home of '{kind}' is '{home}'; known: device, host")
        if self.prefetch_blocks is not None and not 0.0 <= self.prefetch_blocks <= 1e6:
            raise ChoiceError(
                f"a load cannot be issued {self.prefetch_blocks:g} blocks ahead; name 0 to 1000000"
            )
        require_known("effort", self.effort, EFFORTS)
        require_known("the optimizer's place", self.optimizer, get_args(UpdatePlaces))

    def __hash__(self) -> int:
        homes = tuple(sorted(self.homes.items()))
        return hash((homes, self.recompute, self.prefetch_blocks, self.effort, self.optimizer))

    @property
    def open(self) -> bool:
        """Whether homes and recompute levels are all left to the planner."""
        return not self.homes and self.recompute is None

    @property
    def keeps_state(self) -> bool:
        """Whether the device must have what an update uses."""
        return "device" in (self.homes.get(kind) for kind in KINDS[:3])

    @property
    def of_one_memory(self) -> "Choices":
        """These, for a machine of one memory: what would move within it stays where it is."""
        homes: dict[str, Home] = {kind: self.homes.get(kind, "device") for kind in KINDS}
        return replace(self, homes=homes)

    @property
    def fixed(self) -> tuple[str, ...]:
        """The homes and levels that are fixed, in words."""
        kinds = [kind for kind in KINDS if kind in self.homes]
        found = [f"{kind} at home on the {self.homes[kind]}" for kind in kinds]
        if kinds == [*KINDS] and len(set(self.homes.values())) == 1:
            found = [f"everything at home on the {self.homes[kinds[0]]}"]
        if self.recompute == NO_RECOMPUTE:
            found.append("nothing recomputed")
        elif self.recompute is not None:
            found.append(f"every block recomputed from {self.recompute}")
        return tuple(found)

    def home(self, role: Role) -> Home | None:
        """Return where tensors of a role must be; None where that is open."""
        return self.homes.get(_KINDS.get(role, ""))

    def check(self, chain: Chain) -> None:
        """Refuse a level that no block of the chain has.

        Raises:
            ChoiceError: it lists the levels there are.
        """
        levels = dict.fromkeys(r.task.label.level or "" for r in chain.recomputes)
        if self.recompute not in (None, NO_RECOMPUTE, *levels):
            known = ", ".join(recompute_word(level) for level in (NO_RECOMPUTE, *levels))
            raise ChoiceError(
                f"recompute '{self.recompute}' is nothing that a block of this model does; known: "
                f"{known}"
            )


OPEN = Choices()


class PreferredHomes(Choices):
    """What the planner itself prefers: what is on the device all the time anyway, because its
    copies meet, stays. No bound follows from it."""

    strict_homes = False
