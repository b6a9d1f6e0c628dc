"""Closed forms of resource sharing, and what makes an allocation max-min fair."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from random import Random

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from twinstream.simulator.flows import Flow, FluidPool, SharedFlow, fair_rates

MACHINE = {"compute": 1, "hbm": 1000, "h2d": 50, "d2h": 50, "pcie": 90, "host_dram": 200}


def copied(direction: str, size_bytes: int) -> Flow:
    amounts = tuple((name, float(size_bytes)) for name in (direction, "pcie", "hbm", "host_dram"))
    return Flow(size_bytes / 50, amounts)


def kernel(alone_ns: float, hbm_bytes: float) -> Flow:
    return Flow(alone_ns, (("compute", alone_ns), ("hbm", hbm_bytes)))


def drawn(flows: Sequence[Flow], capacity: Mapping[str, float], resource: str) -> list[float]:
    """What each flow draws of a resource, per ns."""
    rates = fair_rates(flows, capacity)
    return [
        rate * sum(amount for name, amount in flow.amounts if name == resource)
        for rate, flow in zip(rates, flows, strict=True)
    ]


def ends(starts: Sequence[tuple[int, Flow]], capacity: Mapping[str, float]) -> list[int]:
    """When each flow is through, of flows started at given times."""
    env = simpy.Environment()
    numbers = {name: number for number, name in enumerate(capacity)}
    pool = FluidPool(env, list(capacity.values()))
    found = [0] * len(starts)

    def run(index, start_ns, flow):
        yield env.timeout(start_ns)
        amounts = {numbers[name]: amount for name, amount in flow.amounts}
        pool.run(SharedFlow(flow.alone_ns, amounts), lambda: found.__setitem__(index, env.now))

    for index, (start_ns, flow) in enumerate(starts):
        env.process(run(index, start_ns, flow))
    env.run()
    assert all(isinstance(end, int) for end in found)
    return found


def ends_of_all_shared_anew(
    starts: Sequence[tuple[int, Flow]], capacity: Mapping[str, float]
) -> list[int]:
    """The oracle: whenever a flow begins or ends, the rates of all in flight are solved again."""
    found = [0] * len(starts)
    coming = sorted(range(len(starts)), key=lambda i: starts[i][0])
    left: dict[int, float] = {}
    now = 0
    while coming or left:
        rates = dict(zip(left, fair_rates([starts[i][1] for i in left], capacity), strict=True))
        until = [now + max(0, math.ceil(left[i] / rates[i] - 1e-6)) for i in left]
        until += [starts[i][0] for i in coming[:1]]
        step = min(until) - now
        now += step
        for i in left:
            left[i] -= rates[i] * step
        for i in [i for i in left if left[i] <= rates[i] * 1e-6]:
            del left[i]
            found[i] = now
        while coming and starts[coming[0]][0] == now:
            left[coming.pop(0)] = 1.0
    return found


# --- rates


def test_two_flows_on_one_link_get_half_of_it_each_whatever_their_sizes():
    flows = [copied("h2d", 1000), copied("h2d", 3000)]
    assert drawn(flows, MACHINE, "h2d") == pytest.approx([25, 25])


def test_a_copy_takes_what_it_needs_of_hbm_from_a_memory_bound_kernel():
    assert drawn([kernel(100, 100_000), copied("h2d", 1000)], MACHINE, "hbm") == [950, 50]


def test_a_copy_does_not_slow_a_compute_bound_kernel():
    rates = fair_rates([kernel(100, 90_000), copied("h2d", 1000)], MACHINE)
    assert rates == [1 / 100, 1 / 20]


def test_two_kernels_take_turns_on_compute_even_when_one_of_them_wants_all_of_hbm():
    # half of compute each; then they draw 500 and 50 of hbm, so that hbm holds nobody back
    flows = [kernel(100, 100_000), kernel(100, 10_000), copied("h2d", 1000)]
    assert fair_rates(flows, MACHINE) == pytest.approx([1 / 200, 1 / 200, 1 / 20])


def test_unconstrained_resources_hold_nobody_back():
    flows = [copied("h2d", 1000), copied("h2d", 1000)]
    assert fair_rates(flows, dict.fromkeys(MACHINE, math.inf)) == [1 / 20, 1 / 20]


@st.composite
def contended(draw):
    names = ["a", "b", "c", "d"]
    capacity = {name: draw(st.sampled_from([0.5, 1.0, 3.0, 10.0])) for name in names}
    amounts = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])
    flow = st.builds(
        lambda alone, used: Flow(alone, tuple(used.items())),
        st.sampled_from([0.25, 1.0, 1.5, 8.0]),
        st.dictionaries(st.sampled_from(names), amounts, min_size=1),
    )
    return draw(st.lists(flow, min_size=1, max_size=6)), capacity


@given(contended())
def test_a_flow_below_full_speed_draws_most_of_a_resource_that_is_used_up(case):
    flows, capacity = case
    rates = fair_rates(flows, capacity)
    use = {name: drawn(flows, capacity, name) for name in capacity}
    for index, (flow, rate) in enumerate(zip(flows, rates, strict=True)):
        alone = len(flows) == 1
        held = [
            name for name, _ in flow.amounts
            if sum(use[name]) >= capacity[name] * (1 - 1e-9)
            and use[name][index] >= max(use[name]) * (1 - 1e-9)
        ]  # fmt: skip
        assert rate * flow.alone_ns == pytest.approx(1) or held, (flow, rate)
        assert 0 < rate * flow.alone_ns <= 1 + 1e-9
        assert alone or all(
            sum(use[name]) <= capacity[name] * (1 + 1e-9) for name, _ in flow.amounts
        )


# --- time


def test_a_flow_that_is_alone_takes_its_own_time_rounded_up_to_whole_ns():
    assert ends([(3, Flow(10.0, (("hbm", 1.0),)))], MACHINE) == [13]
    assert ends([(3, Flow(10.2, (("hbm", 1.0),)))], MACHINE) == [14]
    assert ends([(3, Flow(1e9 + 0.01, (("hbm", 1.0),)))], MACHINE) == [1_000_000_004]


def test_rates_are_solved_again_when_a_flow_ends():
    # 45 bytes per ns each until the first has its 900; then 50 for the other's last 900
    assert ends([(0, copied("h2d", 900)), (0, copied("d2h", 1800))], MACHINE) == [20, 38]


def test_rates_are_solved_again_when_a_flow_starts():
    # alone for 10 ns: 500 of 1000 bytes; then half of the link: 500 / 25 = 20 ns;
    # by then the other has 500 of its 1500, and goes on alone at 50
    assert ends([(0, copied("h2d", 1000)), (10, copied("h2d", 1500))], MACHINE) == [30, 50]


def test_a_memory_bound_kernel_runs_slower_only_while_a_copy_is_under_way():
    # the copy takes 200 ns; meanwhile the kernel moves 950 bytes per ns instead of 1000
    starts = [(0, kernel(1000, 1_000_000)), (100, copied("h2d", 10_000))]
    assert ends(starts, MACHINE) == [100 + 200 + (1_000_000 - 100_000 - 200 * 950) // 1000, 300]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 400)), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_flows_on_one_link_end_when_exact_arithmetic_says(jobs, per_ns):
    starts = [(start, Flow(size / per_ns, (("link", float(size)),))) for start, size in jobs]
    assert ends(starts, {"link": float(per_ns)}) == exact_ends(jobs, per_ns)


def exact_ends(jobs: Sequence[tuple[int, int]], per_ns: int) -> list[int]:
    """Equal shares in rational numbers; a flow gives its share back at a whole ns."""
    found = [0] * len(jobs)
    left = {index: Fraction(size) for index, (_, size) in enumerate(jobs)}
    now = 0
    while left:
        active = [index for index in left if jobs[index][0] <= now]
        coming = [jobs[index][0] for index in left if jobs[index][0] > now]
        if not active:
            now = min(coming)
            continue
        share = Fraction(per_ns, len(active))
        until = min(now + math.ceil(left[index] / share) for index in active)
        step = min([until, *coming]) - now
        now += step
        for index in active:
            left[index] -= share * step
            if left[index] <= 0:
                found[index] = now
                del left[index]
    return found


def random_starts(rng: Random, capacity: Mapping[str, float]) -> list[tuple[int, Flow]]:
    """Flows that are alone as fast as they say: none wants more than a resource has."""
    starts = []
    for _ in range(rng.randint(1, 12)):
        alone_ns = rng.choice([float(rng.randint(1, 2000)), rng.uniform(0.5, 2000)])
        used = rng.sample(list(capacity), rng.randint(0, min(3, len(capacity))))
        shares = [rng.choice([0.1, 0.25, 0.5, 0.9, 1.0, rng.random()]) for _ in used]
        amounts = tuple(
            (name, share * capacity[name] * alone_ns)
            for name, share in zip(used, shares, strict=True)
        )
        starts.append((rng.choice([0, rng.randint(0, 1500)]), Flow(alone_ns, amounts)))
    return starts


@pytest.mark.parametrize("seed", range(10))
def test_sharing_anew_only_what_is_crowded_changes_no_end(seed):
    rng = Random(seed)
    for _ in range(40):
        names = "abcdefg"[: rng.randint(1, 7)]
        capacity = {name: rng.choice([1.0, 1.0, 0.75, 2.0]) for name in names}
        starts = random_starts(rng, capacity)
        assert ends(starts, capacity) == ends_of_all_shared_anew(starts, capacity), starts


def test_who_shares_nothing_crowded_is_not_slowed():
    # the first two crowd a; the third shares b with the second, which is roomy
    amounts = [(("a", 100.0),), (("a", 100.0), ("b", 10.0)), (("b", 50.0),)]
    starts = [(0, Flow(100.0, used)) for used in amounts]
    assert ends(starts, {"a": 1.0, "b": 1.0}) == [200, 200, 100]


def test_a_flow_speeds_up_when_another_ends():
    # half of the resource each until 100, when the short one is through
    starts = [(0, Flow(50.0, (("a", 50.0),))), (0, Flow(100.0, (("a", 100.0),)))]
    assert ends(starts, {"a": 1.0}) == [100, 150]
