"""A rank's state in its arenas, while nothing runs: read, written, evaluated."""

from collections.abc import Callable, Sequence

import torch

from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.memory.staging import Staging
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.evaluation import EvaluationBatch, PassLoss, pass_losses
from twinstream.executor.run.execute import flush_in
from twinstream.executor.run.work import Communications
from twinstream.executor.state.training_state import put_carried, take_carried
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.derived.flush import flush_of


class ResidentRank:
    """One rank at rest.

    Args:
        work: of the rank's host.
        communications: of another schedule of the same rank, over the groups that are open.
    """

    def __init__(
        self,
        part: RankPart,
        arenas: Arenas,
        options: RunOptions,
        work: HostWork,
        communications: Callable[[RankPart], Communications | None] = lambda part: None,
    ) -> None:
        self.part = part
        self._arenas, self._options, self._work = arenas, options, work
        self._communications = communications
        self._flush = flush_of(part.schedule)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Bytes of a whole tensor of its state, 1-D uint8, as `take_carried` gives them."""
        return take_carried(self.part.schedule, self._arenas, name, start, stop)

    def write(self, name: str, flat: torch.Tensor, staging: Staging | None = None) -> None:
        """Write a whole tensor of its state, 1-D uint8; `staging` is as in `put_carried`."""
        put_carried(self.part.schedule, self._arenas, name, flat, staging)

    def flush(self, num_passes: int) -> None:
        """Make the updates that the passes so far have left to the next one."""
        if self._flush is not None:
            memory, communications = self._arenas.memory, self._communications(self.part)
            flush_in(self._flush, memory, self._work, num_passes, self._options, communications)

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
