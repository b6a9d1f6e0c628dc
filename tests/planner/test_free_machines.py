"""Hypothetical machines on which computing, or everything, takes no time."""

import pickle

import pytest

from tests.hardware_profiles.machines import number
from tests.helpers.flat_machine import flat_machine
from tests.helpers.planning import plan_step, request_of
from twinstream.hardware_profiles.errors import NoTimeError
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import summarize
from twinstream.models.presets import load_model
from twinstream.planner.request import ChunkingError, TrainingStep
from twinstream.planner.search.tokens import proposed_tokens
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.proof.verify import verify_rank
from twinstream.simulator.replay import simulate, simulate_rank
from twinstream.study.answer import StudyError
from twinstream.study.one_device import DeviceQuery

FREE = number(None)
COMPUTE_IS_FREE = {
    "peak_bf16_flop_per_s": FREE, "peak_fp32_flop_per_s": FREE, "hbm_bytes_per_s": FREE,
    "launch_latency_ns": number(0), "event_wait_latency_ns": number(0),
}  # fmt: skip
COPIES_ARE_FREE = {
    **{f"pcie_{way}_bytes_per_s": FREE for way in ("h2d", "d2h", "duplex")},
    "host_dram_bytes_per_s": FREE, "copy_latency_ns": number(0),
}  # fmt: skip
TINY = load_model("tiny")
STEP = TrainingStep(seq_len=64, tokens_per_step=256)
TIGHT = Caps(device_bytes=9 * 2**20)


def planned(machine: Machine, caps: Caps, policy: str = "optimal"):
    return plan_step(TINY, STEP, machine, caps, policy)


@pytest.mark.parametrize(
    ("policy", "caps"),
    [(p, Caps()) for p in ("optimal", "streaming", "resident", "full_recompute")]
    + [(p, TIGHT) for p in ("optimal", "streaming")],
)
def test_plans_are_right_where_computing_takes_no_time(policy, caps):
    machine = flat_machine(**COMPUTE_IS_FREE)
    schedule = planned(machine, caps, policy)
    verify_rank(schedule)
    assert simulate_rank(schedule, machine).step_ns >= schedule.bound.step_s * 1e9


def test_there_is_no_gap_to_a_bound_of_no_time():
    machine = flat_machine(**COMPUTE_IS_FREE)
    schedule = Schedule.of_rank(planned(machine, Caps()))
    summary = summarize(schedule, simulate(schedule, machine), machine)
    assert summary.lower_bound_s == 0.0 < summary.step_time_s
    assert summary.gap is None and summary.gap_family is None


@pytest.mark.parametrize("policy", ["optimal", "streaming"])
@pytest.mark.parametrize("caps", [Caps(), TIGHT])
def test_a_step_that_takes_no_time_is_refused(policy, caps):
    machine = flat_machine(**COMPUTE_IS_FREE, **COPIES_ARE_FREE)
    with pytest.raises(NoTimeError, match=r"0 ns on machine 'flat'.*for example peak_bf16"):
        simulate_rank(planned(machine, caps, policy), machine)


def test_no_tokens_per_step_are_proposed_where_a_round_takes_no_time():
    machine = flat_machine(**COMPUTE_IS_FREE)
    with pytest.raises(ChunkingError, match=r"a round takes no time on .*'flat'.*give tokens"):
        proposed_tokens(request_of(TINY, TrainingStep(seq_len=64), machine, Caps()))


def test_nothing_is_a_share_of_what_takes_no_time():
    machine = flat_machine(**COMPUTE_IS_FREE)
    request = request_of(TINY, STEP, machine, TIGHT)
    with pytest.raises(StudyError, match=r"computing takes no time on machine 'flat'"):
        DeviceQuery(request).answer().compute_limit()


def test_errors_go_from_process_to_process_as_they_are():
    error = NoTimeError(machine="flat")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.machine) == (NoTimeError, str(error), "flat")
