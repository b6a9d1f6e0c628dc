"""A rank's state in its arenas, while nothing runs: read, written, evaluated."""

from collections.abc import Callable, Sequence

import torch

from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.communications import RankCommunications
from twinstream.executor.run.evaluation import EvaluationBatch, PassLoss, pass_losses
from twinstream.executor.state.training_state import put_carried, take_carried
from twinstream.schedule.cluster.projecting import RankPart


class ResidentRank:
    """One rank at rest.

    Args:
        communications: of another part of the same rank, over the groups that are open.
    """

    def __init__(
        self,
        part: RankPart,
        arenas: Arenas,
        options: RunOptions,
        communications: Callable[[RankPart], RankCommunications],
    ) -> None:
        self.part = part
        self._arenas, self._options, self._communications = arenas, options, communications

    def take(self, name: str) -> torch.Tensor:
        """A whole tensor of its state, 1-D uint8."""
        return take_carried(self.part.schedule, self._arenas, name)

    def put(self, name: str, flat: torch.Tensor) -> None:
        """As `take` gives it."""
        put_carried(self.part.schedule, self._arenas, name, flat)

    def evaluate(self, part: RankPart, batches: Sequence[EvaluationBatch]) -> list[PassLoss]:
        """The losses of its state, or its replica's shares of them; none where it has no head.

        All ranks are to be asked at the same time.

        Args:
            part: of this rank, of the evaluation that was derived from its schedule.

        Raises:
            TwinstreamError: as `pass_losses`.
        """
        return pass_losses(
            part.schedule, self._arenas.memory, batches, self._options, self._communications(part)
        )
