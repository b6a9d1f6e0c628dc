"""What a plan says of itself adds up, by hand and on real plans of every policy."""

import pytest

import twinstream as ts
from tests.front_door.small_schedule import small_schedule, timeline
from twinstream.hardware_profiles.loader import load_machine_text
from twinstream.measures.explanation import explain
from twinstream.measures.residence import STATE, RoleResidence, residence
from twinstream.planner.policies import compared_names
from twinstream.schedule.document import RankSchedule, Schedule, StepBound
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST, Carried
from twinstream.schedule.timeline import RankTimeline, Timeline
from twinstream.schedule.workload import MachineRef

FAST = load_machine_text('name = "made up"\ndevice = "cpu"\npeak_fp32_flop_per_s = 1e9\n')
ONE_AFTER_ANOTHER = timeline(100, 200, 300, 400, 500, 600, step_ns=2000.0)
STEP = ts.TrainingStep(seq_len=64, tokens_per_step=256)
HOMES = ("device_only_bytes", "host_home_bytes", "both_bytes")
CAPS = {"streaming": "6MiB", "optimal": "6MiB", "layer_offload": "6MiB"}


@pytest.fixture(scope="module", params=compared_names())
def planned(request: pytest.FixtureRequest) -> tuple[Schedule, Timeline]:
    policy = request.param
    schedule = ts.plan("tiny", "cpu", step=STEP, policy=policy, device_mem=CAPS.get(policy))
    return schedule, ts.simulate(schedule, "cpu")


def with_carried(*pairs: tuple[str, str], without: tuple[str, ...] = ()) -> Schedule:
    """The small schedule with (tensor, slot) pairs carried, without some of its ops."""
    schedule = small_schedule()
    return schedule.model_copy(
        update={
            "carried": tuple(Carried(tensor=tensor, slot=slot) for tensor, slot in pairs),
            "ops": tuple(op for op in schedule.ops if op.op_id not in without),
        }
    )


def with_bound(**prices: float) -> Schedule:
    bound = StepBound(
        step_s=1.0e-6, family_step_s=0.8e-6, host_s_per_gib=0.0, limits=("compute", "h2d"),
        device_s_per_gib=prices["device"], link_s_per_gb_per_s={"h2d": prices["h2d"], "d2h": 0.0},
    )  # fmt: skip
    machine = MachineRef(name=FAST.name, content_hash=FAST.content_hash)
    return small_schedule().model_copy(update={"bound": bound, "machine": machine})


def test_peaks_are_of_the_moment_when_most_is_alive():
    found = residence(small_schedule(), ONE_AFTER_ANOTHER)
    by_role = {r.role: r.device_peak_bytes for r in found.roles}
    # w is alive while it is copied in, x from its copy in to its copy out: never together
    assert by_role["parameter"] == 1024
    assert by_role["activation"] == 0
    assert found.device_unused_bytes == 512
    assert found.device_reserve_bytes == 100


def test_what_is_carried_takes_memory_all_the_time():
    schedule = with_carried(("w", "host.w"), ("x", "device.x"), without=("h2d.x",))
    found = residence(schedule, _timeline_of(schedule))
    by_role = {r.role: (r.device_peak_bytes, r.host_peak_bytes) for r in found.roles}
    assert by_role["parameter"] == (1024, 1024)
    assert by_role["activation"] == (512, 512)


@pytest.mark.parametrize(
    ("carried", "without", "home"),
    [
        ((("w", "device.w"),), ("h2d.w",), "device_only_bytes"),
        ((("w", "host.w"),), (), "host_home_bytes"),
        ((("w", "host.w"), ("w", "device.w")), (), "host_home_bytes"),
        ((("w", "host.w"), ("w", "device.w")), ("h2d.w",), "both_bytes"),
    ],
)
def test_a_home_is_where_content_stays_from_step_to_step(carried, without, home):
    schedule = with_carried(*carried, without=without)
    found = residence(schedule, _timeline_of(schedule)).roles[0]
    assert found.role == "parameter"
    homes = {name: getattr(found, name) for name in HOMES}
    assert homes == {name: 1024 if name == home else 0 for name in HOMES}


def _timeline_of(schedule: RankSchedule) -> RankTimeline:
    """All ops one after the other, 100 ns each."""
    full = timeline(*[100] * 6)
    number = len(schedule.ops)
    spans = full.passes[0].model_copy(
        update={
            "start_ns": full.passes[0].start_ns[:number],
            "end_ns": full.passes[0].end_ns[:number],
        }
    )
    ids = tuple(op.op_id for op in schedule.ops)
    return full.model_copy(update={"op_ids": ids, "passes": (spans,), "cold": spans})


def test_idle_shares_name_the_queue_that_compute_waited_for():
    schedule = small_schedule()
    waits = {"again": "h2d.x", "last": "d2h.x"}
    ops = tuple(
        op.model_copy(update={"waits": (waits[op.op_id],)}) if op.op_id in waits else op
        for op in schedule.ops
    )
    waiting = schedule.model_copy(update={"ops": ops})
    # compute is idle for the 300 ns of h2d.x and the 500 ns of d2h.x, of 2,100 ns from the first op
    # (100 ns that compute does not wait for) to its end
    found = explain(waiting, ONE_AFTER_ANOTHER, FAST).compute_idle_fraction
    assert found == pytest.approx({"latency": 1 / 21, "h2d": 3 / 21, "d2h": 5 / 21})


def test_recomputed_blocks_are_counted_by_level():
    found = explain(small_schedule(), ONE_AFTER_ANOTHER, FAST).recomputed
    assert found.num_blocks == 2
    assert found.num_blocks_by_level == {"INPUT": 1}
    assert found.fraction_of_flops == pytest.approx(1 / 3)


def test_a_price_is_the_first_order_gain_in_tokens_per_second():
    schedule = with_bound(device=1e-8, h2d=2e-8)
    found = explain(schedule, ONE_AFTER_ANOTHER, FAST)
    gains = {price.what: price.adds_tokens_per_s for price in found.prices}
    # 32 tokens in 2 us; 10 ns less: 32 x 1e-8 / (2e-6)^2 tokens/s more
    assert gains["GiB of device memory"] == pytest.approx(32 * 1e-8 / 2e-6**2)
    assert gains["GB/s of h2d"] == pytest.approx(32 * 2e-8 / 2e-6**2)
    assert gains["GiB of host memory"] == gains["GB/s of d2h"] == 0
    assert found.limits == ("compute", "h2d", "device memory")


def test_both_gaps_are_above_their_own_bound():
    summary = ts.summarize(with_bound(device=0.0, h2d=0.0), ONE_AFTER_ANOTHER, FAST)
    assert summary.gap == pytest.approx(1.0)
    assert summary.gap_family == pytest.approx(1.5)


def test_on_another_machine_than_the_planned_one_there_are_no_gaps_limits_or_prices():
    schedule = with_bound(device=1e-8, h2d=2e-8)
    other = load_machine_text('name = "b"\ndevice = "cpu"\npeak_fp32_flop_per_s = 2e9\n')
    found = explain(schedule, ONE_AFTER_ANOTHER, other)
    assert (found.limits, found.prices) == ((), ())
    assert ts.summarize(schedule, ONE_AFTER_ANOTHER, other).gap_family is None


def test_the_roles_of_a_plan_fill_its_arenas(planned):
    schedule, timeline = planned
    found = residence(schedule, timeline)
    device = sum(r.device_peak_bytes for r in found.roles)
    host = sum(r.host_peak_bytes for r in found.roles)
    assert device + found.device_unused_bytes == arena_bytes(schedule, DEVICE)
    assert host + found.host_unused_bytes == arena_bytes(schedule, HOST)
    assert 0.8 * arena_bytes(schedule, DEVICE) < device <= arena_bytes(schedule, DEVICE)
    assert 0.7 * arena_bytes(schedule, HOST) <= host <= arena_bytes(schedule, HOST)


def test_the_homes_of_a_plan_are_those_of_all_its_state(planned):
    schedule, timeline = planned
    roots = [t for t in schedule.tensors if t.parent is None]
    for found in residence(schedule, timeline).roles:
        homes = sum(getattr(found, name) for name in HOMES)
        whole = sum(t.size_bytes for t in roots if t.role == found.role)
        assert homes == (whole if found.role in STATE else 0)
        if found.role == "parameter":  # float32, nothing but alignment besides
            assert homes == pytest.approx(4 * ts.load_model("tiny").num_parameters, rel=0.01)


def test_what_the_roles_move_is_what_the_summary_says(planned):
    schedule, timeline = planned
    summary = ts.summarize(schedule, timeline, ts.load_machine("cpu"))
    roles = residence(schedule, timeline).roles
    assert sum(r.h2d_bytes for r in roles) == summary.h2d_bytes
    assert sum(r.d2h_bytes for r in roles) == summary.d2h_bytes


def test_compute_is_busy_or_idle_all_the_step(planned):
    schedule, timeline = planned
    before, last = timeline.passes[-2:]
    mine = [i for i, op in enumerate(schedule.ops) if op.stream.queue == "compute"]
    busy_ns = sum(last.end_ns[i] - last.start_ns[i] for i in mine)
    idle = explain(schedule, timeline, ts.load_machine("cpu")).compute_idle_fraction
    step_ns = last.end_ns[mine[-1]] - before.end_ns[mine[-1]]
    assert busy_ns / step_ns + sum(idle.values()) == pytest.approx(1.0)


def test_policies_keep_their_state_where_they_say():
    def homes(policy: str, role: str) -> RoleResidence:
        schedule = ts.plan("tiny", "cpu", step=STEP, policy=policy)
        found = residence(schedule, ts.simulate(schedule, "cpu"))
        return next(r for r in found.roles if r.role == role)

    assert homes("resident", "parameter").host_home_bytes == 0
    assert homes("resident", "optimizer_state").device_only_bytes > 0
    assert homes("optimizer_offload", "optimizer_state").device_only_bytes == 0
    assert homes("optimizer_offload", "optimizer_state").host_home_bytes > 0
    assert homes("streaming", "parameter").host_home_bytes > 0


def test_times_by_which_more_is_alive_than_the_arena_holds_are_refused():
    schedule = ts.plan("tiny", "cpu", step=STEP, policy="streaming", device_mem="6MiB")
    line = ts.simulate(schedule, "cpu")
    at_once = line.passes[-1].model_copy(update={"start_ns": (0,) * len(schedule.ops)})
    damaged = line.model_copy(update={"passes": (*line.passes[:-1], at_once)})
    with pytest.raises(ts.TwinstreamError, match="are alive at once on the device"):
        residence(schedule, damaged)
