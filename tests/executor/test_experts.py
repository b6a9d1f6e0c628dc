"""Experts: the same bits whatever the memory, base, adapters and ranks; and loads at the edges."""

import pytest
import torch

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import (
    SEQ_LEN,
    hf_model,
    hf_step,
    kernel_step,
    loss_scale,
    random_tokens,
    result_of,
    tiny_spec,
)
from tests.helpers.hf_weights import pack_hf_state
from tests.helpers.plans import MACHINE, enough_device_bytes, planned, recompute_levels
from tests.helpers.runs import assert_same_bits, bits_of, training
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.executor.kernels.base_codes import dequantized_group
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.lowering.lower import lower
from twinstream.models.options import Experts
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.quantized_base import QuantizedBaseError
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.workload import Workload

# The second of two layers is dense; a sigmoid router with a bias, groups and a shared expert.
DEEPSEEK = Experts(
    count=8, per_token=2, d_ff=32, shared_d_ff=32, scores="sigmoid", correction_bias=True,
    num_groups=4, groups_per_token=2, scale=1.5, dense_layers=(1,),
)  # fmt: skip
SOFTMAX = Experts(count=8, per_token=3, d_ff=32, shared_d_ff=32, shared_gate=True, aux_loss=0.1)
RECIPES = {
    "full": Recipe(),
    "clipped": Recipe(clips=True, optimizer="device_after_backward"),
    "experts frozen": Recipe(frozen=("0.experts", "1.experts")),
    "adapters": Recipe(lora=lora_of("r=2,targets=q,v,down,experts")),
    "adapters of nf4": Recipe(lora=lora_of("r=2,targets=q,experts"), base="nf4"),
}


def chain_of(workload: str, experts: Experts, recipe: Recipe, dtype: str):
    frozen = tuple(g for g in recipe.frozen if int(g[0]) not in experts.dense_layers)
    spec = small("tiny", experts=experts, dtype=dtype, d_ff=64)
    return lower(spec, WORKLOADS[workload], recipe.model_copy(update={"frozen": frozen}))


@pytest.mark.parametrize("experts", [DEEPSEEK, SOFTMAX], ids=["deepseek", "softmax"])
@pytest.mark.parametrize(
    ("recipe", "workload", "dtype"),
    [("full", "packed", "bfloat16"), ("full", "unequal", "float32"),
     ("clipped", "sliced", "float32"), ("experts frozen", "packed", "float32"),
     ("adapters", "sliced", "bfloat16"), ("adapters of nf4", "packed", "bfloat16")],
)  # fmt: skip
def test_caps_policies_and_recompute_change_no_bit(recipe, workload, dtype, experts):
    chain = chain_of(workload, experts, RECIPES[recipe], dtype)
    schedule = planned(chain, MACHINE, Caps(), "resident")
    expected = bits_of(schedule, poison=True)
    levels = set()
    for _ in range(3):
        less = Caps(device_bytes=arena_bytes(schedule, DEVICE) - 1)
        try:
            schedule = planned(chain, MACHINE, less, "resident")
        except InfeasiblePlan:  # the head takes the most
            break
        levels |= recompute_levels(schedule)
        assert_same_bits(bits_of(schedule), expected)
    assert levels
    least = enough_device_bytes(chain, "streaming")
    for policy, caps in (("streaming", least), ("optimal", least * 5 // 4)):
        assert_same_bits(
            bits_of(planned(chain, MACHINE, Caps(device_bytes=caps), policy)), expected
        )


@pytest.mark.parametrize("per_token", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_an_expert_without_tokens_has_exact_zeros_and_all_may_go_to_one(biased, per_token):
    """A router that prefers some experts whatever the token; and one that chooses all."""
    spec = tiny_spec("mixtral")
    experts = spec.experts.model_copy(update={"per_token": per_token})
    spec = spec.model_copy(update={"experts": experts})
    tokens, model = random_tokens(spec), hf_model(spec)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
            if biased:  # ties go the other way
                layer.mlp.gate.weight += 1e-3 * torch.arange(4.0)[:, None]
    flats = pack_hf_state(spec, model.state_dict())
    found = result_of(Step(spec, flats, tokens, SEQ_LEN, SEQ_LEN, loss_scale(tokens)))
    gates = [found.gradients[f"model.layers.{i}.mlp.experts.gate_up_proj"] for i in range(2)]
    used = [[bool(each.any()) for each in gate] for gate in gates]
    assert all(sum(layer) >= per_token for layer in used)
    if per_token == 4 or not biased:  # equal scores choose the same
        assert [sum(layer) for layer in used] == [per_token] * 2
    assert all(g.isfinite().all() for g in found.gradients.values())
    errors = found.errors(hf_step(model, tokens))
    if per_token == 1:  # whose one weight is 1 whatever the logits: the router has no gradient
        errors = {name: error for name, error in errors.items() if "gate.weight" not in name}
    assert max(errors.values()) <= 1e-5


def test_the_same_tokens_in_one_round_or_two_have_the_same_load_balancing_loss():
    """Loss and update, to rounding: a round's loss is a share of the step's."""
    spec = small("tiny", experts=SOFTMAX.model_copy(update={"aux_loss": 1.0}), dtype="float32")
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 256, (2, 32), generator=generator, dtype=torch.int32)
    found = []
    for chunks, rounds in ((2, 1), (1, 2)):
        workload = Workload(
            seq_len=32, chunk_tokens=32, chunks_per_round=chunks, rounds_per_step=rounds
        )
        chain = lower(spec, workload, Recipe(update="sgd", beta1=0.0, weight_decay=0.0))
        schedule = planned(chain, MACHINE, Caps(), "resident")
        loop = Training(lambda step, index: tokens, 0.1, seed=0)
        start = initial_state(spec, 1, Recipe(update="sgd", beta1=0.0, weight_decay=0.0))
        done = execute(schedule, start, loop.host_work(schedule), RunOptions(num_passes=1))
        found.append((loop.losses[0], done.state["param.0"].view(torch.float32)))
    (loss, weights), (other_loss, other) = found
    assert other_loss == pytest.approx(loss, rel=1e-6)
    before = initial_state(spec, 1, Recipe())["param.0"].view(torch.float32)
    assert (weights - before).abs().max() > 1e-3
    assert (weights - other).abs().max() <= 1e-5 * (weights - before).abs().max()


@pytest.mark.parametrize(
    "frozen", [("0",), ("0", "1.experts"), ("0.experts", "1.experts"), ("1", "1.experts")]
)
def test_what_is_frozen_alone_is_in_few_bits_and_the_rest_trains_beside_it(frozen):
    """As beside the values that its codes stand for."""
    spec = small("tiny", experts=Experts(count=8, per_token=2, d_ff=32), dtype="float32")
    coded = Recipe(frozen=frozen, base="nf4")
    whole = coded.model_copy(update={"base": "model"})
    start = initial_state(spec, 1, coded)
    same = dict(initial_state(spec, 1, whole))
    for group in frozen:
        layout = spec.group_layout(group)
        same[f"param.{group}"] = dequantized_group(
            start[f"param.{group}"], layout, torch.float32, "nf4"
        )
    found = []
    for recipe, state in ((coded, start), (whole, same)):
        chain = lower(spec, WORKLOADS["packed"], recipe)
        schedule = planned(chain, MACHINE, Caps(), "resident")
        loop = training(schedule)
        done = execute(schedule, state, loop.host_work(schedule), RunOptions(num_passes=2))
        found.append((loop.losses, done.state))
    (losses, state), (other_losses, other) = found
    assert losses == other_losses
    for group in set(spec.parameter_groups) - set(frozen):
        assert torch.equal(state[f"param.{group}"], other[f"param.{group}"]), group


def test_as_many_experts_as_olmoe_agree_with_transformers():
    """64 experts, 8 a token, norms of whole rows: most experts have a few of 96 rows."""
    spec = tiny_spec("olmoe")
    experts = spec.experts.model_copy(update={"count": 64, "per_token": 8})
    spec = spec.model_copy(update={"experts": experts})
    tokens = random_tokens(spec)
    errors = result_of(kernel_step(spec, tokens, SEQ_LEN)).errors(hf_step(hf_model(spec), tokens))
    assert max(errors.values()) <= 1e-5


def test_a_shared_expert_that_is_no_whole_number_of_blocks_is_refused():
    experts = Experts(count=8, per_token=2, d_ff=32, shared_d_ff=3)
    spec = small("tiny", experts=experts, d_ff=64, d_model=32)
    with pytest.raises(QuantizedBaseError, match="a shared expert's gate"):
        lower(spec, WORKLOADS["packed"], RECIPES["adapters of nf4"])
