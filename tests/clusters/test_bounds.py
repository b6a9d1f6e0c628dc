"""What no schedule of a layout can beat is not beaten by the one that is simulated."""

import pytest

from tests.clusters.random_jobs import DENSE, MIXTURE, job_of, random_job
from twinstream.clusters.predict import predict
from twinstream.clusters.search.bounds import BoundTables
from twinstream.clusters.search.chains import Pricing
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of

LARGE = DENSE.model_copy(update={"d_model": 2048, "d_ff": 8192})
CLUSTER = load_cluster("h100_dgx")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4, "dp": 2},
        {"dp": 8, "zero": 3},
        {"pp": 4, "dp": 2, "zero": 2},
        {"pp": 4, "pipeline": "gpipe"},
        {"pp": 4, "virtual_stages": 2, "pipeline": "interleaved"},
        {"pp": 2, "virtual_stages": 2, "pipeline": "ring", "recompute": "full"},
        {"pp": 2, "pipeline": "zero_bubble"},
        {"pp": 4, "pipeline": "zero_bubble"},
        {"pp": 8, "pipeline": "zero_bubble", "tp": 2},
        {"cp": 4, "pp": 2},
        {"ep": 4, "dp": 4, "shape": MIXTURE},
    ],
)
def test_neither_time_nor_memory_is_below_the_bound(fields):
    fields = dict(fields)
    job = job_of(8, fields.pop("shape", LARGE), 2048, **fields)
    bounds = BoundTables(job, Pricing(CLUSTER, machine_of(CLUSTER))).of([job.layout])
    found = predict(job, CLUSTER)
    assert bounds.step_s[0] <= found.step_s
    assert bounds.memory_bytes[0] <= found.memory_bytes
    if job.layout.num_gpus == job.layout.pp:  # nothing is said but messages: it is near
        assert bounds.step_s[0] > 0.8 * found.step_s


@pytest.mark.parametrize("seed", [3, 31, 49, 51, 106, 117, 119, 140, 152])
def test_no_random_layout_is_below_its_bound(seed):
    """Of few and of many microbatches, uneven stages, anything computed again."""
    job = random_job(seed)
    shape = job.shape.model_copy(update={"d_model": 2048, "d_ff": 8192})
    wide = job.model_copy(update={"shape": shape, "seq_len": 1920, "precision": "bf16"})
    bounds = BoundTables(wide, Pricing(CLUSTER, machine_of(CLUSTER))).of([wide.layout])
    found = predict(wide, CLUSTER)
    assert bounds.step_s[0] <= found.step_s
    assert bounds.memory_bytes[0] <= found.memory_bytes
