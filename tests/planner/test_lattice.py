"""With thorough effort, more memory never makes a plan slower."""

from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.machines_for_plans import fast_link_machine, slow_link_machine
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.planner.choices import Choices
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.refuse.lattice import Lattice, lattice
from twinstream.planner.search.chunking import TrainingStep
from twinstream.planner.search.family import Family, Found
from twinstream.planner.step_plan import _optimal, plan_step
from twinstream.schedule.document import Caps, Schedule, StepBound
from twinstream.schedule.proof.verify import verify
from twinstream.schedule.tensors import DEVICE, HOST, Slot, Tier
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

KIB = 1024
LEAST_DEVICE, LEAST_HOST = 40 * KIB, 50 * KIB


@dataclass
class Landscape:
    """Families whose plans are above their bound by chance, and take no more than is of use."""

    seed: int
    of_use: tuple[int, int] = (430 * KIB, 110 * KIB)
    planned: int = 0
    least_taken: float = 0.7
    missed: float = 0.1

    def within(self, caps: Caps) -> "Hill":
        return Hill(self, caps)


@dataclass
class Hill:
    landscape: Landscape
    caps: Caps

    @property
    def _memory(self) -> tuple[int, int]:
        device, host = self.landscape.of_use
        return (
            device if self.caps.device_bytes is None else min(self.caps.device_bytes, device),
            host if self.caps.host_bytes is None else min(self.caps.host_bytes, host),
        )

    def least_s(self) -> float:
        return least_s(*self._memory)

    def search(self) -> Found | None:
        self.landscape.planned += 1
        chance = Random(f"{self.landscape.seed} {self.caps.device_bytes} {self.caps.host_bytes}")
        least = self.landscape.least_taken
        device, host = (int(m * (least + (1.0 - least) * chance.random())) for m in self._memory)
        step_ns = least_s(device, host) * 1e9 * (1.0 + 0.2 * chance.random())
        if step_ns == inf or chance.random() < self.landscape.missed:
            return None
        return Found(step_ns, plan_that_takes(device, host), None, None)  # type: ignore[arg-type]

    def step_bound_of(self, workload: Workload) -> StepBound:
        return StepBound(
            step_s=self.least_s(), device_s_per_gib=0.0, host_s_per_gib=0.0,
            link_s_per_gb_per_s={}, limits=(),
        )  # fmt: skip


def least_s(device: int, host: int) -> float:
    if device < LEAST_DEVICE or host < LEAST_HOST:
        return inf
    return max(1.0, 1.2 - device / (2000 * KIB)) + max(0.0, 0.2 - host / (500 * KIB))


def plan_that_takes(device: int, host: int) -> Schedule:
    def slot(tier: Tier, size: int) -> Slot:
        return Slot(slot_id=tier.kind, tier=tier, offset_bytes=0, size_bytes=size)

    return Schedule.model_construct(
        slots=(slot(DEVICE, device), slot(HOST, host)),
        workload=Workload(seq_len=1, chunk_tokens=1, chunks_per_round=1, rounds_per_step=1),
        caps=Caps(),
    )


def answer(seed: int, device: int | None, host: int | None) -> Found | None:
    return of(Landscape(seed)).best(Caps(device_bytes=device, host_bytes=host))


def of(landscape: Landscape) -> Lattice:
    return Lattice(landscape.within)  # type: ignore[arg-type]


@given(cap=st.integers(2**17, 2**48), points=st.sampled_from([8, 16]))
def test_points_fall_by_a_share_at_most_from_just_below_the_cap(cap, points):
    sizes = list(islice(lattice(cap, points), 40))
    assert 0 <= cap - sizes[0] < cap / points
    assert all(1 / (2 * points + 1) < (p - q) / p < 1 / (points - 1) for p, q in pairwise(sizes))


@given(low=st.integers(2**12, 2**40), more=st.integers(0, 2**40))
def test_every_point_of_a_smaller_cap_is_one_of_a_larger_cap(low, more):
    assert set(islice(lattice(low, 16), 20)) <= set(lattice(low + more, 16))


@pytest.mark.parametrize("seed", range(20))
def test_with_larger_caps_the_answer_is_never_slower(seed):
    """With caps of which less is of use, too: there plans differ by chance only."""
    devices, hosts = (60, 200, 330, 410, 440, 700, None), (60, 90, 105, 120, 400, None)
    answers = {
        (device, host): answer(seed, device and device * KIB, host and host * KIB)
        for device in devices
        for host in hosts
    }
    for memory, found in answers.items():
        for more, larger in answers.items():
            if found is not None and all(map(no_less, more, memory)):
                assert larger is not None
                assert larger.step_ns <= found.step_ns


def no_less(cap: int | None, other: int | None) -> bool:
    return cap is None or (other is not None and cap >= other)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("device_kib", "host_kib"), [(320, 80), (320, 2048), (2048, 80)])
def test_at_a_point_with_little_to_spare_the_answer_is_no_slower_than_a_search_there(
    seed, device_kib, host_kib
):
    caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_kib * KIB)
    tight = {
        "device_bytes": caps.device_bytes if device_kib == 320 else None,
        "host_bytes": caps.host_bytes if host_kib == 80 else None,
    }
    landscape = Landscape(seed, missed=0.0)
    there, found = landscape.within(Caps(**tight)).search(), of(landscape).best(caps)
    assert there is not None and found is not None
    assert found.step_ns <= there.step_ns


def test_the_answer_has_the_caps_and_the_bound_that_were_asked_for():
    caps = Caps(device_bytes=501 * KIB, host_bytes=203 * KIB)
    found = of(Landscape(1)).best(caps)
    assert found is not None
    assert found.schedule.caps == caps
    assert found.bound.step_s == 1.0


def test_points_whose_bound_is_above_the_fastest_plan_get_none():
    landscape = Landscape(1)
    caps = Caps(device_bytes=500 * KIB, host_bytes=200 * KIB)
    of(landscape).best(caps)
    points = len(list(lattice(500 * KIB, 16))) * len(list(lattice(200 * KIB, 8)))
    assert 0 < landscape.planned < points / 4


def test_where_all_memory_is_of_no_use_only_points_with_little_to_spare_are_searched():
    landscape = Landscape(1, of_use=(LEAST_DEVICE, LEAST_HOST))
    caps = Caps(device_bytes=2**40)
    landscape.least_taken = 1.0
    assert of(landscape).best(caps) is not None
    assert 1 < landscape.planned < 30


def test_whether_anything_fits_is_found_with_no_more_searches():
    """Where half of the searches find nothing, too."""
    outcomes = set()
    memories = [(300, 80), (60, 60), (44, 55), (40, 52), (39, 400)]
    for seed, (device_kib, host_kib) in product(range(10), memories):
        caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_kib * KIB)
        for_best, for_any = Landscape(seed, missed=0.5), Landscape(seed, missed=0.5)
        best = of(for_best).best(caps)
        assert of(for_any).fits(caps) == (best is not None)
        assert for_any.planned <= for_best.planned
        outcomes.add((best is not None, for_any.planned < for_best.planned))
    assert outcomes >= {(True, True), (False, False)}


@dataclass
class Cliff(Hill):
    """A search within no less than 400 KiB finds a plan, `best` never one."""

    def search(self) -> Found | None:
        enough = no_less(self.caps.device_bytes, 400 * KIB)
        return Found(2e9, plan_that_takes(395 * KIB, 1), None, None) if enough else None  # type: ignore[arg-type]

    def best(self, *, name_caps: bool) -> Schedule:
        assert name_caps
        raise InfeasiblePlan(Shortage("optimal", "device", 1, 2, "a task", 500 * KIB, None))

    def fits(self) -> bool:
        return self.caps.device_bytes == 450 * KIB


def test_a_refusal_names_a_smaller_cap_at_which_only_a_point_below_has_a_plan():
    """395 KiB are taken; 384 and 400 KiB are points."""
    within = partial(Cliff, Landscape(1))
    with pytest.raises(InfeasiblePlan) as error:
        _optimal(within, Caps(device_bytes=300 * KIB), Choices(effort="thorough"), name_caps=True)  # type: ignore[arg-type]
    assert error.value.shortage.smallest_device_bytes == 400 * KIB


def test_nothing_fits_is_told_without_a_plan():
    landscape = Landscape(1)
    caps = Caps(device_bytes=39 * KIB, host_bytes=200 * KIB)
    assert of(landscape).best(caps) is None
    assert landscape.planned == 0


@pytest.mark.parametrize(("device_kib", "host_kib"), [(384, 160), (416, 120)])
def test_a_thorough_plan_is_safe_and_at_a_point_not_slower_than_a_normal_one(device_kib, host_kib):
    caps = Caps(device_bytes=device_kib * KIB, host_bytes=host_kib * KIB)
    spec = small("tiny", num_layers=1)
    step = TrainingStep(seq_len=32, tokens_per_step=64, chunk_tokens=32, chunks_per_round=1)

    def judge(schedule: Schedule) -> Timeline:
        return simulate(schedule, MACHINE)

    def planned(choices: Choices) -> Schedule:
        return plan_step(spec, step, MACHINE, caps, "optimal", judge, choices)

    thorough, normal = planned(Choices(effort="thorough")), planned(Choices())
    assert verify(thorough) == []
    assert judge(thorough).step_ns <= judge(normal).step_ns * 1.0001


@settings(max_examples=2, deadline=None)
@given(
    step=st.sampled_from(
        [
            TrainingStep(seq_len=32, tokens_per_step=32, chunk_tokens=32),
            TrainingStep(seq_len=16, tokens_per_step=32, chunk_tokens=16, chunks_per_round=1),
        ]
    ),
    machine=st.sampled_from([MACHINE, fast_link_machine(), slow_link_machine()]),
    device_kib=st.integers(200, 600),
    host_kib=st.integers(60, 400),
    more=st.tuples(st.sampled_from([1.0, 1.03, 1.3]), st.sampled_from([1.0, 1.05, 3.0])),
)
def test_whatever_the_model_the_machine_and_the_caps_more_memory_is_not_slower(
    step, machine, device_kib, host_kib, more
):
    def judge(schedule: Schedule) -> Timeline:
        return simulate(schedule, machine)

    spec, choices = small("tiny", num_layers=1), Choices(effort="thorough")
    plans = Lattice(partial(Family, spec, step, machine, judge, choices))

    def best(device_bytes: float, host_bytes: float) -> Found | None:
        return plans.best(Caps(device_bytes=int(device_bytes), host_bytes=int(host_bytes)))

    device_bytes, host_bytes = device_kib * KIB, host_kib * KIB
    less = best(device_bytes, host_bytes)
    larger = best(device_bytes * more[0], host_bytes * more[1])
    if less is not None:
        assert larger is not None
        assert larger.step_ns <= less.step_ns
        assert larger.bound.step_s <= larger.step_ns / 1e9
