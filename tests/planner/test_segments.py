"""Tasks taken together keep the bound a bound, and not a trivial one."""

from functools import cache
from itertools import groupby
from statistics import median

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.planning import plan_chain
from tests.helpers.plans import MACHINE, enough_device_bytes
from tests.helpers.small_chains import Sort, build_chain
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.planner.bound import segments
from twinstream.planner.bound.lower_bound import lower_bound
from twinstream.planner.bound.segments import Segments
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.planner.limits import SearchLimits
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_rank

FEW, PLENTY = 20, 900
SLOW, MODERATE, FAST = 1e6, 1e7, 1e8  # bytes/s of links

# Tokens of a sequence and of a chunk, chunks a round, rounds.
SHAPES = {
    "four packed chunks": (16, 32, 4, 2),
    "eight packed chunks": (16, 16, 8, 1),
    "sixteen packed chunks, folded": (16, 16, 16, 4),
    "a sequence in eight": (128, 16, 8, 2),
    "a sequence in sixteen": (256, 16, 16, 1),
    "two sequences in eight, folded": (128, 16, 16, 4),
}

PACKED = Workload(seq_len=16, chunk_tokens=16, chunks_per_round=8, rounds_per_step=2)


@cache
def chain_of(shape: str) -> Chain:
    seq_len, chunk_tokens, chunks, rounds = SHAPES[shape]
    workload = Workload(
        seq_len=seq_len,
        chunk_tokens=chunk_tokens,
        chunks_per_round=chunks,
        rounds_per_step=rounds,
    )
    return lower(small("tiny"), workload)


@cache
def some_caps(shape: str) -> list[int]:
    least = enough_device_bytes(with_rounds(chain_of(shape), PROGRAM_ROUNDS), "streaming")
    return [least, least * 5 // 4, least * 2]


def link_machine(bytes_per_s: float) -> Machine:
    """The CPU with links of this rate."""
    rate = number(bytes_per_s)
    links = {"pcie_h2d_bytes_per_s": rate, "pcie_d2h_bytes_per_s": rate}
    return MACHINE.model_copy(update=links)


@cache
def bound_s(shape: str, bytes_per_s: float, device_bytes: int | None, most: int) -> float:
    chain = chain_of(shape)
    found = lower_bound(
        with_rounds(chain, PROGRAM_ROUNDS),
        link_machine(bytes_per_s),
        Caps(device_bytes=device_bytes),
        num_rounds=len(chain.round_starts),
        most_segments=most,
    )
    assert found is not None
    return found.step_s


def bounds_s(bytes_per_s: float) -> list[tuple[float, float, float]]:
    """With tasks together, with single ones, and without a cap; of every shape at some caps."""
    return [
        (
            bound_s(shape, bytes_per_s, device_bytes, FEW),
            bound_s(shape, bytes_per_s, device_bytes, PLENTY),
            bound_s(shape, bytes_per_s, None, PLENTY),
        )
        for shape in SHAPES
        for device_bytes in some_caps(shape)
    ]


# --- segments


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, FEW, 50])
def test_segments_are_consecutive_tasks_of_one_round_and_one_kernel(shape, most):
    chain = chain_of(shape)
    found = Segments.of(chain, most)
    tasks = [i for segment in range(found.count) for i in found.tasks(segment)]
    assert tasks == list(range(len(chain.tasks)))
    for segment in range(found.count):
        mine = found.tasks(segment)
        assert mine[0] == found.firsts[segment]
        assert {found.of_task[i] for i in mine} == {segment}
        assert not set(mine[1:]) & set(chain.round_starts)
        assert len({chain.calls[chain.tasks[i].call].kernel for i in mine}) == 1
        assert len({chain.tasks[i].label.layer for i in mine}) == 1
        assert len(mine) <= chain.workload.chunks_per_round
    assert found.count < len(chain.tasks)


def test_a_round_begins_a_segment_even_where_the_kernel_goes_on():
    one_round = build_chain([Sort("x", 1, "parameter", {0: ("read", 0)})], [1.0] * 12)
    workload = one_round.workload.model_copy(update={"chunks_per_round": 4})
    chain = one_round.model_copy(update={"round_starts": (0, 6), "workload": workload})
    assert Segments.of(chain, 1).firsts == (0, 4, 6, 10)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_few_tasks_each_is_its_own_segment(shape):
    chain = chain_of(shape)
    found = Segments.of(chain, len(chain.tasks))
    assert found.single
    assert found.of_task == found.firsts == tuple(range(len(chain.tasks)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_more_segments_are_allowed_the_more_there_are(shape):
    chain = chain_of(shape)
    counts = [Segments.of(chain, most).count for most in (1, 20, 40, 80, 160, 500)]
    assert counts == sorted(counts)
    assert counts[-1] == len(chain.tasks)
    # At the least one for each run of tasks of a kernel in a round.
    runs = 0
    for low, high in zip(chain.round_starts, (*chain.round_starts[1:], None), strict=True):
        kernels = [chain.calls[task.call].kernel for task in chain.tasks[low:high]]
        runs += len(list(groupby(kernels)))
    singles = 4 * chain.workload.chunks_per_round * len(chain.round_starts)  # where most is held
    assert runs <= counts[0] < 3 * runs + singles


def test_where_a_round_holds_the_most_tasks_stay_single():
    """The end of the forward pass, the loss, and the beginning of the backward pass."""
    chain = lower(small("tiny", num_layers=6), PACKED)
    found = Segments.of(chain, 1)
    single = {
        chain.tasks[found.firsts[segment]].task_id
        for segment in range(found.count)
        if len(found.tasks(segment)) == 1
    }
    for round_ in range(2):
        assert {f"r{round_}.head_loss.{chunk}" for chunk in range(8)} <= single
        backward = {f"r{round_}.block_backward.5.{chunk}" for chunk in range(8)}
        assert len(backward & single) >= 7
        assert not {f"r{round_}.block_forward.3.{chunk}" for chunk in range(8)} & single
        assert not {f"r{round_}.block_backward.3.{chunk}" for chunk in range(8)} & single


def test_single_tasks_there_bring_the_bound_to_that_of_single_tasks_everywhere(monkeypatch):
    workload = PACKED.model_copy(update={"rounds_per_step": 1})
    chain = lower(small("tiny", num_layers=6), workload)
    persistent = set(chain.persistent)
    state = sum(t.size_bytes for t in chain.tensors if t.tensor_id in persistent)
    caps = Caps(device_bytes=state * 4 // 5, host_bytes=state * 3 // 5)

    def step_s(most: int) -> float:
        found = lower_bound(chain, MACHINE, caps, most_segments=most)
        assert found is not None
        return found.step_s

    assert step_s(FEW) == pytest.approx(step_s(PLENTY), rel=1e-6)
    monkeypatch.setattr(segments, "_fullest", lambda chain: frozenset())
    assert step_s(FEW) < 0.96 * step_s(PLENTY)


# --- the bound with tasks together


@pytest.mark.parametrize("bytes_per_s", [SLOW, FAST])
def test_the_bound_is_at_most_that_of_single_tasks(bytes_per_s):
    for together, single, free in bounds_s(bytes_per_s):
        assert free * (1 - 1e-6) <= together <= single * (1 + 1e-6)


def test_the_bound_is_near_that_of_single_tasks_where_copies_take_little_longer():
    found = bounds_s(FAST)
    assert sum(single > 1.01 * free for _, single, free in found) >= 8
    assert median(together / single for together, single, _ in found) >= 0.9


def test_the_bound_is_still_about_copies_where_these_take_most_of_the_step():
    found = bounds_s(SLOW)
    assert median(together / single for together, single, _ in found) >= 0.7
    for together, single, free in found:
        assert together >= 0.4 * single > free


@pytest.mark.parametrize("bytes_per_s", [MODERATE, FAST])
@pytest.mark.parametrize(
    ("shape", "policy", "num_caps"),
    [
        ("four packed chunks", "streaming", 3),
        ("four packed chunks", "optimal", 3),
        ("a sequence in eight", "streaming", 2),
        ("a sequence in eight", "optimal", 1),
        ("two sequences in eight, folded", "streaming", 1),
    ],
)
def test_no_plan_is_faster_than_the_bound(shape, policy, num_caps, bytes_per_s, monkeypatch):
    """Plans are made with tasks together, too."""
    monkeypatch.setattr(segments, "_MOST_SEGMENTS", FEW)
    limits = SearchLimits(bound_segments=FEW, guide_segments=FEW)
    machine = link_machine(bytes_per_s)
    for device_bytes in some_caps(shape)[:num_caps]:
        schedule = plan_chain(
            chain_of(shape), machine, Caps(device_bytes=device_bytes), policy, limits
        )  # fmt: skip
        assert schedule.bound is not None
        assert schedule.bound.step_s <= simulate_rank(schedule, machine).step_ns / 1e9
