"""Who is to blame, from what all ranks say."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

from twinstream.executor.launch.failure import diagnose
from twinstream.executor.launch.protocol import BlockedOps, RankFailure, WhatBlocks, recv, send
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.ranks.waiting import Wait


def waited(rank: int, *peers: int) -> RankFailure:
    text = f"rank {rank} waited for {peers}"
    return RankFailure(rank, "timeout", text, op_id="op", peers=peers)


def waiting(rank: int, *peers: int) -> BlockedOps:
    return BlockedOps(rank, (Wait("op", "recv", 3, peers, 0),) if peers else ())


def test_of_a_chain_of_waits_the_rank_at_its_end_is_named():
    """0 waits for 1, 1 for 2, 2 for 3, which computes; 4 is through."""
    waits = {r: waiting(r, r + 1) for r in range(3)} | {3: waiting(3), 4: waiting(4, 0, 1, 2, 3)}
    error = diagnose([waited(0, 1)], waits, {})
    assert str(error) == "rank 3 does not get there: rank 0 waited for (1,)"


def test_a_rank_that_says_nothing_comes_before_one_that_is_busy():
    waits = {0: waiting(0, 1, 2, 3), 1: waiting(1), 3: waiting(3)}
    error = diagnose([waited(0, 1, 2, 3)], waits, {})
    assert str(error).startswith("rank 2 does not answer: ")


def test_a_busy_rank_that_is_waited_for_comes_before_one_that_is_not():
    waits = {0: waiting(0, 2), 1: waiting(1), 2: waiting(2)}
    assert str(diagnose([waited(0, 2)], waits, {})).startswith("rank 2 does not get there")


def test_a_dead_process_comes_before_all_that_follows_from_it():
    lost = RankFailure(0, "lost", "rank 0 lost rank 1", op_id="op", peers=(1,))
    told = RankFailure(2, "refused", "there is no data")
    error = diagnose([lost, told], {}, {1: -9})
    assert str(error) == "rank 1 was killed by signal 9 (SIGKILL): rank 0 lost rank 1"
    assert str(diagnose([], {0: waiting(0, 1)}, {1: 3})) == (
        "rank 1 ended with exit code 3: rank 0 was with it in op 'op' (recv) of pass 3"
    )
    assert str(diagnose([], {}, {1: 3})) == "rank 1 ended with exit code 3"


def test_who_was_aborted_comes_after_who_died_otherwise():
    assert str(diagnose([], {}, {0: -6, 1: -9})).startswith("rank 1 was killed by signal 9")
    assert str(diagnose([], {}, {0: -6})).startswith("rank 0 was killed by signal 6 (SIGABRT)")


def test_what_a_rank_says_of_itself_comes_before_that_others_lost_it():
    lost = RankFailure(0, "lost", "rank 0 lost rank 1", op_id="op", peers=(1,))
    told = RankFailure(1, "refused", "there is no data")
    assert str(diagnose([lost, told], {}, {})) == "rank 1: there is no data"
    same = [RankFailure(rank, "refused", "there is no data") for rank in range(2)]
    assert str(diagnose(same, {}, {})) == "there is no data"
    bug = RankFailure(1, "bug", "KeyError: 3", details="Traceback ...")
    assert str(diagnose([lost, bug], {}, {})) == "rank 1: KeyError: 3"
    assert diagnose([bug], {}, {}).details == "Traceback ..."


def test_where_nobody_is_to_blame_the_first_is_said():
    waits = {0: waiting(0, 1), 1: waiting(1, 0)}
    assert str(diagnose([waited(1, 0)], waits, {})) == "rank 1 waited for (0,)"


def test_who_comes_to_wait_for_a_dead_rank_a_moment_later_says_in_which_op():
    """The host of a GPU learns only then that its stream is there."""
    (ours, theirs), (dead, end) = Pipe(), Pipe()
    end.close()
    asked: list[object] = []

    def answer() -> None:
        for said in (waiting(0), waiting(0), waiting(0, 1)):
            asked.append(recv(theirs))
            send(theirs, said)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    processes = object.__new__(RankProcesses)
    processes._pipes, processes._gone = [ours, dead], set()
    gone = SimpleNamespace(exitcode=-9, join=lambda timeout: None)
    processes._processes = [SimpleNamespace(exitcode=None), gone]
    assert str(processes._explained(None)) == (
        "rank 1 was killed by signal 9 (SIGKILL): rank 0 was with it in op 'op' (recv) of pass 3"
    )
    thread.join(10)
    assert asked == 3 * [WhatBlocks()]
