"""Random safe documents run on four processes: whatever was proven not to deadlock does not."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from tests.schedule.cluster.small_clusters import build
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.registry import kernel_keys, registered_kernel
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.options import RunOptions
from twinstream.executor.providers import provider
from twinstream.executor.ranks.rank_run import RankInputs
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.ops import Communicate

NUM_RANKS = 4


def of_numbers(schedule: RankSchedule, reduction: str) -> RankSchedule:
    """The bytes are float32, which can be added up."""
    tensors = [
        one.model_copy(update={"dtype": "float32", "shape": (one.size_bytes // 4,)})
        for one in schedule.tensors
    ]
    ops = [
        one.model_copy(update={"reduction": reduction}) if isinstance(one, Communicate) else one
        for one in schedule.ops
    ]
    return schedule.model_copy(update={"tensors": tuple(tensors), "ops": tuple(ops)})


def documents(count: int) -> list[Schedule]:
    found: list[Schedule] = []
    seed = 0
    while len(found) < count:
        schedule = build(Random(seed), most_ranks=NUM_RANKS)
        seed += 1
        if schedule.mesh.size == NUM_RANKS:
            reduction = "rank_order" if seed % 3 else "library"
            own = {n: of_numbers(s, reduction) for n, s in schedule.schedules.items()}
            found.append(schedule.model_copy(update={"schedules": own}))
    return found


def does_nothing(operands: Mapping[str, Any], attributes: Mapping[str, Any]) -> Calls:
    return Calls()


def with_a_kernel(part: RankPart) -> RankInputs:
    # in the rank's process, which runs other tests' schedules, too
    provider.registered_kernel = lambda key: (
        registered_kernel(key) if key in kernel_keys() else does_nothing
    )
    return RankInputs(HostWork(lambda op, number: None, lambda op, number, taken: None))


@pytest.mark.parametrize("number", range(30))
def test_a_proven_document_comes_to_its_end(four: RankProcesses, number):
    schedule = documents(number + 1)[-1]
    require_safe(schedule)
    outcomes = four.execute(schedule, with_a_kernel, RunOptions(num_passes=4))
    assert [outcome.rank for outcome in outcomes] == list(range(NUM_RANKS))
    for outcome in outcomes:
        assert len(outcome.timeline.passes) == 3
