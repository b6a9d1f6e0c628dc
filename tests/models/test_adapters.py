"""Options of LoRA and freezing, where adapters lie, and what of a step they leave out."""

from itertools import pairwise

import pytest
from pydantic import ValidationError

from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.providers.trained import (
    FreezeError,
    NothingToTrainError,
    first_backward_layer,
    frozen_groups,
    trained_groups,
    trained_of,
)
from twinstream.models.recipes.adapter_layout import adapter_layout, adapter_sites
from twinstream.models.recipes.lora import LINEAR, Lora, LoraError, lora_of, lora_of_attributes
from twinstream.models.recipes.peft_weights import peft_weights
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.chain import Chain

SPEC = small("tiny")  # two layers
LORA = lora_of("r=4")


def test_what_is_left_out_has_defaults():
    assert lora_of("r=8") == Lora(rank=8, alpha=16.0, targets=LINEAR)
    assert lora_of("alpha=4") == Lora(rank=16, alpha=4.0)
    assert lora_of("targets=down,q, v,alpha=1,r=2") == Lora(
        rank=2, alpha=1.0, targets=("q", "v", "down")
    )
    assert lora_of("r=16,alpha=8").scale == 0.5
    assert lora_of("r=16,rslora,alpha=8").scale == lora_of("rslora=true,alpha=8").scale == 2
    saving = lora_of("r=4,save=lm_head,embed_tokens,targets=q,rslora")
    assert (saving.saved, saving.targets) == (("embed_tokens", "lm_head"), ("q",))
    assert lora_of(saving.text) == saving


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "write it as r=16"), ("16", "has no name"), ("r=0", "rank"), ("r=1.5", "rank"),
        ("r=x", "is no number"), ("alpha=-1", "alpha"), ("alpha=inf", "no number"),
        ("targets=q,z", "no target 'z'"), ("r=2,r=3", "twice"), ("rank=3", "is no option"),
        ("targets=", "no target ''"), ("r=", "is no number"), ("rslora=2", "neither true nor"),
        ("rslora,rslora", "twice"), ("save=norm", "saved"), ("dropout=1", "have no dropout"),
        ("dropout=0.1", "have no dropout: with it a model runs by its own code"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told(text, told):
    with pytest.raises(LoraError, match=told):
        lora_of(text)


def test_a_recipe_tells_of_adapters_only_where_there_are_some():
    assert {"lora", "frozen"}.isdisjoint(Recipe().model_dump())
    recipe = Recipe(lora=LORA)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    frozen = Recipe(frozen=("head", "10", "2"))
    assert Recipe.model_validate(frozen.model_dump(mode="json")) == frozen
    assert frozen.frozen == ("10", "2", "head")
    assert lora_of_attributes(LORA.attributes) == LORA
    stable = lora_of("r=4,rslora")
    assert lora_of_attributes(stable.attributes) == stable
    with pytest.raises(ValidationError, match="base is frozen"):
        Recipe(lora=LORA, frozen=("head",))


def test_every_matrix_of_an_adapter_lies_by_itself_and_covers_the_layout():
    spec = load_preset("8b")
    lora = lora_of("r=16")
    weights = [weight for weight in peft_weights(spec, lora) if weight.group == "lora.3"]
    assert len(weights) == 14
    assert sum(w.shape[0] * w.shape[1] for w in weights) == sum(
        site.num_parameters for site in adapter_sites(spec, lora)
    )
    ordered = sorted(weights, key=lambda weight: weight.offset_bytes)
    assert all(a.end_bytes <= b.offset_bytes for a, b in pairwise(ordered))
    assert ordered[-1].end_bytes <= adapter_layout(spec, lora).size_bytes
    # r (in + out) of q, k, v, o, gate, up and down of Llama-3 8B
    expected = 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert sum(w.size_bytes for w in weights) == 2 * expected


def test_patterns_freeze_whole_groups():
    layers = frozen_groups(SPEC, ["model.layers.*"])
    assert layers == ("0", "1")
    assert frozen_groups(SPEC, ["lm_head.*", "model.norm.weight"]) == ("head",)
    halves = ["model.layers.0.self_attn.*", "model.layers.0.mlp.*", "model.layers.0.*norm*"]
    assert frozen_groups(SPEC, halves) == ("0",)
    assert frozen_groups(SPEC, []) == ()


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["*.q_proj.*"], "layer 0 only in part: it leaves out .*k_proj"),
        (["lm_head.*"], r"the head only in part.*model\.norm\.\*"),
        (["model.layers.9.*"], "matches no weight"),
    ],
)
def test_parts_of_a_group_are_not_frozen(patterns, told):
    with pytest.raises(FreezeError, match=told):
        frozen_groups(SPEC, patterns)


def test_something_must_be_left_to_train():
    with pytest.raises(NothingToTrainError, match="nothing is left to train"):
        trained_of(SPEC, None, ["*"])
    with pytest.raises(FreezeError, match="leave out --freeze"):
        trained_of(SPEC, "r=2", ["model.norm.*"])
    with pytest.raises(NothingToTrainError, match="no group '7'"):
        lower(SPEC, WORKLOADS["packed"], Recipe(frozen=("7",)))


def roles(chain: Chain, role: str) -> set[str]:
    return {t.tensor_id for t in chain.tensors if t.role == role and t.parent is None}


@pytest.mark.parametrize("optimizer", ["device", "device_after_backward", "host_after_backward"])
def test_only_adapters_have_gradients_and_an_optimizer(optimizer):
    chain = lower(SPEC, WORKLOADS["packed"], Recipe(lora=LORA, optimizer=optimizer))
    assert roles(chain, "optimizer_state") == {"opt.lora.0", "opt.lora.1"}
    assert {"grad.lora.0", "grad.lora.1"} == {
        name for name in roles(chain, "gradient") if not name.startswith("round_grad")
    }
    made = {
        o.tensor for task in chain.tasks for o in task.operands if o.mode in ("write", "update")
    }
    assert {name for name in made if name.startswith("param.")} == {"param.lora.0", "param.lora.1"}
    assert set(chain.persistent) > {"param.embedding", "param.0", "param.head", "opt.lora.1"}
    updated = [t.task_id for t in chain.tasks if t.label.kind == "optimizer_step"]
    in_order = ["optimizer.lora.0", "optimizer.lora.1"]
    assert updated == (in_order if "after" in optimizer else in_order[::-1])


@pytest.mark.parametrize(
    ("frozen", "first", "kinds"),
    [
        (("embedding",), 0, {"block_backward": 2}),
        (("embedding", "0"), 1, {"block_backward": 1}),
        (("embedding", "0", "1"), 2, {}),
        (("0", "1", "head"), 0, {"block_backward": 2, "embed_backward": 1}),
    ],
)
def test_backward_ends_where_nothing_below_is_trained(frozen, first, kinds):
    recipe = Recipe(frozen=frozen)
    assert first_backward_layer(SPEC, recipe) == first
    chain = lower(SPEC, WORKLOADS["one chunk"], recipe)
    found = [task.label.kind for task in chain.tasks]
    for kind in ("block_backward", "embed_backward"):
        assert found.count(kind) == kinds.get(kind, 0)
    assert found.count("head_loss") == 1
    recomputed = {recompute.task.label.layer for recompute in chain.recomputes}
    assert recomputed == set(range(first, 2))
    trained = set(trained_groups(SPEC, recipe))
    gradients = {name.removeprefix("grad.") for name in roles(chain, "gradient")}
    assert gradients == trained


def matmul_flops(chain: Chain) -> int:
    """Of all tasks; padding, norms and attention are left out."""
    works = [work for task in chain.tasks for work in chain.calls[task.call].cost]
    return sum(work.flops for work in works if work.unit == "matmul")


@pytest.mark.parametrize("vector", ["eager", "triton"])
def test_matmuls_are_those_of_what_is_trained(vector):
    kernels = KernelChoice(vector=vector)
    workload = WORKLOADS["packed"]
    d, kv, q, f, v = SPEC.d_model, SPEC.d_kv, SPEC.d_q, SPEC.d_ff, SPEC.vocab_size
    block, head = d * (2 * q + 2 * kv + 3 * f), d * v
    adapters = 4 * (2 * (d + q) + 2 * (d + kv) + 3 * (d + f))
    # weights that a token is multiplied by, forward, for its gradient, and for theirs
    weights = {
        Recipe(kernels=kernels): 3 * (2 * block + head),
        Recipe(kernels=kernels, lora=LORA): 2 * (2 * block + head) + 3 * 2 * adapters,
        Recipe(kernels=kernels, frozen=("head",)): 3 * 2 * block + 2 * head,
        Recipe(kernels=kernels, frozen=("embedding", "0")): 4 * block + 3 * head,
        Recipe(kernels=kernels, frozen=("1", "head")): 5 * block + 2 * head,
    }
    attention = dict.fromkeys(weights, 3 * 2)
    attention[Recipe(kernels=kernels, frozen=("embedding", "0"))] = 4
    for recipe, count in weights.items():
        chain = lower(SPEC, workload, recipe)
        tokens = workload.tokens_per_step
        assert matmul_flops(chain) == 2 * tokens * count
        scores = 2 * workload.seq_len * q * tokens
        assert chain.model_flops == 2 * tokens * count + attention[recipe] * scores
