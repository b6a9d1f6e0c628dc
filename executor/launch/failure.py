"""Find the rank that is to blame from what all ranks report, and make one message of it."""

import signal
from collections.abc import Mapping, Sequence

from twinstream.executor.launch.protocol import BlockedOps, RankFailure
from twinstream.executor.ranks.errors import RanksError
from twinstream.executor.ranks.waiting import Wait


def diagnose(
    failures: Sequence[RankFailure],
    blocked: Mapping[int, BlockedOps],
    exit_codes: Mapping[int, int | None],
) -> RanksError:
    """The cause behind the first failure.

    A process that died comes first, then what a rank says of itself: that others lost it, or waited
    for it, follows from these. Of ranks that others wait for, it is one that does not answer or
    waits for nobody.

    Args:
        failures: in the order in which they came.
        blocked: by rank, of those that answered.
        exit_codes: of the processes that have ended by themselves; None of another machine's.
    """
    # who aborts may have been told by a library that another one is gone
    for rank, code in sorted(exit_codes.items(), key=lambda one: one[1] == -signal.SIGABRT):
        return RanksError(f"rank {rank} {_ended(code)}{_met(rank, failures, blocked)}")
    for one in failures:
        if one.kind == "refused":
            return RanksError(one.text if _all_say(one, failures) else _of(one))
        if one.kind == "bug":
            return RanksError(_of(one), one.details)
    first = failures[0]
    if first.kind == "timeout":
        named = dict.fromkeys(rank for one in failures for rank in one.peers)
        silent = [rank for rank in named if rank not in blocked]
        busy = [rank for rank in [*named, *blocked] if rank in blocked and not blocked[rank].now]
        for rank in [*silent, *busy]:
            how = "does not answer" if rank in silent else "does not get there"
            return RanksError(f"rank {rank} {how}: {first.text}")
    return RanksError(first.text)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"
    if code is None:
        return "is gone: its process on another machine has ended, or that machine has"
    return f"ended with exit code {code}"


def _met(rank: int, failures: Sequence[RankFailure], blocked: Mapping[int, BlockedOps]) -> str:
    """Who noticed, and in which op."""
    for one in failures:
        if rank in one.peers:
            return f": {one.text}"
    waiting: list[tuple[int, Wait]] = [(r, w) for r in blocked for w in blocked[r].now]
    for other, wait in waiting:
        if rank in wait.peers:
            return f": rank {other} was with it in {wait}"
    return ""


def _all_say(one: RankFailure, failures: Sequence[RankFailure]) -> bool:
    """Then it is of no rank in particular."""
    ranks = {other.rank for other in failures if other.text == one.text}
    return len(ranks) > 1 or f"rank {one.rank}" in one.text


def _of(one: RankFailure) -> str:
    return f"rank {one.rank}: {one.text}"
