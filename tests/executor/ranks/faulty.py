"""Feeds that go wrong on one rank, in one pass; called in the rank's process."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.executor.ranks.talks import Talk, among_equals, fed
from tests.schedule.cluster.small_clusters import mesh_of
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Feed

RANK, PASS = 1, 2


def summing(num_ranks: int, count: int = 1000) -> Schedule:
    talk = Talk()
    talk.feed("x", count)
    talk.say("all_reduce", ["dp"], "x")
    talk.fetch("x")
    return among_equals(mesh_of(dp=num_ranks), talk)


def going_wrong(how: str, part: RankPart) -> RankInputs:
    good = fed(part)

    def feed(op: Feed, number: int) -> torch.Tensor:
        if part.rank == RANK and number == PASS:
            go_wrong(how)
        return good.host_work.feed(op, number)

    return replace(good, host_work=replace(good.host_work, feed=feed))


def go_wrong(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(7)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleeps":
        time.sleep(1000)
    if how == "refuses":
        raise TwinstreamError("the data ends here")
    if how == "has a bug":
        raise ZeroDivisionError("by nothing")


def with_a_child(noted: Path, part: RankPart) -> RankInputs:
    """Rank 0 starts a process, whose id it notes; then rank 1 is killed."""
    if part.rank == 0:
        child = subprocess.Popen(["sleep", "1000"])
        noted.write_text(str(child.pid), encoding="utf-8")
    return going_wrong("killed", part)


def unfit(part: RankPart) -> RankInputs:
    """All ranks refuse alike."""
    raise TwinstreamError("there is no such data")


def filled_late(part: RankPart) -> RankInputs:
    """The state of one rank takes longer than others would wait in an op."""

    def fill(rank: object) -> None:
        if part.rank == RANK:
            time.sleep(3.5)

    return replace(fed(part), fill=fill)
