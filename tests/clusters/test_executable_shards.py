"""What ZeRO leaves on each rank of a schedule that ranks can run, and what cannot be run."""

import pytest

from twinstream.clusters.pipeline import plan_pipeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import rank_part
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Schedule
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=2, rounds_per_step=2)


def planned(layout: Layout, recipe: Recipe | None = None) -> Schedule:
    stages = Job.of_step(load_preset("tiny"), WORKLOAD, recipe or Recipe(), layout)
    return plan_pipeline(stages, load_machine("cpu"))


def carried_bytes(schedule: Schedule, kind: str) -> int:
    """Of all ranks, over the whole document."""
    total = 0
    for rank in range(schedule.mesh.size):
        part = rank_part(schedule, rank).schedule
        sizes = {tensor.tensor_id: tensor.size_bytes for tensor in part.tensors}
        total += sum(sizes[c.tensor] for c in part.carried if c.tensor.startswith(kind))
    return total


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas_together_hold_a_shard_once(pp):
    whole = planned(Layout(pp=pp, dp=1, zero=0))
    parameters, state = (carried_bytes(whole, kind) for kind in ("param.", "opt."))
    for zero, copies in ((0, (4, 4)), (1, (4, 1)), (2, (4, 1)), (3, (1, 1))):
        schedule = planned(Layout(pp=pp, dp=4, zero=zero))
        assert verify(schedule) == []
        for kind, times, size in (("param.", copies[0], parameters), ("opt.", copies[1], state)):
            padding = carried_bytes(schedule, kind) - times * size
            assert 0 <= padding <= times * size * 0.01
            assert zero or not padding


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_rank_updates_its_own_elements_and_all_of_them_are_updated(zero):
    schedule = planned(Layout(dp=3, zero=zero), Recipe(clips=True))
    assert verify(schedule) == []
    places = []
    for rank in range(3):
        call = rank_part(schedule, rank).schedule.calls["adamw.0"].attributes
        assert "shard_axes" not in call
        places.append((call["element_offset"], call["num_elements"]))
    (size,) = {count for _, count in places}
    assert [offset for offset, _ in places] == [0, size, 2 * size]
    assert size % 2**16 == 0  # whole stretches of the sum of squares


def test_what_is_not_decayed_lies_in_the_shard_that_has_it():
    whole = planned(Layout(dp=1, zero=0)).schedules["stage 0"].calls["adamw.0"].attributes
    schedule = planned(Layout(dp=3, zero=1))
    found = []
    for rank in range(3):
        call = rank_part(schedule, rank).schedule.calls["adamw.0"].attributes
        ends = call.get("undecayed", ())
        found += [call["element_offset"] + end for end in ends]
    assert tuple(found) == whole["undecayed"]


def test_shards_over_some_replicas_only_are_refused():
    with pytest.raises(LayoutError, match="ZeRO over 2 of 4 replicas"):
        planned(Layout(dp=4, zero=1, shard=2))
