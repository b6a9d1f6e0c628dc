"""A process that plans again and again takes no more memory for it."""

from tests.contract.run_python import run_python

PLANS = """
import gc
from twinstream import TrainingStep, TwinstreamError, plan
from twinstream.planner.choices import Choices

QUICK, STEP = Choices(effort="quick"), TrainingStep(1024, 4096)

def planned(device_mem):
    try:
        plan("tiny", "cpu", step=STEP, device_mem=device_mem, choices=QUICK)
    except TwinstreamError:
        return "refused"
    return "planned"

seen = []
for _ in range(5):
    assert [planned(cap) for cap in ("16MiB", "3MiB")] == ["planned", "refused"]
    seen.append(len(gc.get_objects()))
print(*seen)
"""


def test_what_plans_and_refusals_leave_behind_is_collected(tmp_path):
    """Programs and chains are kept from the first plans on; all else goes with its plan."""
    _, kept, *later = map(int, run_python("-c", PLANS, cwd=tmp_path).split())
    assert max(later) - kept < 1_000  # a plan of these makes 20,000
