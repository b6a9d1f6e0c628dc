"""Plans with fixed choices keep to them, and are no faster than the bound beside them."""

import pytest

from tests.helpers.odd_plans import OddPlan
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.planner.choices import Choices
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.verify import verify_rank

DRAWS_PER_BLOCK = 25
NUM_BLOCKS = 4


def below_their_bound(seeds: range) -> tuple[int, list[str]]:
    """How many of these plans there are, and those that are faster than they can be."""
    planned, found = 0, []
    for seed in seeds:
        case = OddPlan.of(seed)
        try:
            schedule = case.planned()
        except InfeasiblePlan:
            continue
        planned += 1
        bound = schedule.bound
        assert bound is not None and bound.family_step_s is not None
        assert bound.family_step_s <= bound.step_s
        if case.step_s(schedule) < bound.step_s:
            found.append(f"seed {seed}: {case.step_s(schedule) / bound.step_s:.4f} of it")
    return planned, found


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_plan_with_fixed_choices_on_an_odd_machine_is_faster_than_its_bound(block):
    first = block * DRAWS_PER_BLOCK
    planned, found = below_their_bound(range(first, first + DRAWS_PER_BLOCK))
    assert found == []
    assert planned > 0.8 * DRAWS_PER_BLOCK


@pytest.mark.bench
def test_no_plan_of_a_thousand_is_faster_than_its_bound():
    planned, found = below_their_bound(range(1000, 2000))
    assert found == []
    assert planned > 800


def test_parameters_at_home_on_the_host_are_loaded_for_every_stretch_of_their_uses():
    """On a link so slow that windows of loads meet: they were kept, and the bound was false."""
    link = {"pcie_h2d_bytes_per_s": 5e7, "pcie_d2h_bytes_per_s": 5e7}
    machine = override(load_machine("cpu"), link | {"pcie_duplex_bytes_per_s": 1e8})
    step = TrainingStep(seq_len=64, tokens_per_step=192, chunk_tokens=32, chunks_per_round=2)
    case = OddPlan(
        small("tiny", num_layers=2), step, machine, Caps(), Choices(homes={"parameter": "host"})
    )
    schedule = case.planned()
    assert verify_rank(schedule) == []
    roles = {t.tensor_id: t.role for t in schedule.tensors}
    roots = {t.tensor_id: t.parent or t.tensor_id for t in schedule.tensors}
    loads: dict[str, int] = {}
    uses: dict[str, list[int]] = {}
    computes = [op for op in schedule.ops if isinstance(op, Compute)]
    for position, op in enumerate(computes):
        for operand in op.operands:
            if roles[operand.tensor] == "parameter":
                uses.setdefault(roots[operand.tensor], []).append(position)
    for op in schedule.ops:
        if isinstance(op, Copy) and roles[op.tensor] == "parameter" and op.stream.queue == "h2d":
            loads[roots[op.tensor]] = loads.get(roots[op.tensor], 0) + 1
    for root, places in uses.items():
        ends = [*places[1:], places[0] + len(computes)]
        stretches = sum(b - a > 1 for a, b in zip(places, ends, strict=True))
        assert loads[root] >= stretches, root
