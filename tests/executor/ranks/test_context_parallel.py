"""Context parallel ranks: bits of one process with as many parts, near those of whole sequences."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.executor.ranks import test_tensor_parallel as tensor_parallel
from tests.executor.ranks.one_process import Reference, train_replicas
from tests.executor.ranks.test_tensor_parallel import (
    ADAPTERS,
    CLIPS,
    FROZEN,
    LION,
    MASTER,
    NF4,
    SOME,
    trained,
)
from tests.executor.ranks.trained import NUM_STEPS, Case, planned_ranks
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.state.parted_state import RankStates
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

EIGHT = ADAPTERS.model_copy(update={"base": "8bit"})
TWO_ROUNDS = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=2, rounds_per_step=2)


def laid(cp: int, cp_parts: int | None = 4, **fields: object) -> Layout:
    known = {"zero": 0, "cp": cp, "cp_parts": cp_parts, "sequence_parallel": "tp" not in fields}
    return Layout.model_validate({**known, **fields})


def rings(cp: int, **fields: object) -> Layout:
    return laid(cp, None, cp_exchange="ring", **fields)


def case_of(layout: Layout, recipe: Recipe = CLIPS, **fields: object) -> Case:
    return tensor_parallel.case_of(layout, recipe, **{"workload": TWO_ROUNDS, **fields})


def in_one_process(case: Case) -> Reference:
    """The same parts on one device, kernel after kernel, by no schedule."""
    layout = case.layout
    parts = Layout(
        cp_parts=layout.num_slices // 2, parts=layout.parts, dp=layout.dp, zero=0,
        pp=2 if case.tied else 1,
    )  # fmt: skip
    return _in_one_process(replace(case, layout=parts, caps=None))


@cache
def _in_one_process(case: Case) -> Reference:
    trainings = [case.training(replica) for replica in range(case.layout.dp)]
    layout = case.layout.model_copy(update={"dp": 1, "pp": 1})
    chain = lower(case.spec, case.job.workload, case.recipe, layout)
    states = RankStates(case.spec, case.recipe, case.layout)
    state = states.of_rank(case.state(), (0, 0, 0))
    found = train_replicas(chain, state, trainings, NUM_STEPS, tied_apart=case.tied)
    found.state = states.whole({(0, 0, 0): found.state})
    return found


def assert_as_one_process(case: Case, processes: RankProcesses) -> None:
    expected = in_one_process(case)
    losses, norms, state = trained(case, processes)
    assert losses == expected.losses
    assert norms == expected.norms
    assert min(norms, default=1.0) > case.max_norm
    assert state.keys() == expected.state.keys()
    for name, flat in expected.state.items():
        assert torch.equal(state[name], flat), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_ranks_of_parts_have_the_bits_of_one_process(two, dtype):
    assert_as_one_process(case_of(laid(2), dtype=dtype), two)


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (laid(2), NF4), (laid(2, cp_parts=2, dp=2, zero=3), SOME), (laid(4), ADAPTERS),
        (laid(2, cp_parts=2, tp=2, parts=2), ADAPTERS), (laid(2, cp_parts=2), FROZEN),
    ],
    ids=["nf4", "zero3-some", "four", "tp", "frozen"],
)  # fmt: skip
def test_adapters_and_frozen_layers_have_the_bits_of_one_process(two, four, layout, recipe):
    case = case_of(layout, recipe, preset="tiny-qwen3")
    assert_as_one_process(case, two if layout.num_gpus == 2 else four)


LAYOUTS = (
    laid(1), laid(2), laid(4), laid(4, cp_parts=None), laid(2, recompute="full"),
    laid(2, recompute="attention"), laid(2, pp=2),
    laid(2, pp=2, virtual_stages=2, pipeline="ring"), laid(1, dp=2), laid(2, dp=2),
    *(laid(2, dp=2, zero=zero) for zero in (1, 2, 3)), laid(4, zero=3),
    laid(2, cp_parts=2, tp=2, parts=2), laid(1, cp_parts=2, tp=2, parts=2),
)  # fmt: skip
RECIPES = {
    "model-adamw": (CLIPS, "bfloat16"), "float32_master-adamw": (MASTER, "bfloat16"),
    "model-lion": (LION, "float32"), "adapters": (ADAPTERS, "float32"),
    "some-adapters": (SOME, "bfloat16"), "nf4": (NF4, "float32"), "8bit": (EIGHT, "bfloat16"),
    "frozen": (FROZEN, "bfloat16"),
}  # fmt: skip
CASES = [
    pytest.param(
        case_of(layout, recipe, preset=preset, dtype=dtype),
        id=f"{layout.text.replace(' ', '-')}-{preset}-{name}",
    )
    for layout in LAYOUTS
    for name, (recipe, dtype) in RECIPES.items()
    for preset in ("tiny", "tiny-qwen3")
    # blocks of 8 bits lie in rows: a part of a narrow model has less than one
    if layout.num_parts == 1 or recipe.base != "8bit"
]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_has_the_bits_of_one_process(one, two, four, case):
    assert_as_one_process(case, {1: one, 2: two, 4: four}[case.layout.num_gpus])


@pytest.mark.parametrize("layout", [laid(2), laid(2, dp=2, zero=3)])
def test_parts_move_to_the_host_and_keep_their_bits(two, four, layout):
    case = case_of(layout, caps=Caps(device_bytes=2_000_000))
    moved = [op for op in planned_ranks(case).schedules["stage 0"].ops if op.kind == "copy"]
    assert len(moved) > 20
    assert_as_one_process(case, two if layout.num_gpus == 2 else four)


def test_a_ring_moves_to_the_host_and_keeps_its_bits(two):
    free = case_of(rings(2))
    tight = replace(free, caps=Caps(device_bytes=2_000_000))
    moved = [op for op in planned_ranks(tight).schedules["stage 0"].ops if op.kind == "copy"]
    assert len(moved) > 20
    (losses, norms, state), found = trained(free, two), trained(tight, two)
    assert found[:2] == (losses, norms)
    assert all(torch.equal(found[2][name], flat) for name, flat in state.items())


@pytest.mark.parametrize("recipe", [CLIPS, ADAPTERS], ids=["all", "adapters"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize(
    "layout",
    [
        laid(2, None), laid(4, None, reduction="library"), laid(2, None, dp=2, zero=1),
        rings(2), rings(4), rings(2, dp=2, zero=3), rings(2, tp=2), rings(2, pp=2),
        rings(2, recompute="full"),
    ],
    ids=lambda layout: layout.text.replace(" ", "-"),
)  # fmt: skip
def test_ranks_are_near_whole_sequences(two, four, layout, preset, recipe):
    """Float32; the loss and gradients are summed in slices, and AdamW divides by small roots."""
    case = case_of(layout, recipe, preset=preset, dtype="float32")
    whole = replace(case, layout=Layout(dp=layout.dp, zero=0))
    trainings = [whole.training(replica) for replica in range(layout.dp)]
    expected = train_replicas(
        lower(case.spec, case.workload, case.recipe), whole.state(), trainings, NUM_STEPS
    )
    losses, norms, state = trained(case, two if layout.num_gpus == 2 else four)
    for told, wanted in zip(losses, expected.losses, strict=True):
        assert told == pytest.approx(wanted, rel=1e-6)
    assert norms == pytest.approx(expected.norms, rel=2e-6)
    for name, flat in expected.state.items():
        if name.startswith("opt."):
            mine, other = (x.view(torch.float32) for x in (state[name], flat))
            assert float((mine - other).norm() / other.norm()) < 3e-5, name
