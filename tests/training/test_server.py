"""The trainer's end of the channels: who is answered what, in whatever order ranks come."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.plans import MACHINE, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.launch.protocol import (
    AtBoundary,
    Continue,
    Evaluate,
    GetBatch,
    Losses,
    ReadTensor,
    ShouldPause,
    StepResult,
    TensorBytes,
    WriteTensor,
    Written,
)
from twinstream.executor.run.evaluation import PassLoss
from twinstream.executor.state.training_state import carried_names
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.document import Caps
from twinstream.training import server as of_server
from twinstream.training.server import SilentRankError, TrainerServer

SCHEDULE = planned(tiny_chain("packed"), MACHINE, Caps(), "streaming")
NAMES = carried_names(SCHEDULE)


class Ranks:
    """Two replicas that say what is in a script; None is that nobody says anything in time."""

    size, pids = 2, ()

    def __init__(self, *script: tuple[int, object] | None) -> None:
        self._script = list(script)
        self.told: list[tuple[int, Any]] = []
        self.limits: list[float | None] = []

    def send(self, rank: int, message: object) -> None:
        self.told.append((rank, message))

    def recv(self, timeout_s: float | None = None) -> tuple[int, Any] | None:
        self.limits.append(timeout_s)
        return self._script.pop(0)

    def close(self) -> None:
        pass


def server_of(ranks: Ranks, results: list[Any] | None = None) -> TrainerServer:
    alone = RankPart.alone(SCHEDULE)
    parts: Iterable[RankPart] = [
        replace(alone, rank=rank, coordinates={"dp": rank}) for rank in range(2)
    ]
    return TrainerServer(
        ranks,
        SimpleNamespace(parts=parts, states=None, sharing_replicas=1),  # type: ignore[arg-type]
        lambda replica, step: f"batch {step} of {replica}",  # type: ignore[arg-type,return-value]
        lambda replica, result: [] if results is None else results.append((replica, result)),
        timeout_s=3.0,
    )


def test_all_ranks_are_told_what_the_first_that_asks_is_told() -> None:
    results: list[Any] = []
    loss = StepResult("loss", 2, 0.5)
    ranks = Ranks(
        (1, GetBatch(1)), (0, ShouldPause(1)), (0, ShouldPause(2)), (0, AtBoundary(2)),
        (1, ShouldPause(1)), (1, loss), (1, ShouldPause(2)), (1, AtBoundary(2)),
        (1, ShouldPause(3)),
    )  # fmt: skip
    server = server_of(ranks, results)
    assert server.next_step() == 1
    server.decide(1, pauses=False)
    assert server.next_step() == 2
    server.decide(2, pauses=True)
    server.pause(2)
    assert ranks.told == [
        (1, "batch 1 of 1"), (0, False), (0, True), (1, False), (1, True),
    ]  # fmt: skip
    assert results == [(1, loss)]
    server.resume()
    assert ranks.told[-2:] == [(0, Continue(True)), (1, Continue(True))]
    assert server.next_step() == 3


def test_a_rank_that_keeps_the_others_waiting_is_named() -> None:
    ranks = Ranks((1, AtBoundary(0)), (0, AtBoundary(0)), (1, AtBoundary(4)), None)
    server = server_of(ranks)
    server.pause(0)
    server.resume()
    with pytest.raises(
        SilentRankError,
        match=r"rank 0 does not answer: rank 1 is through with step 4, and it not 3 s later",
    ):
        server.pause(4)
    # until one is there nobody is late; then all have longer to begin than between steps
    assert [limit is None for limit in ranks.limits] == [True, False, True, False]
    assert ranks.limits[1] > 500 and 0 < ranks.limits[3] <= 3.0  # type: ignore[operator]


def test_state_is_read_of_the_first_replica_and_written_to_all() -> None:
    flat = torch.arange(4, dtype=torch.uint8)
    ranks = Ranks(
        (0, Written()), (1, Written()), (0, TensorBytes(np.arange(4, dtype=np.uint8))), None
    )
    server = server_of(ranks)
    assert set(server.names) == set(NAMES)
    name = NAMES[0]
    server.write(name, flat)
    assert torch.equal(server.read(name), flat)
    assert [(rank, type(said)) for rank, said in ranks.told] == [
        (0, WriteTensor), (1, WriteTensor), (0, ReadTensor),
    ]  # fmt: skip
    with pytest.raises(SilentRankError, match=rf"rank 0 .*: '{name}' was asked of it 3 s ago"):
        server.read(name)


def test_state_is_read_in_pieces_that_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_server, "_PIECE_BYTES", 10_000)
    told = (0, TensorBytes(np.arange(4, dtype=np.uint8)))
    ranks = Ranks(*(50 * [told]), None)
    server, name = server_of(ranks), next(one for one in NAMES if one.startswith("opt."))
    pieces = list(server.pieces(name))
    asked = [said for _, said in ranks.told if isinstance(said, ReadTensor)]
    assert len(pieces) == len(asked) > 1 and asked[0].start == 0
    for one, after in pairwise(asked):
        assert one.stop == after.start and one.stop - one.start == 10_000
    assert asked[-1].stop == {t.tensor_id: t.size_bytes for t in SCHEDULE.tensors}[name]


def test_replicas_evaluate_at_the_same_time_and_in_whatever_order() -> None:
    shares = [Losses((PassLoss(1.0, 8), PassLoss(2.0, 4))), Losses((PassLoss(0.5, 8),) * 2)]
    ranks = Ranks((1, shares[1]), (0, shares[0]), (0, shares[0]), None)
    server = server_of(ranks)
    batches: Any = [("a", "b"), ("c", "d")]
    assert server.evaluate(batches) == [shares[0].passes, shares[1].passes]
    assert ranks.told == [(0, Evaluate(("a", "b"))), (1, Evaluate(("c", "d")))]  # type: ignore[arg-type]
    with pytest.raises(SilentRankError, match="rank 1 does not answer: a loss was asked of it 6 s"):
        server.evaluate(batches)
