"""The trainer's end of the channels to its ranks: answers them, reads and writes their state."""

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from twinstream.executor.launch.protocol import (
    AtBoundary,
    Batch,
    Continue,
    Evaluate,
    GetBatch,
    Ranks,
    ReadTensor,
    ShouldPause,
    StepResult,
    WriteTensor,
)
from twinstream.executor.ranks.errors import RanksError
from twinstream.models.layout import whole_group
from twinstream.training.planning import START_S
from twinstream.training.ranks.planning import Plan

if TYPE_CHECKING:
    from twinstream.executor.ranks.rank_run import RankOutcome
    from twinstream.executor.run.evaluation import PassLoss
    from twinstream.executor.state.parted_state import Place

_PIECE_BYTES = 2**25
_KEPT_STEPS = 16  # stages are a few steps apart, at most


class SilentRankError(RanksError):
    """A rank keeps the others waiting for too long."""


class TrainerServer:
    """Serves the ranks of one plan, in the thread that calls it.

    Ranks train until they come to a step after which they are to pause. Then all of them are at
    rest, and their state may be read and written, until they resume.

    Args:
        batch: what a replica is fed of a step.
        result: takes what a replica reports of a step.
        timeout_s: how long a rank may keep the others waiting.

    Attributes:
        names: of all whole tensors of the state, `param.GROUP` and `opt.GROUP`.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        batch: Callable[[int, int], Batch],
        result: Callable[[int, StepResult], None],
        timeout_s: float,
    ) -> None:
        from twinstream.executor.state.parted_state import place_of
        from twinstream.executor.state.training_state import carried_names

        self._ranks, self._batch, self._result = ranks, batch, result
        self._timeout_s, self._limit_s = timeout_s, START_S
        self._states = plan.states
        self._pauses: dict[int, bool] = {}  # by step, what the first rank that asked was told
        self._asker = 0
        self._resting: dict[int, int] = {}
        self._replicas: dict[int, int] = {}
        self._silent: set[int] = set()  # ranks whose results another one has, too
        self._places: dict[int, Place] = {}
        self._owners: dict[str, dict[Place, int]] = {}  # by name and place, the first rank
        self._all_owners: dict[str, list[int]] = {}
        self._sizes: dict[str, int] = {}
        for part in plan.parts:
            self._sizes.update((t.tensor_id, t.size_bytes) for t in part.schedule.tensors)
            place = self._places[part.rank] = place_of(part.coordinates, plan.sharing_replicas)
            self._replicas[part.rank] = place[0]
            if any(place[1:]):
                self._silent.add(part.rank)
            for name in dict.fromkeys(map(whole_group, carried_names(part.schedule))):
                self._owners.setdefault(name, {}).setdefault(place, part.rank)
                self._all_owners.setdefault(name, []).append(part.rank)
        self.names = list(self._owners)

    def next_step(self) -> int:
        """Serve ranks until one of them, as the first, is through with beginning a step.

        Returns:
            The step; `decide` has to say whether ranks pause after it.
        """
        while True:
            rank, message = self._recv(None)
            if isinstance(message, ShouldPause) and message.step not in self._pauses:
                self._asker = rank
                return message.step
            self._answer(rank, message)

    def decide(self, step: int, *, pauses: bool) -> None:
        """Tell the rank that has asked, and whoever asks later, whether to pause after a step."""
        self._pauses[step] = pauses
        self._pauses.pop(step - _KEPT_STEPS, None)
        self._ranks.send(self._asker, pauses)

    def pause(self, step: int) -> None:
        """Serve ranks until all of them are at rest after a step.

        Raises:
            SilentRankError: one keeps the others waiting for too long.
        """
        until = None
        while len(self._resting) < self._ranks.size:
            left_s = None if until is None else max(0.0, until - monotonic())
            found = self._ranks.recv(left_s)
            if found is None:
                late = min(set(range(self._ranks.size)) - set(self._resting))
                raise SilentRankError(
                    f"rank {late} does not answer: rank {next(iter(self._resting))} is through "
                    f"with step {step}, and it not {self._limit_s:g} s later"
                )
            self._answer(*found)
            if until is None and self._resting:
                until = monotonic() + self._limit_s
        assert set(self._resting.values()) == {step}, "ranks rest after one step"
        self._limit_s = self._timeout_s

    def resume(self, *, goes_on: bool = True) -> None:
        """End the pause, and the run where it does not go on."""
        for rank in self._resting:
            self._ranks.send(rank, Continue(goes_on))
        self._resting.clear()

    def outcomes(self) -> "list[RankOutcome]":
        """What the ranks of a run that does not go on end with, by rank."""
        found = dict(self._recv(None) for _ in range(self._ranks.size))
        return [found[rank] for rank in sorted(found)]

    def read(self, name: str) -> Any:
        """A whole tensor of the state, 1-D uint8: of the first replica, where cut of all ranks.

        Tied embeddings, which two stages have alike, are the first stage's.

        Raises:
            SilentRankError: a rank does not give it.
        """
        owners = self._owners[name]
        if self._states is None:
            return self._read(next(iter(owners.values())), name)
        states = {
            place: {own: self._read(rank, own) for own in self._states.names(name)}
            for place, rank in owners.items()
        }
        return self._states.whole(states)[name]

    def pieces(self, name: str) -> Iterator[Any]:
        """The same, piece by piece; whole where it is put together of what ranks have.

        Raises:
            SilentRankError: a rank does not give it.
        """
        if self._states is not None:
            yield self.read(name)
            return
        owner = next(iter(self._owners[name].values()))
        size = self._sizes[name]
        for start in range(0, size, _PIECE_BYTES):
            yield self._read(owner, name, start, min(size, start + _PIECE_BYTES))

    def write(self, name: str, flat: Any) -> None:
        """Write a whole tensor of the state, 1-D uint8, to all ranks that have something of it.

        Raises:
            SilentRankError: a rank does not take it.
        """
        for rank in self._all_owners[name]:
            own = {name: flat}
            if self._states is not None:
                own = self._states.of_rank(own, self._places[rank])
            for held, values in own.items():
                written = WriteTensor(held, values.numpy())
                self._request({rank: written}, f"'{held}'", self._timeout_s)

    def evaluate(self, batches: Sequence[tuple[Batch, ...]]) -> "list[Sequence[PassLoss]]":
        """The losses of passes, by replica; a pass may take as long as a step.

        Args:
            batches: by replica, what it is fed of each pass.

        Raises:
            SilentRankError: a rank does not answer.
        """
        asked = {rank: Evaluate(batches[replica]) for rank, replica in self._replicas.items()}
        told = self._request(asked, "a loss", len(batches[0]) * self._timeout_s)
        heads = {self._replicas[rank]: found.passes for rank, found in told.items() if found.passes}
        return [heads[replica] for replica in sorted(heads)]

    def _read(self, rank: int, name: str, start: int = 0, stop: int | None = None) -> Any:
        import torch

        asked = {rank: ReadTensor(name, start, stop)}
        told = self._request(asked, f"'{name}'", self._timeout_s)
        return torch.from_numpy(told[rank].flat)

    def _request(self, asked: dict[int, Any], what: str, limit_s: float) -> dict[int, Any]:
        """What ranks at rest answer."""
        for rank, message in asked.items():
            self._ranks.send(rank, message)
        found: dict[int, Any] = {}
        while len(found) < len(asked):
            told = self._ranks.recv(limit_s)
            if told is None:
                late = min(set(asked) - set(found))
                raise SilentRankError(
                    f"rank {late} does not answer: {what} was asked of it {limit_s:g} s ago"
                )
            rank, found[rank] = told
        return found

    def _recv(self, timeout_s: float | None) -> tuple[int, Any]:
        found = self._ranks.recv(timeout_s)
        assert found is not None, "it is waited for"
        return found

    def _answer(self, rank: int, message: object) -> None:
        match message:
            case GetBatch(step):
                self._ranks.send(rank, self._batch(self._replicas[rank], step))
            case StepResult() if rank in self._silent:
                pass
            case StepResult():
                self._result(self._replicas[rank], message)
            case ShouldPause(step):
                self._ranks.send(rank, self._pauses[step])
            case AtBoundary(step):
                self._resting[rank] = step
            case other:
                raise AssertionError(f"rank {rank} says {other!r}")
