"""Sums over replicas run beside the backward pass, unless what that holds costs too much."""

from typing import Any

import pytest

from twinstream.clusters import pipeline as making
from twinstream.clusters.conforms import conforms
from twinstream.clusters.pipeline import COMMUNICATION_BYTES, plan_pipeline
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

CLUSTER = load_cluster("rtx4090_ethernet")
MACHINE = machine_of(CLUSTER)
WORKLOAD = Workload(seq_len=512, chunk_tokens=512, chunks_per_round=1, rounds_per_step=2)
TIGHT = Caps(device_bytes=8_000_000 + COMMUNICATION_BYTES)
Spans = dict[str, tuple[int, int]]


def planned(caps: Caps | None = None, recipe: Recipe | None = None, **fields: Any) -> Any:
    stages = Job.of_step(load_preset("tiny"), WORKLOAD, recipe or Recipe(), Layout(dp=4, **fields))
    return plan_pipeline(stages, MACHINE, caps)


def spans_ns(schedule: Schedule) -> Spans:
    """When each op runs, in the simulated steady state."""
    timeline = simulate(schedule, MACHINE, CLUSTER).classes["stage 0"]
    last = timeline.passes[-1]
    times = zip(last.start_ns, last.end_ns, strict=True)
    return dict(zip(timeline.op_ids, times, strict=True))


def meet(spans: Spans, one: str, other: str) -> bool:
    """Whether two ops run at once for a while."""
    (start, end), (begun, ended) = spans[one], spans[other]
    return max(start, begun) < min(end, ended)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(clips=True)], ids=["", "clips"])
def test_a_layers_gradient_is_summed_beside_the_backward_of_the_layer_before(zero, recipe):
    beside = planned(zero=zero, recipe=recipe)
    assert beside.layout["dp_overlap"]
    assert verify(beside) == [] == conforms(beside)
    spans = spans_ns(beside)
    for layer in (1, 2, 3):
        assert meet(spans, f"reduce.{layer}", f"r0.block_backward.{layer - 1}.1")
    apart = planned(zero=zero, recipe=recipe, dp_overlap=False)
    assert verify(apart) == [] == conforms(apart)
    spans = spans_ns(apart)
    for layer in (1, 2, 3):
        assert not meet(spans, f"reduce.{layer}", f"r0.block_backward.{layer - 1}.1")


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_is_shorter_with_its_sums_beside_the_backward_pass(zero):
    step_ns = [
        simulate(planned(zero=zero, dp_overlap=overlaps), MACHINE, CLUSTER).step_ns
        for overlaps in (True, False)
    ]
    assert step_ns[0] < step_ns[1]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_where_held_gradients_are_in_the_way_sums_are_apart(zero):
    found = planned(TIGHT, zero=zero)
    assert found == planned(TIGHT, zero=zero, dp_overlap=False)
    assert not found.layout["dp_overlap"]
    assert verify(found) == [] == conforms(found)


def test_where_only_sums_apart_fit_they_are(monkeypatch):
    def tight(chain, *, overlaps, pooled):
        if overlaps:
            raise LayoutError("does not fit")
        return merging(chain, overlaps=overlaps, pooled=pooled)

    merging = making.without_messages
    monkeypatch.setattr(making, "without_messages", tight)
    assert not planned(zero=2).layout["dp_overlap"]
