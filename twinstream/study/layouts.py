"""What queries that choose a layout of several GPUs have in common."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from twinstream.models.parallel.layout import Layout
from twinstream.planner.planner import Planner
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.query import Answer, Query


@dataclass(frozen=True, kw_only=True)
class LayoutAnswer(Answer):
    """A layout, and what is predicted of it."""

    layout: Layout

    @property
    def compute_waits(self) -> float:
        return 1.0 - self.shares["compute"]

    def compute_limit(self) -> float:
        """Tokens/s if compute of this layout never waited."""
        return self.tokens_per_s / self.shares["compute"]

    def figures_of(self, fields: Sequence[str]) -> dict[str, Any]:
        """Figures of any layout, and these fields of it."""
        uncertainty = self.uncertainty
        return {
            "layout": self.layout_text,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.num_gpus,
            "mfu": self.mfu,
            "memory_bytes": self.device_bytes,
            "room_bytes": self.room_bytes[0],
            "bound_s": self.bound_s,
            "gap": self.gap,
            "compute_share": self.shares["compute"],
            "communication_share": exposed_communication(self.shares),
            "bubble_share": self.shares.get("bubble", 0.0),
            "expected_error_mean": uncertainty.mean,
            "expected_error_kind": uncertainty.kind,
            **{f"layout.{name}": getattr(self.layout, name) for name in fields},
        }


_Of = TypeVar("_Of", bound=LayoutAnswer)


class ChoiceOfLayouts(Query, Generic[_Of]):
    """Which layout is the fastest."""

    @abstractmethod
    def fastest(self, progress: Callable[[str], None] = lambda text: None) -> _Of:
        """The fastest that is found.

        Args:
            progress: is told now and then what is looked at, and the best so far.

        Raises:
            TwinstreamError: none can be, or fits.
        """

    @abstractmethod
    def laid_out(self, layout: Layout) -> _Of:
        """A layout from before, here.

        Raises:
            TwinstreamError: it cannot be here, or does not fit.
        """

    def beside(self, known: _Of, fastest: _Of) -> _Of:
        """A known layout that is faster than what was found, with what the search proved."""
        return known

    def answer(
        self, known: Sequence[Answer] = (), planner: Planner | None = None, *,
        enough_tokens_per_s: float = inf, advises: bool = True,
    ) -> _Of:  # fmt: skip
        best = self._best_of(known)
        if best is not None and best.tokens_per_s >= enough_tokens_per_s:
            return best
        try:
            found = self.fastest()
        except TwinstreamError:
            if best is None:
                raise
            return best
        return found if best is None or found.step_s <= best.step_s else self.beside(best, found)

    def _best_of(self, known: Sequence[Answer]) -> _Of | None:
        """The fastest of the layouts of known answers, of which some may not fit."""
        found = []
        for layout in {one.layout: None for one in known if one.layout is not None}:
            with suppress(TwinstreamError):
                found.append(self.laid_out(layout))
        return min(found, key=lambda one: one.step_s, default=None)
