"""Errors of ranks that wait for one another."""

from typing import Literal

from twinstream.schedule.errors import TwinstreamError

Cause = Literal["timeout", "lost", "failed"]


class RanksError(TwinstreamError):
    """A run of several ranks ended early; `details` is a traceback where it is our bug."""

    def __init__(self, message: str, details: str = "") -> None:
        self.details = details
        super().__init__(message)


class RendezvousError(RanksError):
    """Ranks have not met: a port is taken, or somebody did not come."""


class GpusError(RanksError):
    """The GPUs of this machine do not do: each rank needs its own, and all of one kind."""


class RanksDifferError(RanksError):
    """Ranks have different schedules, versions or numbers of passes."""


class CommunicationError(RanksError):
    """An op that other ranks take part in did not come about.

    Attributes:
        rank: whose op it is.
        op_id: which; None where ranks end a run together.
        peers: the other ranks that take part.
        cause: they kept it waiting too long, a connection to one was lost, or something else.
    """

    def __init__(
        self, message: str, *, rank: int, op_id: str | None, peers: tuple[int, ...], cause: Cause
    ) -> None:
        self.rank, self.op_id, self.peers, self.cause = rank, op_id, peers, cause
        super().__init__(message)
