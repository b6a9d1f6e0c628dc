"""The search of layouts that run here: no plan of its space is faster than what it finds."""

from dataclasses import replace
from typing import Any

import pytest

from twinstream.clusters.pipeline import plan_pipeline
from twinstream.clusters.predict import gpu_caps, planned_ranks
from twinstream.clusters.search import planned, workers
from twinstream.clusters.search.bounds import BoundTables
from twinstream.clusters.search.chains import Pricing
from twinstream.clusters.search.cuts import cuts_of_ranks, jobs_of_ranks
from twinstream.clusters.search.search import search_layouts
from twinstream.clusters.search.space import NoLayoutError, RunsHere, SearchSpace
from twinstream.clusters.shared_machine import Place, place_here
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.workload import Packing
from twinstream.simulator.replay import simulate

RANKS = 4
SPEC = load_preset("tiny")
PACKED = Packing.of((64, 32, 32))


def asked(**step: Any) -> tuple[Job, Place, RunsHere]:
    place = place_here(load_machine("cpu"), RANKS, 2)
    wanted = TrainingStep(**{"seq_len": 128, "tokens_per_step": 2048, **step})
    job, *others = jobs_of_ranks(SPEC, Recipe(), cuts_of_ranks(SPEC, wanted, place.machine, RANKS))
    return job, place, RunsHere(place.machine, others)


def all_steps_s(job: Job, place: Place, here: RunsHere, fixed: dict[str, Any]) -> list[float]:
    """Of every layout of the space and every cut that can be planned."""
    caps = gpu_caps(place.cluster, place.machine, RANKS)
    pricing = Pricing(place.cluster, place.machine, caps)
    found = []
    for cut in (job, *here.other_cuts):
        space = SearchSpace(cut, RANKS, place.cluster, pricing, fixed, here)
        try:
            possible = space.possible()
        except NoLayoutError:
            continue
        for layout in possible:
            try:
                schedule = planned_ranks(cut.laid_out(layout), place.cluster, place.machine, caps)
            except TwinstreamError:
                continue
            found.append(simulate(schedule, place.machine, place.cluster).step_ns / 1e9)
    return found


@pytest.mark.parametrize("fixed", [{"zero": 1}, {"pp": 4}, {"dp": 4, "zero": 3}])
def test_the_bound_is_below_every_plan_and_the_answer_near_the_fastest(fixed):
    job, place, here = asked()
    here = replace(here, other_cuts=here.other_cuts[:1])
    found = search_layouts(job, RANKS, place.cluster, fixed, here=here)
    every = all_steps_s(job, place, here, fixed)
    assert 0 < found.least_bound_s <= min(every)
    assert found.best[0].step_s <= 1.02 * min(every)  # other cuts are tried of the best alone


def test_of_both_exchanges_of_keys_the_faster_is_taken():
    """Messages that take long make a ring wait, where one gather waits once."""
    job, place, here = asked(chunk_tokens=32)
    fixed = {"cp": 4, "tp": 1, "pp": 1, "dp": 1, "zero": 1}
    steps = {}
    for exchange in ("all_gather", "ring", "auto"):
        found = search_layouts(
            job, RANKS, place.cluster, {**fixed, "cp_exchange": exchange}, here=here
        )
        steps[exchange] = found.best[0].step_s
        assert exchange in ("auto", found.best[0].layout.cp_exchange)
    assert steps["ring"] != steps["all_gather"]
    assert steps["auto"] == min(steps.values())


def test_a_layout_is_planned_only_where_its_bound_is_better_than_the_best_plan():
    job, place, here = asked()
    found = search_layouts(job, RANKS, place.cluster, here=here)
    beaten = [one for one in found.candidates if one.is_bound]
    assert beaten and all("at most" in str(one) for one in beaten)
    fastest = max(one.prediction.tokens_per_s for one in found.best)
    whole = [one for one in beaten if not one.layout.in_parts and one.layout.virtual_stages == 1]
    assert whole and all((one.tokens_per_s or 0.0) <= fastest for one in whole)


def test_the_best_bound_gets_its_cuts_and_shards_before_others_and_none_is_planned_twice(
    monkeypatch,
):
    job, place, here = asked()
    plan, tried = planned.planned_ranks, []

    def kept(job, *rest):
        tried.append((job.layout, job.cut))
        return plan(job, *rest)

    monkeypatch.setattr(planned, "planned_ranks", kept)
    search_layouts(job, RANKS, place.cluster, here=here)
    degrees = [(layout.tp, layout.pp, layout.dp) for layout, _ in tried]
    best = sum(one == degrees[0] for one in degrees)
    assert len(tried) == len(set(tried)) > best
    assert degrees[:best] == [degrees[0]] * best
    assert {layout.zero for layout, _ in tried[:best]} == {0, 1}
    assert len({layout.micro_batch for layout, _ in tried[:best]}) > 1


def test_stages_planned_in_processes_beside_this_one_make_the_same_plan(monkeypatch):
    job, place, here = asked()
    monkeypatch.setattr(workers, "_WORTH_S", 0.0)
    found, pools, pool = [], [], workers.ProcessPoolExecutor
    monkeypatch.setattr(
        workers,
        "ProcessPoolExecutor",
        lambda *of, **told: pools.append(pool(*of, **told)) or pools[-1],
    )
    for cores in (1, 2):
        monkeypatch.setattr(workers, "_cores", lambda cores=cores: cores)
        found.append(search_layouts(job, RANKS, place.cluster, {"tp": 1}, here=here))
        assert len(pools) == cores - 1
    alone, beside = found
    assert alone.candidates == beside.candidates
    assert [one.schedule for one in alone.best] == [one.schedule for one in beside.best]


def test_no_stage_is_planned_after_one_that_does_not_fit():
    job, place, _ = asked()
    seen = []

    def each(work, stages):
        for stage in stages:
            seen.append(stage[1])
            yield work(*stage)

    laid_out = job.laid_out(Layout(pp=4, zero=0, offload=True))
    room = {stage: Caps(device_bytes=2**30 if stage == 0 else 2**12) for stage in range(4)}
    with pytest.raises(LayoutError, match="stage 1 does not fit"):
        plan_pipeline(laid_out, place.machine, room, each=each)
    assert seen == [0, 1]


@pytest.mark.parametrize(
    "step", [{"seq_len": 512, "chunk_tokens": 256}, {"packing": PACKED, "seq_len": 64}]
)
def test_cuts_without_a_bound_are_planned_in_every_layout_of_one_stage_a_rank(step):
    job, place, here = asked(**step)
    assert job.cut is not None and job.workload.rounds_per_step > 1
    found = search_layouts(job, RANKS, place.cluster, here=here)
    assert found.least_bound_s == 0 and found.gap is None
    degrees = {(one.layout.tp, one.layout.pp, one.layout.dp) for one in found.candidates}
    assert degrees >= {(1, 4, 1), (1, 2, 2), (1, 1, 4)}
    assert not any(one.is_bound for one in found.candidates)
    assert found.best[0].job.step.tokens_per_step == 2048 == job.tokens_per_step


def test_of_fixed_degrees_every_layout_is_tried_until_one_fits(monkeypatch):
    """In parts as in whole blocks: there is a limit only where others come first."""
    job, place, here = asked()
    plan, tried = planned.planned_ranks, []

    def misfits(one, *given):
        tried.append(one.layout)
        if one.layout.virtual_stages == 1 or one.layout.pipeline == "interleaved":
            raise LayoutError("it does not fit")
        return plan(one, *given)

    monkeypatch.setattr(planned, "planned_ranks", misfits)
    found = search_layouts(job, RANKS, place.cluster, {"tp": 2}, here=replace(here, other_cuts=()))
    assert found.best[0].layout.pipeline == "ring" and len(tried) > 3


def test_chunks_get_smaller_until_something_fits_and_are_the_largest_that_do(monkeypatch):
    """Where not even the smallest fit, nothing between is planned."""
    job, place, here = asked()
    plan, tried, most = planned.planned_ranks, [], 128

    def misfits(one, *given):
        tried.append(one.workload.chunk_tokens)
        if tried[-1] > most:
            raise LayoutError("it does not fit")
        return plan(one, *given)

    monkeypatch.setattr(planned, "planned_ranks", misfits)
    assert sorted({one.workload.chunk_tokens for one in (job, *here.other_cuts)})[:3] == [
        most, 2 * most, 4 * most,
    ] and job.workload.chunk_tokens == 2 * most  # fmt: skip
    found = search_layouts(job, RANKS, place.cluster, {"pp": 2, "dp": 2}, here=here)
    assert found.best[0].job.workload.chunk_tokens == most
    most = 0
    tried.clear()
    with pytest.raises(NoLayoutError, match="it does not fit"):
        search_layouts(job, RANKS, place.cluster, {"pp": 2, "dp": 2}, here=here)
    assert set(tried) == {128, 256}


@pytest.mark.parametrize("step", [{}, {"tokens_per_step": 2**16}, {"chunk_tokens": 2048}])
def test_a_microbatch_is_one_chunk_or_the_slices_of_a_sequence_longer_than_one(step):
    machine = load_machine("rtx4090")
    for seq_len, longest in ((2048, 8192), (32768, 8192)):
        asked_for = TrainingStep(seq_len=seq_len, **step)
        cuts = cuts_of_ranks(load_preset("8b"), asked_for, machine, RANKS)
        most = step.get("chunk_tokens", longest)
        assert cuts[0].chunk_tokens == most
        for cut in cuts:
            assert cut.chunks_per_round * cut.chunk_tokens == max(seq_len, cut.chunk_tokens)


def test_ranks_have_the_kernels_that_are_asked_for():
    job, place, here = asked()
    found = search_layouts(job, RANKS, place.cluster, {"dp": 4}, here=here)
    assert found.best[0].job.recipe.kernels == Recipe().implementations


@pytest.mark.parametrize(
    "fields", [{"tp": 2, "dp": 2}, {"tp": 2, "dp": 2, "ep": 2}, {"cp": 2, "dp": 2, "ep": 2}]
)
def test_the_bound_of_parts_and_shares_of_experts_is_below_the_plan(fields):
    place, spec = place_here(load_machine("cpu"), RANKS, 2), load_preset("tiny-experts")
    step = TrainingStep(
        seq_len=128, tokens_per_step=1024, chunk_tokens=128 // (1 + 3 * ("cp" in fields))
    )
    job, *_ = jobs_of_ranks(spec, Recipe(), cuts_of_ranks(spec, step, place.machine, RANKS))
    caps = gpu_caps(place.cluster, place.machine, RANKS)
    whole = Layout(micro_batch=job.layout.micro_batch, zero=0, **fields)
    layout = whole.with_sequence_parallel(False)
    bound_s = BoundTables(job, Pricing(place.cluster, place.machine, caps)).split_s(layout)
    schedule = planned_ranks(job.laid_out(layout), place.cluster, place.machine, caps)
    assert 0 < bound_s <= simulate(schedule, place.machine, place.cluster).step_ns / 1e9


def test_the_bound_of_parts_is_what_a_rank_computes_of_whole_blocks_by_its_share():
    """Ranks of cp have slices of as much work; those that share experts compute all the rest."""
    job, place, _ = asked()
    tables = BoundTables(job, Pricing(place.cluster, place.machine, None))
    whole = tables.split_s(Layout(dp=2, sequence_parallel=False))
    assert tables.split_s(Layout(dp=2, cp=2, sequence_parallel=False)) == pytest.approx(whole / 2)
