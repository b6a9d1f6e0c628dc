"""Tensor parallel ranks: bits of one process with as many parts, near those of whole blocks."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.executor.ranks.one_process import Reference, train_replicas
from tests.executor.ranks.trained import (
    NUM_STEPS,
    WORKLOAD,
    Case,
    numbers,
    planned_ranks,
    states,
    train_ranks,
)
from twinstream.clusters.conforms import require_conforming
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.ranks.rank_run import RankOutcome
from twinstream.executor.state.parted_state import RankStates, place_of
from twinstream.executor.state.training_state import State
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.document import Caps

MAX_NORM = 0.25
CLIPS = Recipe(kernels=KernelChoice(), clips=True)
MASTER = Recipe(
    kernels=KernelChoice(), clips=True, optimizer_state="float32_master", gradients="float32"
)
LION = Recipe(kernels=KernelChoice(), clips=True, update="lion")
ADAPTERS = Recipe(kernels=KernelChoice(), clips=True, lora=lora_of("r=4,alpha=8"))
SOME = Recipe(kernels=KernelChoice(), lora=lora_of("r=4,alpha=8,targets=q,v,down"))
NF4 = ADAPTERS.model_copy(update={"base": "nf4"})
FROZEN = Recipe(kernels=KernelChoice(), clips=True, frozen=("embedding", "0", "2", "head"))


def laid(tp: int, **fields: object) -> Layout:
    return Layout.model_validate({"zero": 0, "tp": tp, "sequence_parallel": tp == 1, **fields})


def sliced(tp: int, **fields: object) -> Layout:
    return laid(tp, **fields).with_sequence_parallel(True)


def case_of(layout: Layout, recipe: Recipe = CLIPS, **fields: object) -> Case:
    norm = MAX_NORM if recipe.clips else 0.0
    few = recipe.lora is not None  # whose gradients are small
    return replace(Case(layout, recipe, norm / 100 if few else norm, heads=8), **fields)


def trained(case: Case, processes: RankProcesses) -> tuple[list[list[float]], list[float], State]:
    """By replica its losses, the norms, and the whole model's state."""
    require_conforming(planned_ranks(case))
    outcomes = train_ranks(case, processes)
    losses = []
    for replica in range(case.layout.dp):
        of_replica = [o for o in outcomes if place_of(o.coordinates, case.layout.ep)[0] == replica]
        told = [numbers(o, "loss") for o in of_replica if numbers(o, "loss")]
        assert told
        assert all(one == told[0] for one in told)
        losses.append(told[0])
    norms = _same(outcomes, "grad_norm")
    return losses, norms, {k: v for state in states(case, outcomes) for k, v in state.items()}


def _same(outcomes: list[RankOutcome], sink: str) -> list[float]:
    told = [numbers(o, sink) for o in outcomes if numbers(o, sink)]
    assert all(one == told[0] for one in told)
    return told[0] if told else []


def in_one_process(case: Case) -> Reference:
    """The same parts on one device, kernel after kernel, by no schedule."""
    ends = 2 if case.tied else 1
    parts = Layout(parts=case.layout.num_parts, dp=case.layout.dp, zero=0, pp=ends)
    parts = parts.with_sequence_parallel(case.layout.token_slices > 1)
    return _in_one_process(replace(case, layout=parts, caps=None))


@cache
def _in_one_process(case: Case) -> Reference:
    trainings = [case.training(replica) for replica in range(case.layout.dp)]
    alone = case.layout.model_copy(update={"dp": 1, "pp": 1})
    chain = lower(case.spec, WORKLOAD, case.recipe, alone)
    rank_states = RankStates(case.spec, case.recipe, case.layout)
    state = rank_states.of_rank(case.state(), (0, 0, 0))
    found = train_replicas(chain, state, trainings, NUM_STEPS, tied_apart=case.tied)
    found.state = rank_states.whole({(0, 0, 0): found.state})
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


def test_two_ranks_of_parts_have_the_bits_of_one_process(two):
    assert_as_one_process(case_of(laid(2, parts=4)), two)


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (laid(2, parts=4), ADAPTERS),
        (laid(2, parts=2, dp=2, zero=3), SOME),
        (laid(2, parts=2), NF4),
        (laid(2, parts=2, dp=2, zero=3), NF4),
    ],
    ids=["adapters", "zero3-some", "nf4", "zero3-nf4"],
)
def test_adapters_in_parts_have_the_bits_of_one_process(two, four, layout, recipe):
    case = case_of(layout, recipe, preset="tiny-qwen3")
    assert_as_one_process(case, two if layout.num_gpus == 2 else four)


def test_slices_of_tokens_have_the_bits_of_one_process(two):
    """Float32, in which the order of a sum is seen; the grid has bfloat16."""
    case = case_of(sliced(2, parts=4), preset="tiny-qwen3", dtype="float32")
    assert_as_one_process(case, two)


LAYOUTS = (
    laid(1, parts=4), laid(2, parts=4), laid(4, parts=4),
    laid(2, parts=4, recompute="full"), laid(2, parts=4, recompute="attention"),
    laid(2, parts=4, pp=2), laid(2, parts=4, pp=2, virtual_stages=2, pipeline="ring"),
    laid(1, parts=4, dp=2), laid(2, parts=4, dp=2),
    *(laid(2, parts=4, dp=2, zero=zero) for zero in (1, 2, 3)),
    sliced(1, parts=4), sliced(4, parts=4), sliced(2, parts=4, recompute="full"),
    sliced(2, parts=4, pp=2), sliced(2, parts=4, pp=2, virtual_stages=2, pipeline="ring"),
    *(sliced(2, parts=4, dp=2, zero=zero) for zero in (0, 3)),
)  # fmt: skip
RECIPES = {
    "model-adamw": CLIPS, "float32_master-adamw": MASTER, "model-lion": LION,
    "adapters": ADAPTERS, "some-adapters": SOME, "frozen": FROZEN,
}  # fmt: skip
CASES = [
    pytest.param(
        case_of(layout, recipe, preset=preset),
        id=f"{layout.text.replace(' ', '-')}{'-sp' * (layout.token_slices > 1)}-{preset}-{name}",
    )
    for layout in LAYOUTS
    for name, recipe in RECIPES.items()
    for preset in ("tiny", "tiny-qwen3")
]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_has_the_bits_of_one_process(one, two, four, case):
    assert_as_one_process(case, {1: one, 2: two, 4: four}[case.layout.num_gpus])


@pytest.mark.parametrize("recipe", [CLIPS, ADAPTERS], ids=["all", "adapters"])
@pytest.mark.parametrize(
    "layout",
    [laid(4, parts=4, dp=2, zero=1), laid(2, parts=4, pp=2, dp=2, zero=3)],
    ids=lambda layout: layout.text.replace(" ", "-"),
)
def test_eight_ranks_have_the_bits_of_one_process(layout, recipe):
    with RankProcesses(8, start_method="forkserver") as eight:
        assert_as_one_process(case_of(layout, recipe), eight)


@pytest.mark.parametrize(
    ("layout", "device_bytes"),
    [(laid(2, parts=4), 1_300_000), (laid(2, parts=4, dp=2, zero=3), 1_300_000)],
)
def test_parts_move_to_the_host_and_keep_their_bits(two, four, layout, device_bytes):
    case = case_of(layout, caps=Caps(device_bytes=device_bytes))
    moved = [op for op in planned_ranks(case).schedules["stage 0"].ops if op.kind == "copy"]
    assert len(moved) > 20
    assert_as_one_process(case, two if layout.num_gpus == 2 else four)


@pytest.mark.parametrize("recipe", [CLIPS, ADAPTERS], ids=["all", "adapters"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize(
    "layout",
    [laid(2), laid(4), laid(2, dp=2, zero=1), laid(2, parts=2), sliced(2), sliced(4, dp=1)],
)
def test_the_transports_sums_are_near_a_whole_block_s(two, four, layout, preset, recipe):
    case = case_of(layout, recipe, preset=preset, dtype="float32")
    assert_near_whole_blocks(case, two if layout.num_gpus == 2 else four)


def assert_near_whole_blocks(case: Case, processes: RankProcesses) -> None:
    """Float32; sums of a product are split in two or four, and AdamW divides by small roots."""
    layout = case.layout
    whole = replace(case, layout=Layout(dp=layout.dp, zero=0))
    trainings = [case.training(replica) for replica in range(layout.dp)]
    expected = train_replicas(
        lower(case.spec, WORKLOAD, case.recipe), whole.state(), trainings, NUM_STEPS
    )
    losses, norms, state = trained(case, processes)
    for told, wanted in zip(losses, expected.losses, strict=True):
        assert told == pytest.approx(wanted, rel=1e-6)
    assert norms == pytest.approx(expected.norms, rel=2e-6)
    for name, flat in expected.state.items():
        if name.startswith("opt."):
            one, other = (x.view(torch.float32) for x in (state[name], flat))
            assert float((one - other).norm() / other.norm()) < 3e-5, name
