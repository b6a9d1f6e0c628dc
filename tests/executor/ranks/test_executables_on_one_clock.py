"""Schedules that ranks run, on one clock of all ranks: the loops equal the cluster's simulator."""

from typing import Any

import pytest

from tests.executor.ranks.test_virtual_clock import (
    NUM_PASSES,
    GivenTimes,
    assert_equal,
    given_ns,
)
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import WORKLOADS, small
from tests.helpers.virtual_ranks import run_virtual_ranks
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.splitting import expanded
from twinstream.schedule.document import Caps
from twinstream.simulator.replay import replay_cluster

SPEC = small("tiny", num_layers=8)
WORKLOAD = WORKLOADS["packed"].model_copy(update={"rounds_per_step": 4})


@pytest.mark.parametrize(
    ("fields", "cap_bytes"),
    [
        ({"pp": 2}, None),
        ({"pp": 4}, None),
        ({"pp": 4, "pipeline": "gpipe"}, None),
        ({"pp": 2, "pipeline": "interleaved", "virtual_stages": 2}, None),
        ({"pp": 4, "pipeline": "ring", "virtual_stages": 2}, None),
        ({"pp": 4, "pipeline": "ring", "virtual_stages": 2}, 700_000),
        ({"dp": 2, "zero": 0}, None),
        ({"dp": 2, "zero": 0, "dp_overlap": False}, None),
        ({"dp": 4, "zero": 2}, None),
        ({"dp": 4, "zero": 3}, None),
        ({"pp": 2, "dp": 2, "zero": 1}, None),
        ({"tp": 2, "sequence_parallel": False, "zero": 0}, None),
        ({"tp": 2, "parts": 2, "sequence_parallel": False, "pp": 2, "zero": 0}, None),
        ({"tp": 2, "sequence_parallel": False, "dp": 2, "zero": 3}, 500_000),
        ({"dp": 2, "ep": 2, "zero": 1}, None),
        ({"pp": 2, "dp": 2, "ep": 2, "zero": 3}, 600_000),
        ({"tp": 2, "parts": 2, "pp": 2, "zero": 0}, None),
        ({"tp": 2, "dp": 2, "zero": 3}, 500_000),
    ],
)
def test_what_ranks_run_takes_the_simulated_nanoseconds(
    fields: dict[str, Any], cap_bytes: int | None
):
    spec = small("tiny-experts", num_layers=8) if "ep" in fields else SPEC
    stages = Job.of_step(spec, WORKLOAD, Recipe(), Layout(**fields))
    schedule = plan_pipeline(stages, MACHINE, Caps(device_bytes=cap_bytes))
    copies = {op.stream.queue for part in schedule.schedules.values() for op in part.ops}
    assert ("h2d" in copies) == (cap_bytes is not None)
    parted = expanded(schedule)
    simulated = replay_cluster(parted, GivenTimes(parted, given_ns, 5), "given", NUM_PASSES)
    executed = run_virtual_ranks(schedule, given_ns, 5, NUM_PASSES)
    assert_equal(schedule, executed, simulated, parted)
