"""Layouts that cannot be: one sentence for each reason, with its numbers."""

from typing import Any

import pytest

from tests.clusters.random_jobs import DENSE, GPT, MIXTURE, job_of
from twinstream.clusters.refusals import refusals_of, require_possible
from twinstream.clusters.search.search import search_layouts
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError


@pytest.mark.parametrize(
    ("shape", "fields", "sentence"),
    [
        (DENSE, {"tp": 16, "sequence_parallel": False},
         "8 heads are not divisible by tp 16"),
        (DENSE, {"pp": 9},
         "8 layers are fewer than pp x virtual_stages = 9 x 1 stages"),
        (DENSE, {"pp": 4, "virtual_stages": 3, "pipeline": "ring"},
         "8 layers are fewer than pp x virtual_stages = 4 x 3 stages"),
        (DENSE, {"pp": 2, "stage_layers": (4, 3)},
         "stage_layers has 2 stages of 7 layers together, and the layout pp x "
         "virtual_stages = 2 of 8 layers"),
        (DENSE, {"cp": 5},
         "seq_len 192 is not divisible by 2 x cp 5, two slices a rank"),
        (DENSE, {"tp": 8, "cp": 4, "seq_len": 136},
         "34 tokens of a sequence on a rank are not divisible by tp 8, as sequence "
         "parallelism needs"),
        (DENSE, {"ep": 2, "dp": 2},
         "ep is 2, but toy has no experts"),
        (MIXTURE, {"ep": 3, "dp": 3},
         "8 experts are not divisible by ep 3"),
        (MIXTURE, {"ep": 4, "dp": 2},
         "dp 2 is not divisible by ep 4: experts are shared by replicas"),
        (DENSE, {"dp": 4, "shard": 3},
         "shard 3 must divide dp x cp = 4 and be a multiple of ep x cp = 1"),
        (MIXTURE, {"dp": 8, "ep": 4, "shard": 2},
         "shard 2 must divide dp x cp = 8 and be a multiple of ep x cp = 4"),
        (DENSE, {"pp": 2, "virtual_stages": 2},
         "the pipeline '1f1b' has no virtual stages: 2 a rank need 'interleaved' or 'ring'"),
        (DENSE, {"virtual_stages": 2, "pipeline": "ring"},
         "2 virtual stages need pp of 2 or more"),
        (DENSE, {"pp": 4, "pipeline": "interleaved", "batches": 6},
         "6 microbatches (global batch 6 / dp 1 / micro batch 1) are not a multiple of pp 4, "
         "as the interleaved order needs"),
        (GPT, {"seq_len": 8192},
         "seq_len 8192 is more than the 4096 learned positions"),
    ],
)  # fmt: skip
def test_each_reason_is_one_sentence(shape: ModelSpec, fields: dict[str, Any], sentence: str):
    fields = dict(fields)
    count, seq_len = fields.pop("batches", 1), fields.pop("seq_len", 192)
    assert refusals_of(job_of(count, shape, seq_len, **fields)) == [sentence]


def test_the_batch_must_be_whole_microbatches_of_all_replicas():
    layout = Layout(dp=4, micro_batch=2)
    job = Job(shape=DENSE, layout=layout, seq_len=192, global_batch=12)
    assert refusals_of(job) == ["global batch 12 is not divisible by dp 4 x micro batch 2"]


def test_degrees_must_make_up_the_gpus():
    job = job_of(1, tp=2, cp=2, pp=2, dp=2)
    assert refusals_of(job, 16) == []
    assert refusals_of(job, 24) == ["tp 2 x cp 2 x pp 2 x dp 2 are 16 GPUs, not 24"]


def test_all_that_is_wrong_is_told_at_once():
    job = job_of(3, pp=2, pipeline="interleaved", dp=4, shard=3)
    with pytest.raises(
        LayoutError, match=r"^shard 3 must .*; 3 microbatches .* are not a multiple"
    ):
        require_possible(job)
    require_possible(job_of(4, pp=2, pipeline="interleaved", dp=4, shard=2))


def test_stages_without_layers_are_not_refused():
    assert refusals_of(job_of(1, pp=3, stage_layers=(0, 8, 0))) == []


def why_none(**fixed: Any) -> str:
    """Why a search of layouts finds none, on 8 GPUs with 12 sequences a step."""
    job = Job(shape=DENSE, layout=Layout(), seq_len=192, global_batch=12)
    with pytest.raises(LayoutError) as refused:
        search_layouts(job, 8, load_cluster("h100_dgx"), fixed)
    return str(refused.value).removeprefix("no layout of toy on 8 GPUs can be: ")


@pytest.mark.parametrize(
    ("fixed", "sentence"),
    [
        ({"pp": 8, "tp": 1, "pipeline": "interleaved", "micro_batch": 1},
         "12 microbatches (global batch 12 / dp 1 / micro batch 1) are not a multiple of pp 8, as "
         "the interleaved order needs"),
        ({"pp": 4, "pipeline": "1f1b", "virtual_stages": 2},
         "the pipeline '1f1b' has no virtual stages: 2 a rank need 'interleaved' or 'ring'"),
        ({"pp": 1, "virtual_stages": 2}, "2 virtual stages need pp of 2 or more"),
        ({"dp": 8}, "global batch 12 is not divisible by dp 8 x micro batch 1"),
        ({"micro_batch": 5}, "global batch 12 is not divisible by dp 8 x micro batch 5; "),
        ({"ep": 2, "pp": 2}, "ep is 2, but toy has no experts"),
        ({"tp": 3}, "8 GPUs are not a multiple of tp 3"),
        ({"tp": 4, "pp": 4}, "tp 4 x pp 4 are 16 GPUs, and there are 8"),
    ],
)  # fmt: skip
def test_a_search_says_which_number_stands_in_the_way(fixed: dict[str, Any], sentence: str):
    assert why_none(**fixed).startswith(sentence)
