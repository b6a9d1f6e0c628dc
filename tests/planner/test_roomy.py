"""Long chains: a plan that leaves some memory free is found soon, and so are caps that would do."""

from functools import partial

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_model
from twinstream.planner import step_plan
from twinstream.planner.choices import OPEN, Choices, Effort
from twinstream.planner.decide.decider import Decider
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.lifetimes.rounds import JUDGED_ROUNDS, with_rounds
from twinstream.planner.refuse import last_resort
from twinstream.planner.refuse.last_resort import LastResort
from twinstream.planner.refuse.roomy import LONG, VERY_LONG, RoomyPlans, _first
from twinstream.planner.search.chunking import TrainingStep, admissible, chunkings, of_few_blocks
from twinstream.planner.step_plan import plan_step
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

KIB = 1024
SPEC = small("tiny", num_layers=3)
ROUNDS = 6
WORKLOAD = Workload(seq_len=128, chunk_tokens=16, chunks_per_round=8, rounds_per_step=ROUNDS)
STEP = TrainingStep(128, 128 * ROUNDS, chunk_tokens=16, chunks_per_round=8)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return lower(SPEC, WORKLOAD)


@pytest.fixture(scope="module")
def plans(chain) -> RoomyPlans:
    few = with_rounds(chain, JUDGED_ROUNDS)
    assert LONG < len(few.tasks) < VERY_LONG
    return RoomyPlans(few, MACHINE, OPEN, ROUNDS)


def lp_finds(chain: Chain, caps: Caps) -> bool:
    guide = Decider(with_rounds(chain, JUDGED_ROUNDS), MACHINE, caps, ROUNDS).guide(OPEN)
    return guide.bound(caps) is not None


@pytest.mark.parametrize(
    ("field", "caps"),
    [
        ("device_bytes", Caps(device_bytes=100 * KIB, host_bytes=700 * KIB)),
        ("device_bytes", Caps(device_bytes=0, host_bytes=500 * KIB, device_reserve_bytes=50_000)),
        ("host_bytes", Caps(device_bytes=400 * KIB, host_bytes=100 * KIB)),
        ("host_bytes", Caps(device_bytes=300 * KIB, host_bytes=0)),
    ],
)
def test_a_cap_that_is_named_does_and_is_near_what_the_program_needs(chain, plans, field, caps):
    named = plans.smallest(caps, field, None)
    assert named is not None and named > getattr(caps, field)
    enough = caps.model_copy(update={field: named})
    schedule = LastResort(with_rounds(chain, JUDGED_ROUNDS), MACHINE, OPEN, ROUNDS).schedule(
        lambda: chain, enough
    )
    assert schedule is not None
    assert not verify(schedule) and not conforms(schedule, chain)
    assert arena_bytes(schedule, DEVICE) <= enough.arena_bytes("device")
    assert arena_bytes(schedule, HOST) <= enough.host_bytes
    assert not lp_finds(chain, caps.model_copy(update={field: int(0.5 * named)}))


def test_where_a_smaller_cap_is_known_it_is_named(plans):
    caps = Caps(device_bytes=100 * KIB, host_bytes=700 * KIB)
    named = plans.smallest(caps, "device_bytes", None)
    assert plans.smallest(caps, "device_bytes", named - 4096) == named - 4096
    assert plans.smallest(caps, "device_bytes", named + 4096) == named


def test_where_no_such_cap_would_do_none_is_named(plans):
    assert plans.smallest(Caps(device_bytes=2**40, host_bytes=0), "host_bytes", None) is not None
    assert plans.smallest(Caps(device_bytes=50 * KIB, host_bytes=0), "host_bytes", None) is None
    assert plans.smallest(Caps(device_bytes=50 * KIB), "host_bytes", 123) is None


@pytest.mark.parametrize("wanted", range(12))
def test_the_first_caps_that_are_enough_are_found_from_wherever_one_begins(wanted):
    sizes = [Caps(device_bytes=n) for n in range(11)]
    for begin in range(wanted + 1):
        assert _first(sizes, begin, lambda caps: caps.device_bytes >= wanted) == min(wanted, 11)


def test_what_sticks_out_of_the_host_is_no_plan(plans, monkeypatch):
    assert list(plans.found(Caps(device_bytes=420 * KIB, host_bytes=700 * KIB)))
    within = Decider.decided_within

    def on_more(self: Decider, choices: Choices, less: Caps) -> object:
        return within(self, choices, less.model_copy(update={"host_bytes": 2**40}))

    monkeypatch.setattr(Decider, "decided_within", on_more)
    tight = Caps(device_bytes=420 * KIB, host_bytes=20 * KIB)
    few = with_rounds(lower(SPEC, WORKLOAD), JUDGED_ROUNDS)
    assert not list(RoomyPlans(few, MACHINE, OPEN, ROUNDS).found(tight))


@pytest.mark.parametrize(
    ("effort", "device_kib", "host_kib"), [("quick", 150, 700), ("normal", 300, 200)]
)
def test_a_refusal_of_a_long_chain_names_caps_that_do(effort, device_kib, host_kib, monkeypatch):
    """A quick one without a search."""
    choices, searched, smallest = Choices(effort=effort), [], RoomyPlans.smallest

    def counted(plans: RoomyPlans, caps: Caps, field: str, would_do: int | None) -> int | None:
        searched.append(field)
        return smallest(plans, caps, field, would_do)

    monkeypatch.setattr(RoomyPlans, "smallest", counted)

    def planned(device_bytes: int, host_bytes: int) -> Schedule:
        caps = Caps(device_bytes=device_bytes, host_bytes=host_bytes)
        return plan_step(
            SPEC, STEP, MACHINE, caps, "optimal", partial(simulate, machine=MACHINE), choices
        )

    device, host = device_kib * KIB, host_kib * KIB
    with pytest.raises(InfeasiblePlan) as refused:
        planned(device, host)
    found = refused.value.shortage
    assert bool(searched) == (effort == "normal")
    assert found.smallest_device_bytes or found.smallest_host_bytes
    if found.smallest_device_bytes is not None:
        assert arena_bytes(planned(found.smallest_device_bytes, host), HOST) <= host
    if found.smallest_host_bytes is not None:
        assert arena_bytes(planned(device, found.smallest_host_bytes), DEVICE) <= device


@pytest.mark.parametrize(("device_kib", "host_kib"), [(130, 100), (200, 60)])
def test_a_thorough_refusal_of_a_long_chain_names_the_smallest_cap(
    device_kib, host_kib, monkeypatch
):
    """Less than the same chain is told otherwise, and 256 bytes less are refused."""
    monkeypatch.setattr(last_resort, "LONG", 10)
    step = TrainingStep(32, 64, chunk_tokens=32, chunks_per_round=1)
    given = Caps(device_bytes=device_kib * KIB, host_bytes=host_kib * KIB)

    def refused(caps: Caps, effort: Effort) -> Shortage | None:
        try:
            plan_step(
                small("tiny", num_layers=1), step, MACHINE, caps, "optimal",
                partial(simulate, machine=MACHINE), Choices(effort=effort),
            )  # fmt: skip
        except InfeasiblePlan as error:
            return error.shortage
        return None

    roughly, exactly = refused(given, "normal"), refused(given, "thorough")
    assert roughly is not None and exactly is not None
    assert exactly.smallest and not roughly.smallest
    field = f"{exactly.cap}_bytes"
    assert exactly.needed_bytes < roughly.needed_bytes

    def within(size: int) -> Caps:
        return given.model_copy(update={field: size})

    assert refused(within(exactly.needed_bytes), "thorough") is None
    assert refused(within(exactly.needed_bytes - 256), "thorough") is not None


def test_long_sequences_in_very_small_chunks_are_left_out():
    spec, step = load_model("8b"), TrainingStep(2**20, 2**20)
    found = [*admissible(spec, step), *chunkings(spec, step)]
    assert min(workload.chunk_tokens for workload in found) == 1024
    few = of_few_blocks(spec, found, 3, 20_000)
    assert {workload.chunk_tokens for workload in few} == {2**15, 2**14, 2**13, 2**12}
    (least,) = of_few_blocks(spec, found, 3, 100)
    assert least.chunk_tokens == 2**15


def test_only_so_many_rounds_count():
    few = of_few_blocks(SPEC, [WORKLOAD], 3, 3 * 8 * 2 * 3)
    assert few == [WORKLOAD]
    longer = WORKLOAD.model_copy(update={"chunks_per_round": 16})
    assert of_few_blocks(SPEC, [longer, WORKLOAD], 3, 3 * 8 * 2 * 3) == [WORKLOAD]


@pytest.mark.parametrize(("library_gib", "told"), [(21, True), (3, False)])
def test_much_memory_of_a_library_is_told_with_the_flag_that_may_save_it(library_gib, told):
    shortage = Shortage(
        "optimal", "device", 24 * 2**30, 38 * 2**30, "a task", 38 * 2**30, None,
        library_bytes=library_gib * 2**30,
    )  # fmt: skip
    message = str(InfeasiblePlan(shortage))
    assert (f"{library_gib}.000 GiB are for what attention's library" in message) == told
    assert ("--attention" in message) == told


def test_other_policies_leave_out_very_small_chunks_of_long_sequences(monkeypatch):
    tried: list[int] = []

    def refused(chain: Chain, *_: object) -> Schedule:
        tried.append(chain.workload.chunk_tokens)
        raise InfeasiblePlan(Shortage("streaming", "device", 1, 2, "a task", 2, None))

    monkeypatch.setattr(step_plan, "plan_chain", refused)
    with pytest.raises(InfeasiblePlan):
        plan_step(load_model("1b"), TrainingStep(2**17, 2**17), MACHINE, Caps(), "streaming")
    assert tried == [8192, 4096, 2048, 1024]
    tried.clear()
    with pytest.raises(InfeasiblePlan):
        plan_step(load_model("1b"), TrainingStep(2**19, 2**19), MACHINE, Caps(), "streaming")
    assert tried == [8192, 4096, 2048]
