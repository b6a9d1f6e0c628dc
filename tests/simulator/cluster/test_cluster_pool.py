"""The pool of a cluster shares as the ordinary simulator's pool does."""

from collections.abc import Sequence
from random import Random

import pytest
import simpy

from twinstream.simulator.cluster.pool import ClusterPool, SharedFlow
from twinstream.simulator.flows import Flow, FluidPool

Start = tuple[int, float, dict[int, float]]  # when, ns alone, amounts by resource


def cluster_ends(starts: Sequence[Start], capacity: Sequence[float]) -> list[int]:
    env = simpy.Environment()
    pool = ClusterPool(env, capacity)
    found = [-1] * len(starts)

    def begin(number: int) -> None:
        _, alone_ns, amounts = starts[number]

        def ended() -> None:
            found[number] = int(env.now)

        pool.run(SharedFlow(alone_ns, amounts), ended)

    def process(number: int):
        yield env.timeout(starts[number][0])
        begin(number)

    for number in range(len(starts)):
        env.process(process(number))
    env.run()
    return found


def ordinary_ends(starts: Sequence[Start], capacity: Sequence[float]) -> list[int]:
    env = simpy.Environment()
    pool = FluidPool(env, {str(number): most for number, most in enumerate(capacity)})
    found = [-1] * len(starts)

    def process(number: int):
        start_ns, alone_ns, amounts = starts[number]
        yield env.timeout(start_ns)
        yield pool.run(Flow(alone_ns, tuple((str(at), one) for at, one in amounts.items())))
        found[number] = int(env.now)

    for number in range(len(starts)):
        env.process(process(number))
    env.run()
    return found


def random_starts(rng: Random, capacity: Sequence[float]) -> list[Start]:
    """Flows that are alone as fast as they say: none wants more than a resource has."""
    num_resources = len(capacity)
    starts: list[Start] = []
    for _ in range(rng.randint(1, 12)):
        alone_ns = rng.choice([float(rng.randint(1, 2000)), rng.uniform(0.5, 2000)])
        used = rng.sample(range(num_resources), rng.randint(0, min(3, num_resources)))
        shares = [rng.choice([0.1, 0.25, 0.5, 0.9, 1.0, rng.random()]) for _ in used]
        amounts = {
            at: share * capacity[at] * alone_ns for at, share in zip(used, shares, strict=True)
        }
        starts.append((rng.choice([0, rng.randint(0, 1500)]), alone_ns, amounts))
    return starts


@pytest.mark.parametrize("seed", range(10))
def test_random_flows_end_as_in_the_ordinary_pool(seed):
    rng = Random(seed)
    for _ in range(40):
        capacity = [rng.choice([1.0, 1.0, 0.75, 2.0]) for _ in range(rng.randint(1, 7))]
        starts = random_starts(rng, capacity)
        assert cluster_ends(starts, capacity) == ordinary_ends(starts, capacity), starts


def test_who_shares_nothing_crowded_is_not_slowed():
    # the first two crowd resource 0; the third shares resource 1 with the second, which is roomy
    starts = [(0, 100.0, {0: 100.0}), (0, 100.0, {0: 100.0, 1: 10.0}), (0, 100.0, {1: 50.0})]
    assert cluster_ends(starts, [1.0, 1.0]) == [200, 200, 100]


def test_a_flow_speeds_up_when_another_ends():
    # half of the resource each until 100, when the short one is through
    assert cluster_ends([(0, 50.0, {0: 50.0}), (0, 100.0, {0: 100.0})], [1.0]) == [100, 150]


def test_ends_are_rounded_up_to_whole_nanoseconds():
    assert cluster_ends([(0, 10.25, {0: 10.25})], [1.0]) == [11]
    assert cluster_ends([(0, 10.0, {0: 10.0}), (0, 5.5, {0: 5.5})], [1.0]) == [16, 11]
