"""A schedule that has the host CPU compute is refused in a sentence, not run."""

import pytest

from tests.helpers.host_chains import tiny_chain_of
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import run
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import HostKernelError
from twinstream.schedule.document import Caps


@pytest.mark.parametrize("policy", ["optimizer_offload", "layer_offload"])
def test_a_schedule_with_tasks_on_the_host_is_refused(policy):
    schedule = planned(tiny_chain_of(policy, "one chunk"), MACHINE, Caps(), policy)
    with pytest.raises(HostKernelError, match=f"policy '{policy}' has the host CPU run") as raised:
        run(schedule, RunOptions())
    assert "adamw_step/host" in str(raised.value)
    assert "simulate the schedule, or plan with another policy" in str(raised.value)
