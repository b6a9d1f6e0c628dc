"""LoRA and frozen groups: against plain autograd, and what must not change."""

import pytest
import torch

from tests.executor.kernels.families import hf_model, tiny_spec
from tests.helpers.adapters import (
    adapter_views,
    add_adapters,
    freeze,
    state_of,
    torch_losses,
)
from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.plans import MACHINE, enough_device_bytes, planned, recompute_levels
from tests.helpers.runs import assert_same_bits, bits_of
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.decoders.hf_weights import hf_weights_of
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering.lower import lower
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import Copy
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.schedule.workload import Workload

STEPS, RATE, SEQ_LEN, SEQUENCES = 5, 1e-2, 12, 4
ALL = "r=4,alpha=8"
SOME = "r=3,alpha=9,targets=q,v,up,down"


def tokens_of(spec: ModelSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, 2, SEQUENCES, SEQ_LEN)
    return torch.randint(0, spec.vocab_size, shape, generator=generator, dtype=torch.int32)


def trained(spec: ModelSpec, recipe: Recipe, state: dict, chunk_tokens: int):
    """Losses and the state after five steps of two rounds, or of a sequence a round in slices."""
    tokens = tokens_of(spec).flatten(2)
    per_sequence = max(1, SEQ_LEN // chunk_tokens)
    chunks = SEQ_LEN * SEQUENCES // chunk_tokens
    workload = Workload(
        seq_len=SEQ_LEN, chunk_tokens=chunk_tokens, chunks_per_round=per_sequence,
        rounds_per_step=chunks // per_sequence,
    )  # fmt: skip
    schedule = planned(lower(spec, workload, recipe), MACHINE, Caps(), "resident")
    run = Training(
        lambda step, index: tokens[step - 1][
            :, index * chunk_tokens : (index + 1) * chunk_tokens
        ].contiguous(),
        RATE, seed=0,
    )  # fmt: skip
    options = RunOptions(num_passes=STEPS, poison=True)
    return run.losses, execute(schedule, state, run.host_work(schedule), options).state


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """After steps of about 1e-2 each; where a gradient is nearly zero AdamW's are arbitrary."""
    assert (found - expected).abs().mean() <= 1e-5, name


@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 2])
@pytest.mark.parametrize(
    ("family", "options"), [("llama", ALL), ("qwen2", SOME), ("qwen3", ALL), ("qwen3", SOME)]
)
def test_adapters_train_as_autograd_says(family, options, chunk_tokens):
    spec, recipe = tiny_spec(family), Recipe(lora=lora_of(options))
    model = hf_model(spec)
    state = state_of(spec, model, recipe)
    losses, after = trained(spec, recipe, state, chunk_tokens)
    adapters = add_adapters(model, spec, recipe.lora, state)
    assert losses == pytest.approx(torch_losses(model, tokens_of(spec), recipe, RATE), abs=1e-5)
    for name, view in adapter_views(spec, recipe.lora, after).items():
        assert_close(view, adapters[name], name)


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens,lm_head", "embed_tokens"])
def test_what_is_saved_trains_beside_adapters_as_autograd_says(saved):
    """The norm before the head stays."""
    spec, lora = tiny_spec("llama"), lora_of(f"{SOME},rslora,save={saved}")
    recipe, model = Recipe(lora=lora), hf_model(spec)
    state = state_of(spec, model, recipe)
    losses, after = trained(spec, recipe, state, SEQ_LEN)
    adapters = add_adapters(model, spec, lora, state)
    modules = {"lm_head": model.lm_head, "embed_tokens": model.model.embed_tokens}
    for name in lora.saved:
        modules[name].requires_grad_(requires_grad=True)
    assert losses == pytest.approx(torch_losses(model, tokens_of(spec), recipe, RATE), abs=1e-5)
    for name, view in adapter_views(spec, lora, after).items():
        expected = adapters.get(name)
        module = modules.get(name.split(".")[-2])
        assert_close(view, expected if module is None else module.weight, name)
    for weight in hf_weights_of(spec, "head"):
        before, now = (
            each["param.head"][weight.offset_bytes : weight.end_bytes] for each in (state, after)
        )
        is_trained = weight.name == "lm_head.weight" and "lm_head" in lora.saved
        assert torch.equal(before, now) != is_trained


@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 2])
@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("qwen2", ("embedding", "0")),
        ("qwen3", ("0", "head")),
        ("qwen3", ("embedding", "1")),
        ("llama", ("embedding", "0", "1")),
        ("llama", ("head",)),
    ],
)
def test_the_rest_of_a_frozen_model_trains_as_autograd_says(family, frozen, chunk_tokens):
    spec, recipe = tiny_spec(family), Recipe(frozen=frozen)
    model = hf_model(spec)
    state = state_of(spec, model, recipe)
    losses, after = trained(spec, recipe, state, chunk_tokens)
    freeze(model, spec, frozen)
    assert losses == pytest.approx(torch_losses(model, tokens_of(spec), recipe, RATE), abs=1e-5)
    parameters = dict(model.named_parameters())
    for group in ("embedding", "0", "1", "head"):
        assert torch.equal(after[f"param.{group}"], state[f"param.{group}"]) == (group in frozen)
        for weight in hf_weights_of(spec, group):
            flat = after[f"param.{group}"][weight.offset_bytes : weight.end_bytes]
            found = flat.view(torch.float32).view(weight.shape)
            assert_close(found, parameters[weight.name], weight.name)


RECIPES = {
    "rounded stochastically": Recipe(lora=lora_of(ALL)),
    "float32": Recipe(lora=lora_of(SOME), gradients="float32", optimizer_state="float32_master"),
    "8bit, clipped": Recipe(lora=lora_of(ALL), optimizer_state="8bit", clips=True),
    "frozen": Recipe(frozen=("embedding", "0")),
}


@pytest.mark.parametrize(
    ("name", "workload"),
    list(zip(RECIPES, ("sliced", "unequal", "sliced", "unequal"), strict=True)),
)
def test_caps_and_recompute_change_no_bit_and_the_base_stays(name, workload):
    recipe = RECIPES[name]
    chain = tiny_chain(workload, "tiny", recipe, dtype="bfloat16")
    resident = planned(chain, MACHINE, Caps(), "resident")
    expected = bits_of(resident, 2, poison=True)
    fewer = Caps(device_bytes=arena_bytes(resident, DEVICE) - 1)
    least = Caps(device_bytes=enough_device_bytes(chain, "streaming"))
    for level, machine, caps, policy in (
        ("ATTENTION", MACHINE, fewer, "resident"),
        ("INPUT", slow_link_machine(), least, "streaming"),
    ):
        plan = planned(chain, machine, caps, policy)
        assert recompute_levels(plan) == {level}
        assert_same_bits(bits_of(plan, 2, poison=True), expected)
    start = initial_state(small("tiny", dtype="bfloat16"), seed=1, recipe=recipe)
    assert expected.state.keys() == start.keys()
    for group in ("embedding", "0", "1", "head"):
        stays = torch.equal(expected.state[f"param.{group}"], start[f"param.{group}"])
        assert stays == recipe.freezes(group)
        assert (f"opt.{group}" in start) != recipe.freezes(group)


@pytest.mark.parametrize("policy", ["streaming", "optimal"])
def test_a_frozen_base_is_never_written_back(policy):
    chain = tiny_chain("packed", "tiny", RECIPES["rounded stochastically"])
    cap = Caps(device_bytes=enough_device_bytes(chain, "streaming") * 5 // 4)
    copies = [op for op in planned(chain, MACHINE, cap, policy).ops if isinstance(op, Copy)]
    base = {
        op.tensor for op in copies if op.tensor.startswith("param.") and "lora" not in op.tensor
    }
    assert base, "the base is streamed"
    assert not [op for op in copies if op.tensor in base and op.stream.queue == "d2h"]


def test_fresh_adapters_leave_the_model_as_it_is():
    spec, recipe = small("tiny", dtype="float32"), Recipe(lora=lora_of(ALL))
    with_adapters = bits_of(
        planned(tiny_chain("packed", dtype="float32"), MACHINE, Caps(), "resident")
    )
    chain = tiny_chain("packed", recipe=recipe, dtype="float32")
    without = bits_of(planned(chain, MACHINE, Caps(), "resident"))
    assert with_adapters.losses[0] == pytest.approx(without.losses[0], rel=1e-6)
    views = adapter_views(spec, recipe.lora, initial_state(spec, 1, recipe))
    for name, view in views.items():
        if "lora_B" in name:
            assert not view.any()
        else:
            bound = view.shape[1] ** -0.5
            assert 0.9 * bound < view.abs().max() <= bound, name
