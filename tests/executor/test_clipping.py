"""Clipping by the norm of all gradients: against plain torch, and the same bits by every plan."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from tests.executor.kernels.families import SEQ_LEN, hf_model, hf_step, tiny_spec
from tests.executor.kernels.families import random_tokens as sequences_of
from tests.executor.test_same_bits import other_plans, recomputing_resident_plans
from tests.helpers.hf_weights import pack_hf_state, unpack_hf_state
from tests.helpers.parts import cut_into_thirds
from tests.helpers.plans import MACHINE, planned
from tests.helpers.runs import training
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import State, initial_state
from twinstream.models.lowering.declarations import optimizer_parts
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import ChoiceError
from twinstream.planner.planner import Planner
from twinstream.planner.proof import proven, step_bound
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Compute
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import steady_state

CLIPPED = Recipe(clips=True)
MODELS = [("tiny", "float32"), ("tiny", "bfloat16"), ("tiny-qwen3", "float32")]
WORKLOADS = ["packed", "sliced"]
MAX_NORM = 0.5  # below the norms of the first steps, above none of the tiny models' later ones


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    state: State


def outcome_of(
    schedule: RankSchedule,
    max_norm: float = MAX_NORM,
    *,
    poison: bool = False,
    start: State | None = None,
) -> Outcome:
    spec = ModelSpec.model_validate(schedule.model.spec)
    loop = replace(training(schedule), max_norm=max_norm, losses=[], norms=[])
    start = start or initial_state(spec, seed=1, recipe=Recipe.model_validate(schedule.recipe))
    options = RunOptions(num_passes=3, poison=poison)
    execution = execute(schedule, start, loop.host_work(schedule), options)
    return Outcome(loop.losses, loop.norms, execution.state)


def assert_same(found: Outcome, expected: Outcome, only: str = "") -> None:
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    for name, flat in expected.state.items():
        assert not name.startswith(only) or torch.equal(found.state[name], flat), name


@cache
def resident(workload: str, preset: str, dtype: str) -> tuple[Chain, Outcome]:
    chain = tiny_chain(workload, preset, CLIPPED, dtype=dtype)
    return chain, outcome_of(planned(chain, MACHINE, Caps(), "resident"))


# --- against torch


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_norm", [0.25, 1e9])
def test_three_steps_are_those_of_torch(family, max_norm):
    """Losses, norms, the last clipped gradients (m, with beta1 = 0) and weights, to 1e-5.

    A larger eps than usual: with 1e-8 an element's first update is the sign of its gradient, which
    of a gradient that is zero but for rounding may be either. Dead bytes are filled with NaN, which
    would be in the norm if padding were garbage.
    """
    spec, rate = tiny_spec(family), 0.01
    recipe = Recipe(beta1=0.0, eps=1e-3, weight_decay=0.1, clips=True)
    steps = [sequences_of(spec, seed) for seed in (1, 2, 3)]
    expected = torch_steps(spec, steps, recipe, rate, max_norm)
    work = Workload(seq_len=SEQ_LEN, chunk_tokens=SEQ_LEN, chunks_per_round=2, rounds_per_step=2)
    schedule = planned(lower(spec, work, recipe), MACHINE, Caps(), "streaming")
    chunks = [step.to(torch.int32).split(SEQ_LEN, dim=1) for step in steps]
    loop = Training(
        lambda step, index: chunks[step - 1][index].contiguous(), rate, seed=0, max_norm=max_norm,
        num_targets=lambda step: int((steps[step - 1][1] >= 0).sum()),
    )  # fmt: skip
    start = initial_state(spec, 0, recipe) | {
        f"param.{name.removeprefix('layer.')}": flat
        for name, flat in pack_hf_state(spec, hf_model(spec).state_dict()).items()
    }
    options = RunOptions(num_passes=len(steps), poison=True)
    state = execute(schedule, start, loop.host_work(schedule), options).state
    assert loop.losses == pytest.approx(expected.losses, rel=1e-5)
    assert loop.norms == pytest.approx(expected.norms, rel=1e-5)
    assert (min(loop.norms) > max_norm) == (max_norm == 0.25), "it clips, or it does not"
    for kind, wanted in (("param", expected.weights), ("m", expected.gradients)):
        for name, value in unpack_hf_state(spec, flats_of(spec, state, kind)).items():
            error = (value - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error <= 1e-5, (kind, name)


@dataclass(frozen=True)
class TorchSteps:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def torch_steps(
    spec: ModelSpec, steps: list[torch.Tensor], recipe: Recipe, rate: float, max_norm: float
) -> TorchSteps:
    model = hf_model(spec)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps,
    )  # fmt: skip
    losses, norms = [], []
    for tokens in steps:
        losses.append(hf_step(model, tokens).loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    named = dict(model.named_parameters())
    return TorchSteps(
        losses,
        norms,
        {name: p.detach() for name, p in named.items()},
        {name: p.grad for name, p in named.items()},
    )


def flats_of(spec: ModelSpec, state: State, kind: str) -> dict[str, torch.Tensor]:
    """Parameters, or the first moments out of each part's m and v, by name."""
    found = {}
    for group in ("embedding", *map(str, range(spec.num_layers)), "head"):
        name = f"layer.{group}" if group.isdigit() else group
        if kind == "param":
            found[name] = state[f"param.{group}"]
            continue
        flat = state[f"opt.{group}"].view(torch.float32)
        parts = optimizer_parts(spec, group)
        m = [flat[2 * part.element_offset :][: part.num_elements] for part in parts]
        found[name] = torch.cat(m).view(torch.uint8)
    return found


# --- the same bits


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("preset", "dtype"), MODELS)
def test_no_policy_no_cap_and_no_recompute_changes_a_bit(workload, preset, dtype):
    chain, expected = resident(workload, preset, dtype)
    assert min(expected.norms) > MAX_NORM
    for schedule in recomputing_resident_plans(chain):
        assert_same(outcome_of(schedule), expected)
    for schedule in other_plans(chain):
        assert_same(outcome_of(schedule, poison=True), expected)


@pytest.mark.parametrize("max_norm", [0.0, 1e30, float("inf")])
@pytest.mark.parametrize(("preset", "dtype"), MODELS)
def test_a_huge_norm_and_none_give_the_bits_of_no_clipping(preset, dtype, max_norm):
    chain, clipped = resident("packed", preset, dtype)
    after = Recipe(optimizer="device_after_backward")
    plain = planned(tiny_chain("packed", preset, after, dtype=dtype), MACHINE, Caps(), "resident")
    expected = outcome_of(plain, max_norm=0.0)
    found = outcome_of(planned(chain, MACHINE, Caps(), "resident"), max_norm)
    assert expected.norms == []
    assert found.norms[0] == clipped.norms[0]
    assert_same(replace(found, norms=[]), expected)
    assert clipped.losses[2] != expected.losses[2]


def test_the_number_of_parts_changes_no_bit(monkeypatch):
    expected = resident("packed", "tiny", "bfloat16")[1]
    cut_into_thirds(monkeypatch)
    others = tiny_chain("packed", "tiny", CLIPPED, dtype="bfloat16")
    updates = [t for t in others.tasks if t.label.kind == "optimizer_step"]
    assert len(updates) == 3 * 4  # embedding, two layers, head
    found = outcome_of(planned(others, MACHINE, Caps(), "streaming"))
    assert_same(found, expected, only="param")  # m and v lie elsewhere


# --- what is planned and told


@pytest.mark.parametrize("policy", ["resident", "streaming", "full_recompute", "optimal"])
def test_plans_are_proven_and_never_faster_than_their_bound(policy):
    chain = resident("packed", "tiny", "float32")[0]
    schedule = planned(chain, MACHINE, Caps(), policy)
    proven(schedule, chain, bound := step_bound(chain, MACHINE, Caps()))
    assert steady_state(schedule, MACHINE).step_ns >= bound.step_s * 1e9
    kinds = [op.label.kind for op in schedule.ops if isinstance(op, Compute)]
    assert kinds.index("optimizer_step") > kinds.index("gradient_norm")


def request_for(policy: str) -> PlanRequest:
    step = TrainingStep(seq_len=16, tokens_per_step=64, recipe=CLIPPED)
    return PlanRequest(small("tiny"), step, MACHINE, Caps(), policy)


@pytest.mark.parametrize("policy", ["streaming", "resident"])
def test_a_step_that_clips_is_planned_with_all_updates_after_backward(policy):
    recipe = Planner(steady_state).prepared(request_for(policy)).recipe
    assert recipe.optimizer == "device_after_backward"
    assert recipe.clips


@pytest.mark.parametrize("policy", ["optimizer_offload", "layer_offload"])
def test_a_policy_with_the_optimizer_on_the_host_refuses_to_clip(policy):
    with pytest.raises(ChoiceError, match=f"policy '{policy}'.*cannot clip gradients"):
        Planner(steady_state).plan(request_for(policy))


def test_a_largest_norm_for_a_schedule_that_does_not_clip_is_refused():
    schedule = planned(tiny_chain("one chunk"), MACHINE, Caps(), "resident")
    with pytest.raises(TwinstreamError, match=r"at most 0\.5, but the schedule does not clip"):
        outcome_of(schedule)


def test_a_gradient_that_is_no_number_shows_in_the_norm_and_spoils_everything_as_in_torch():
    chain = resident("one chunk", "tiny", "float32")[0]
    start = initial_state(small("tiny"), seed=1, recipe=CLIPPED)
    start["param.head"].view(torch.float32)[0] = float("nan")
    found = outcome_of(planned(chain, MACHINE, Caps(), "resident"), start=start)
    assert all(norm != norm for norm in found.norms)
    layer = found.state["param.0"].view(torch.float32)
    assert layer.isnan().all()
