"""Steps planned by the seed system's rules, through the same door as every other policy's."""

import pytest

from tests.helpers.planning import plan_step
from twinstream.fidelity.seed_system.classes import UnknownMachineClass
from twinstream.fidelity.seed_system.sizing import SizingRefused
from twinstream.fidelity.seed_system.step import OtherCutError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_preset
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError

GIB = 2**30
CAPS = Caps(device_bytes=26 * GIB, host_bytes=64 * GIB, device_reserve_bytes=2 * GIB)
ONE_ROUND = TrainingStep(seq_len=8192, tokens_per_step=16384)


def planned(
    step: TrainingStep = ONE_ROUND, caps: Caps = CAPS, machine: str = "h100", model: str = "8b"
) -> RankSchedule:
    return plan_step(load_preset(model), step, load_machine(machine), caps, "ml_dataflow")


def test_the_reserve_is_taken_off_the_device_cap():
    """What the 24 GiB left hold is what was recorded at 24 GiB and 60 or 64 GiB of host memory."""
    schedule = planned()
    assert (schedule.policy, schedule.caps) == ("ml_dataflow", CAPS)
    blocks = {s.slot_id for s in schedule.slots if ".block" in s.slot_id and "opt" not in s.slot_id}
    assert len(blocks) == 4  # two of parameters, two of gradients
    assert schedule.bound is not None and schedule.bound.step_s > 0


def test_tokens_of_a_step_are_whole_rounds():
    assert planned().workload.rounds_per_step == 1
    two = TrainingStep(seq_len=8192, tokens_per_step=32768, chunk_tokens=16384)
    assert planned(two).workload.rounds_per_step == 2


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (TrainingStep(8192, 16384, 8192), "--chunk-tokens 16384"),
        (TrainingStep(8192, 32768, None, 2), "--chunks-per-round 1"),
        (TrainingStep(8192, 24576), "24,576 is not a multiple"),
        (TrainingStep(8192, 8192), "8,192 is not a multiple"),
    ],
)
def test_another_cut_is_refused(step, told):
    with pytest.raises(OtherCutError) as refused:
        planned(step)
    assert told in str(refused.value)


def test_what_the_seed_system_does_not_know_is_refused():
    with pytest.raises(UnknownMachineClass, match="cpu"):
        planned(machine="cpu")
    with pytest.raises(TwinstreamError, match="'tiny'"):
        planned(model="tiny")


def test_caps_that_are_too_small_are_told():
    small = CAPS.model_copy(update={"device_bytes": 12 * GIB})
    with pytest.raises(SizingRefused, match="raise --device-mem") as refused:
        planned(caps=small)
    assert refused.value.reason == "failed_dev_mem"
    with pytest.raises(SizingRefused, match="raise --host-mem"):
        planned(caps=CAPS.model_copy(update={"host_bytes": 40 * GIB}))
