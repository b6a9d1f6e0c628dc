"""The search of layouts: what it finds, what it leaves out, and what it says when there is none."""

import json
import os
import re

import pytest

from tests.clusters.random_jobs import DENSE, MIXTURE, job_of, random_job
from tests.front_door.command_line import call
from tests.simulator.cluster.real_clusters import calm_cluster
from twinstream.clusters.predict import Prepared, predict
from twinstream.clusters.refusals import refusals_of
from twinstream.clusters.search import workers
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.folded import folded_step_s
from twinstream.clusters.search.search import search_layouts
from twinstream.clusters.search.space import NoLayoutError, layouts
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.presets import load_model
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps

GIB = 2**30


def _job(shape=DENSE, global_batch=16, seq_len=1024):
    return job_of(shape=shape, seq_len=seq_len).model_copy(update={"global_batch": global_batch})


def test_the_fastest_of_few_layouts_is_that_of_simulating_them_all():
    cluster = load_cluster("h100_dgx")
    job = _job(DENSE.model_copy(update={"d_model": 2048, "d_ff": 8192, "head_dim": 256}))
    fixed = {"micro_batch": 2, "recompute": "none", "pipeline": "1f1b", "zero": 1}
    found = search_layouts(job, 8, cluster, fixed, keep=20)
    every = {}
    for layout in layouts(job, 8, 8, fixed):
        one = job.model_copy(update={"layout": layout})
        if not refusals_of(one):
            every[layout.text] = predict(one, cluster).step_s
    assert len(every) == found.num_layouts > 5
    fastest = min(every, key=every.__getitem__)
    assert found.best[0].prediction.step_s <= 1.01 * every[fastest]
    assert found.best[0].layout.text in every


def test_rows_are_of_different_degrees_and_the_fastest_of_each_kind_is_among_them():
    """The best of every number of experts' ranks, as a search of that alone has it."""
    job = _job(MIXTURE).model_copy(update={"recipe": Recipe()})
    cluster, told_of = load_cluster("h100_dgx"), list[str]()
    found = search_layouts(job, 8, cluster, {"tp": 1, "micro_batch": 1}, progress=told_of.append)
    degrees = [(one.job.is_own, one.layout.pp, one.layout.dp, one.layout.ep) for one in found.best]
    assert len(set(degrees)) == len(degrees)
    assert {one.layout.ep for one in found.best} == {1, 2, 4, 8}
    assert {one.job.is_own for one in found.best} == {False, True}
    for ep in (4, 8):
        only = search_layouts(job, 8, cluster, {"tp": 1, "micro_batch": 1, "ep": ep})
        shown = min(one.prediction.step_s for one in found.best if one.layout.ep == ep)
        assert shown == pytest.approx(only.best[0].prediction.step_s, rel=0.05)
    first, last = told_of[2], told_of[-1]
    best = r"best so far (pp|dp)\d.*: "
    assert re.search(rf"^\d+ of at most \d+ layouts simulated, {best}about \d", first)
    assert re.search(rf"^simulating whole (pp|dp)\d.*, {best}\d", last)


def test_processes_beside_this_one_find_the_same(monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_S", 0.0)
    answers = []
    for cores in (1, 3):
        monkeypatch.setattr(workers, "_cores", lambda cores=cores: cores)
        answers.append(search_layouts(_job(global_batch=32), 16, load_cluster("h100_dgx"), keep=7))
    alone, beside = answers
    assert alone == beside and alone.num_simulated >= 7


def test_a_search_whose_workers_die_goes_on_alone(monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_S", 0.0)
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    asked = (_job(global_batch=32), 16, load_cluster("h100_dgx"))
    whole = search_layouts(*asked, keep=7)
    monkeypatch.setattr(workers, "_begin", _die)
    assert search_layouts(*asked, keep=7) == whole


def _die(*_: object) -> None:
    os._exit(1)


def test_no_layout_beats_the_least_bound_and_each_is_above_its_own():
    found = search_layouts(_job(global_batch=32), 16, load_cluster("h100_dgx"), keep=6)
    for one in found.best:
        assert one.bound_s <= one.prediction.step_s
        assert found.least_bound_s <= one.prediction.step_s
    steps = [one.prediction.step_s for one in found.best]
    assert steps == sorted(steps)
    assert found.gap == steps[0] / found.least_bound_s - 1


def test_a_base_in_few_bits_is_counted_in_bytes_and_bounds():
    """70B fits two GPUs in nf4, which its bf16 base does not; and beats no bound."""
    told = call(
        "plan", "--cluster", "h100_dgx", "--gpus", 2, "--model", "llama3-70b", "--seq-len", 2048,
        "--tokens-per-step", 16384, "--lora", "r=16", "--base", "nf4", "--json",
    )  # fmt: skip
    found = json.loads(told.out)
    assert found["num_fit"] == found["num_layouts"] > 10
    for one in found["layouts"]:
        assert max(one["bound_s"], found["least_bound_s"]) <= one["step_s"] * (1 + 1e-9)


def test_what_is_fixed_is_kept():
    fixed = {"tp": 2, "pp": 2, "recompute": "full", "zero": 1}
    found = search_layouts(_job(), 8, load_cluster("a100_dgx"), fixed)
    for one in found.best:
        layout = one.layout
        assert (layout.tp, layout.pp, layout.recompute, layout.zero) == (2, 2, "full", 1)
        assert layout.num_gpus == 8


def test_layouts_of_experts_share_them():
    found = search_layouts(_job(MIXTURE), 8, load_cluster("h100_dgx"), {"ep": 4, "pp": 1})
    assert {one.layout.ep for one in found.best} == {4}


def test_folded_layers_take_about_as_long_as_whole_ones():
    cluster = calm_cluster("h100_dgx")
    pricing = Pricing(cluster, machine_of(cluster))
    shape = load_model("8b").model_copy(update={"num_layers": 4})
    for fields in ({"tp": 4}, {"tp": 2, "pp": 2}, {"cp": 2}, {"pp": 4}, {"dp": 4, "zero": 3}):
        job = job_of(8, shape, 8192, **fields)
        whole = predict(job, cluster).step_s
        assert folded_step_s(job, pricing) == pytest.approx(whole, rel=0.04), fields


@pytest.mark.parametrize("seed", range(8))
def test_a_step_that_surely_takes_longer_is_not_simulated_further(seed):
    """What is known of it then is less than it takes, and not by much: its microbatches follow one
    another on the fullest stage."""
    job = random_job(seed)
    layout = job.layout
    batch = 12 * layout.dp * layout.micro_batch * layout.pp
    job = job.model_copy(update={"global_batch": batch})
    cluster = load_cluster("h100_dgx")
    pricing = Pricing(cluster, machine_of(cluster))
    whole_s = folded_step_s(job, pricing)
    least_s = folded_step_s(job, pricing, 0.0)
    assert 0.5 * whole_s < least_s <= whole_s
    assert folded_step_s(job, pricing, 0.99 * least_s) == least_s
    assert folded_step_s(job, pricing, 1.01 * least_s) == whole_s


@pytest.mark.parametrize(
    ("gpus", "fixed", "said"),
    [
        (16, {"tp": 3, "pp": 2}, "16 GPUs are not a multiple of tp 3 x pp 2 = 6"),
        (8, {"tp": 8, "cp": 1, "pp": 1, "dp": 2}, "tp 8 x cp 1 x pp 1 x dp 2 are 16 GPUs"),
        (8, {"micro_batch": 7}, "16 is not divisible by dp 8 x micro batch 7"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_numbers(gpus, fixed, said):
    with pytest.raises(LayoutError, match=said):
        search_layouts(_job(), gpus, load_cluster("h100_dgx"), fixed)


def test_what_does_not_fit_says_how_much_the_leanest_needs_and_what_would_do():
    job = _job(load_model("llama3-70b"), global_batch=8, seq_len=4096)
    with pytest.raises(
        NoLayoutError, match=r"needs [0-9.]+ GiB \(optimizer .* there are 78.15 GiB of a GPU"
    ) as error:
        search_layouts(job, 2, load_cluster("h100_dgx"), {"offload": False})
    assert re.search(r"\d+ GPUs \(by the least bytes\), or --offload, would do$", str(error.value))


def test_a_shortage_within_the_error_of_predicted_bytes_is_said_to_be_that():
    """Runs of Megatron-LM ran that were predicted to need 2.5% too much."""
    fixed = {"tp": 2, "pp": 1, "cp": 1, "dp": 2, "micro_batch": 1, "recompute": "none",
             "zero": 1, "offload": False}  # fmt: skip
    cluster = load_cluster("h100_dgx")
    job = _job(load_model("8b"), global_batch=4, seq_len=2048).with_megatron_kernels()
    needs = sum(Prepared(job.laid_out(Layout(tp=2, dp=2)), cluster).memory().values())
    for times, is_near in ((1.02, True), (1.04, False)):
        caps = Caps(device_bytes=round(needs / times), device_reserve_bytes=0)
        with pytest.raises(NoLayoutError) as error:
            search_layouts(job, 4, cluster, fixed, caps=caps)
        near = f"{times - 1:.1%} too much, within the error of such predictions, 2.5%: it may fit"
        assert (near in str(error.value)) == is_near


def test_host_memory_lets_fewer_gpus_do():
    job = _job(load_model("8b"), global_batch=4, seq_len=2048)
    fixed = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "micro_batch": 4, "recompute": "none"}
    with pytest.raises(NoLayoutError):
        search_layouts(job, 1, load_cluster("h100_dgx"), {**fixed, "offload": False})
    found = search_layouts(job, 1, load_cluster("h100_dgx"), fixed, keep=1)
    prediction = found.best[0].prediction
    assert prediction.fits
    assert prediction.memory_bytes < 80 * GIB
