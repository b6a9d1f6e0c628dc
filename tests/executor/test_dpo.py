"""DPO: gradients of whole models beside autograd, the same bits under any cap, evaluations."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import (
    LossAndGradients,
    hf_model,
    random_tokens,
    result_of,
    tiny_spec,
)
from tests.helpers.hf_weights import pack_hf_state
from tests.helpers.plans import MACHINE, enough_device_bytes, planned, recompute_levels
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.executor.memory.arenas import Arenas
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.evaluation import EvaluationBatch, pass_losses
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import fill_carried, initial_state
from twinstream.models.adapters.lora import lora_of
from twinstream.models.loss import Dpo, LossOptionsError, loss_of
from twinstream.models.lowering.lower import lower
from twinstream.models.options import Experts
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Fetch
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.simulator.replay import steady_state

LENGTHS = (10, 14, 13, 9, 2)  # of a chunk: two pairs, and padding
PAIRS, CHUNKS = 2, 2
TRAINED = Recipe(loss=Dpo(beta=0.2))
SOFTMAX = Experts(count=4, per_token=2, d_ff=32, aux_loss=0.1)


def pairs_of(spec) -> torch.Tensor:
    """Ids and labels of two chunks, [2, tokens]; answers begin after three tokens."""
    tokens = random_tokens(spec, num_sequences=CHUNKS * sum(LENGTHS) // 24)
    ends = np.cumsum(CHUNKS * LENGTHS)
    for end, length in zip(ends, CHUNKS * LENGTHS, strict=True):
        tokens[1, end - length : end - 1] = tokens[0, end - length + 1 : end]
        tokens[1, end - 1] = tokens[1, end - length : end - length + 2] = -100
        if length == LENGTHS[-1]:
            tokens[1, end - length : end] = -100
    return tokens


def log_probs_of(model, tokens: torch.Tensor) -> torch.Tensor:
    """[chunks, pairs, 2]: of each sequence by itself, as it would be generated."""
    found = []
    for chunk in tokens.split(sum(LENGTHS), dim=1):
        for ids, labels in zip(*(part.split(LENGTHS)[:-1] for part in chunk), strict=True):
            logits = model(input_ids=ids[None]).logits[0].double()
            rows = torch.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            found.append(torch.where(labels >= 0, rows, 0).sum())
    return torch.stack(found).view(CHUNKS, PAIRS, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_of_models_are_autograds(family, label_smoothing):
    """Of transformers' own module, sequence by sequence, in float64 from the logits on."""
    spec = tiny_spec(family)
    tokens, model = pairs_of(spec), hf_model(spec)
    found = log_probs_of(model, tokens)
    noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    reference = (found.detach() + noise).float()
    gains = found - reference
    margins = 0.2 * (gains[..., 0] - gains[..., 1])
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    losses.mean().backward()
    expected = LossAndGradients(
        losses.mean().item(), {name: p.grad.clone() for name, p in model.named_parameters()}
    )
    step = Step(
        spec, pack_hf_state(spec, model.state_dict()), tokens, sum(LENGTHS), 24,
        1 / (CHUNKS * PAIRS), lengths=LENGTHS, dpo=Dpo(beta=0.2, label_smoothing=label_smoothing),
        reference=reference.transpose(1, 2),
    )  # fmt: skip
    errors = result_of(step).errors(expected)
    assert errors["loss"] <= 1e-6
    assert max(errors.values()) <= 2e-6
    for chunk in range(CHUNKS):
        mine = step.buffers[f"log_probs.{chunk}"].view(torch.float32)[: 2 * PAIRS]
        assert torch.allclose(mine.double(), found[chunk].flatten(), rtol=1e-6)


def training_of(schedule) -> Training:
    """Pairs of a few tokens, others in each chunk of each step; a reference that is made up."""
    work = schedule.workload
    each = work.chunks_per_round * work.rounds_per_step

    def tokens(step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * each + index)
        found = torch.randint(0, 256, (2, work.chunk_tokens), generator=generator)
        found[1, ::3] = -100
        return found.to(torch.int32)

    def reference(step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * each + index)
        return torch.rand(2, 1 + index % 2, generator=generator) - 30

    return Training(
        tokens,
        1e-2,
        seed=3,
        reference=reference,
        lengths=lambda step, index: (5, 6, 8, 7, 3),
        num_targets=lambda step: each * 3 // 2,
    )


def trained(schedule, **options):
    spec, recipe = (
        ModelSpec.model_validate(schedule.model.spec),
        Recipe.model_validate(schedule.recipe),
    )
    loop = training_of(schedule)
    execution = execute(
        schedule, initial_state(spec, seed=1, recipe=recipe), loop.host_work(schedule),
        RunOptions(num_passes=3, **options),
    )  # fmt: skip
    return loop, execution.state


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (TRAINED, {"dtype": "bfloat16"}),
        (TRAINED.model_copy(update={"clips": True, "optimizer": "device_after_backward"}), {}),
        (TRAINED.model_copy(update={"lora": lora_of("r=2")}), {}),
        (TRAINED, {"experts": SOFTMAX, "tied_embeddings": True}),
    ],
    ids=["full", "clipped", "adapters", "experts"],
)
def test_caps_and_policies_change_no_bit(recipe, changes):
    chain = lower(small("tiny", **{"dtype": "float32"} | changes), WORKLOADS["unequal"], recipe)
    schedule = planned(chain, MACHINE, Caps(), "resident")
    loop, state = trained(schedule, poison=True)
    assert len(set(loop.losses)) == 3
    assert sorted(loop.log_probs) == ["log_probs.0", "log_probs.1"]
    assert all(len(values) == 3 * 2 for values in loop.log_probs.values())
    least = enough_device_bytes(chain, "streaming")
    levels = set()
    for policy, caps in (
        ("resident", arena_bytes(schedule, DEVICE) - 1), ("streaming", least),
        ("optimal", least * 5 // 4),
    ):  # fmt: skip
        try:
            other = planned(chain, MACHINE, Caps(device_bytes=caps), policy)
        except InfeasiblePlan:  # the head takes the most
            assert policy == "resident"
            continue
        levels |= recompute_levels(other)
        found, its_state = trained(other)
        assert found.losses == loop.losses
        for sink, values in loop.log_probs.items():
            assert all(map(np.array_equal, found.log_probs[sink], values))
        assert all(torch.equal(its_state[name], flat) for name, flat in state.items())


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_an_evaluation_has_the_loss_and_log_probabilities_of_the_step(policy):
    chain = lower(small("tiny", dtype="float32"), WORKLOADS["unequal"], TRAINED)
    least = enough_device_bytes(chain, policy) if policy == "streaming" else None
    schedule = planned(chain, MACHINE, Caps(device_bytes=least), policy)
    loop = training_of(schedule)
    state = initial_state(small("tiny", dtype="float32"), seed=1, recipe=TRAINED)
    one_round = schedule.workload.model_copy(update={"rounds_per_step": 1})
    step = planned(
        lower(small("tiny", dtype="float32"), one_round, TRAINED), MACHINE, Caps(), "resident"
    )
    expected = training_of(step)
    execute(step, state, expected.host_work(step), RunOptions(num_passes=1))

    memory = {
        t: torch.full((n,), 0xFF, dtype=torch.uint8) for t, n in Arenas.sizes(schedule).items()
    }
    fill_carried(schedule, Arenas(schedule, memory), state)
    loop = training_of(step)
    batch = EvaluationBatch(
        [loop.tokens(1, i) for i in range(2)], 3, [(5, 6, 8, 7, 3)] * 2,
        [loop.reference(1, i) for i in range(2)],
    )  # fmt: skip
    (found,) = pass_losses(evaluation_of(schedule), memory, [batch], RunOptions())
    assert [found.loss] == expected.losses
    assert len(found.log_probs) == 2
    for index, values in enumerate(found.log_probs):
        assert np.array_equal(values, expected.log_probs[f"log_probs.{index}"][0])


def test_a_plan_of_many_rounds_hands_out_those_of_each():
    """Its rounds are planned few and repeated."""
    recipe = Recipe(loss=Dpo(), kernels=KernelChoice(), lora=lora_of("r=2"))
    step = TrainingStep(16, 32 * 24, 32, 1, recipe=recipe)
    request = PlanRequest.of(
        small("tiny", dtype="float32"), MACHINE, step=step, device_mem=None, host_mem=None
    )
    schedule = Planner(steady_state).plan(request).only
    assert schedule.workload.rounds_per_step == 24
    fetched = [op.sink for op in schedule.ops if isinstance(op, Fetch)]
    assert Counter(fetched)["log_probs.0"] == 24
    loop = training_of(schedule)
    loop.lengths = loop.num_targets = None
    loop.reference = None
    state = initial_state(small("tiny", dtype="float32"), seed=1, recipe=recipe)
    execute(schedule, state, loop.host_work(schedule), RunOptions(num_passes=2))
    assert len(loop.log_probs["log_probs.0"]) == 48


def test_a_chunk_without_room_for_a_pair_and_a_wrong_reference_are_refused():
    with pytest.raises(TwinstreamError, match="a chunk of 32 tokens has no room for two"):
        lower(small("tiny"), WORKLOADS["packed"], TRAINED)
    chain = lower(small("tiny"), WORKLOADS["unequal"], TRAINED)
    schedule = planned(chain, MACHINE, Caps(), "resident")
    loop = training_of(schedule)
    loop.reference = lambda step, index: torch.zeros(2, 4)
    state = initial_state(small("tiny"), seed=1, recipe=TRAINED)
    with pytest.raises(TwinstreamError, match="of 3 pairs at most"):
        execute(schedule, state, loop.host_work(schedule), RunOptions(num_passes=1))


def test_options_are_read():
    assert loss_of("dpo") == Dpo()
    assert loss_of("dpo, beta=0.5,label_smoothing=0.1") == Dpo(beta=0.5, label_smoothing=0.1)
    for text in ("dpo,beta=0", "dpo,beta=x", "dpo,gamma=1", "dpo,beta=1,beta=1", "dpo,beta",
                 "dpo,label_smoothing=0.5"):  # fmt: skip
        with pytest.raises(LossOptionsError, match="--loss"):
            loss_of(text)
