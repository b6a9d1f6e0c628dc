"""Loss and every gradient of models in parts, against transformers; and parts' scratch."""

import pytest
import torch

from tests.executor.kernels.families import (
    EXPERT_FAMILIES,
    FAMILIES,
    SEQ_LEN,
    LossAndGradients,
    hf_model,
    hf_step,
    random_tokens,
    tiny_spec,
)
from tests.executor.ranks.one_process import UPDATES, ChainMemory
from tests.helpers.hf_weights import pack_hf_state, unpack_hf_state
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.kernels.workspace import Workspace
from twinstream.executor.run.training import Training
from twinstream.executor.state.parted_state import RankStates
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.schedule.chain import COMMUNICATE, Chain
from twinstream.schedule.cluster.projecting import attributes_of_ranks
from twinstream.schedule.workload import Workload

POISON = 0xFF
RECIPE = Recipe(kernels=KernelChoice(), max_row_slice=7)
WITH_EXPERTS = [family for family in EXPERT_FAMILIES if family != "olmoe"]  # norms over all heads


def spec_of(family: str, num_parts: int = 2) -> ModelSpec:
    """Two query heads share one of keys where each part has one of these."""
    return tiny_spec(family).model_copy(update={"num_kv_heads": num_parts, "vocab_size": 96})


def chain_of(
    spec: ModelSpec, chunk_tokens: int, num_parts: int, recipe: Recipe = RECIPE,
    cp_parts: int | None = None, sliced: bool = False,
) -> Chain:  # fmt: skip
    tokens = random_tokens(spec).shape[1]
    rounds = tokens // max(chunk_tokens, SEQ_LEN)
    each = max(1, SEQ_LEN // chunk_tokens)
    workload = Workload(
        seq_len=SEQ_LEN, chunk_tokens=chunk_tokens, chunks_per_round=each, rounds_per_step=rounds
    )
    layout = Layout(parts=num_parts, cp_parts=cp_parts, sliced_norms=sliced, zero=0)
    return lower(spec, workload, recipe, layout)


def step_in_parts(
    spec: ModelSpec, chunk_tokens: int, num_parts: int, levels: tuple[str, ...] = (),
    cp_parts: int | None = None, sliced: bool = False,
) -> LossAndGradients:  # fmt: skip
    """A step of all parts in this process; what nobody has written is NaN.

    Args:
        levels: recomputes of these levels run, over what they make again.
    """
    chain, states = (
        chain_of(spec, chunk_tokens, num_parts, cp_parts=cp_parts, sliced=sliced),
        RankStates(spec, RECIPE, Layout(parts=num_parts, zero=0)),
    )
    flats = pack_hf_state(spec, hf_model(spec).state_dict())
    whole = {f"param.{name.removeprefix('layer.')}": flat for name, flat in flats.items()}
    memory = ChainMemory(chain, states.of_rank(whole, (0, 0, 0)), fill=POISON)
    tokens = random_tokens(spec)

    def chunk(step: int, index: int) -> torch.Tensor:
        return tokens[:, index * chunk_tokens : (index + 1) * chunk_tokens].int().contiguous()

    targets = int((tokens[1] >= 0).sum())
    training = Training(chunk, 1e-3, seed=5, num_targets=lambda step: targets)
    memory.feed = training.host_work(chain).feed
    memory.run(0, lambda task: task.label.kind not in UPDATES, levels)
    made = {
        name.replace("grad.", "param.", 1): flat
        for name, flat in memory.roots.items()
        if name.startswith("grad.") and ".cp" not in name
    }
    joined = states.whole({(0, 0, 0): made})
    named = {
        group if group in ("embedding", "head") else f"layer.{group}": flat
        for name, flat in joined.items()
        if (group := name.removeprefix("param."))
    }
    return LossAndGradients(memory.number("loss"), unpack_hf_state(spec, named))


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 3])
def test_float32_in_parts_agrees_with_transformers(family, num_parts, chunk_tokens):
    spec = spec_of(family, num_parts)
    found = step_in_parts(spec, chunk_tokens, num_parts)
    errors = found.errors(hf_step(hf_model(spec), random_tokens(spec)))
    assert errors["loss"] <= 1e-6
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, worst  # as of whole blocks


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
@pytest.mark.parametrize(("cp_parts", "slices"), [(1, 2), (2, 8)])
def test_float32_in_parts_of_sequences_agrees_with_transformers(family, cp_parts, slices):
    spec = spec_of(family)
    found = step_in_parts(spec, SEQ_LEN // slices, 1, cp_parts=cp_parts)
    errors = found.errors(hf_step(hf_model(spec), random_tokens(spec)))
    assert errors["loss"] <= 1e-6
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_parts", "chunk_tokens"), [(2, 2 * SEQ_LEN), (4, SEQ_LEN // 3)])
def test_slices_of_tokens_change_gradients_of_norms_alone(family, num_parts, chunk_tokens):
    spec = spec_of(family, num_parts)
    whole = step_in_parts(spec, chunk_tokens, num_parts)
    sliced = step_in_parts(spec, chunk_tokens, num_parts, sliced=True)
    assert sliced.loss == whole.loss
    others = [n for n, one in whole.gradients.items() if not torch.equal(sliced.gradients[n], one)]
    assert others and all("norm" in name for name in others)
    errors = sliced.errors(hf_step(hf_model(spec), random_tokens(spec)))
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, worst


def test_slices_of_tokens_take_the_scratch_that_is_declared(monkeypatch):
    seen = scratch_of(chain_of(spec_of("qwen3"), SEQ_LEN // 3, 2, sliced=True), monkeypatch)
    assert len(seen) == 11, seen
    assert all(most == declared for most, declared in seen.values()), seen


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora": lora_of("r=4,alpha=8")}, {"lora": lora_of("r=4,alpha=8"), "base": "nf4"}],
    ids=["all", "adapters", "nf4"],
)
def test_slices_take_the_scratch_that_is_declared(changes, monkeypatch):
    spec = load_preset("tiny") if "base" in changes else spec_of("qwen3")
    recipe = RECIPE.model_copy(update=changes)
    seen = scratch_of(chain_of(spec, SEQ_LEN // 4, 2, recipe, cp_parts=2), monkeypatch)
    # All but embed_part_forward and add_parts; the embedding of adapters is frozen.
    assert len(seen) == (12 if changes else 13), seen
    assert all(most == declared for most, declared in seen.values()), seen


@pytest.mark.parametrize("lora", [None, lora_of("r=4,alpha=8")], ids=["all", "adapters"])
def test_steps_of_a_ring_take_the_scratch_that_is_declared(lora, monkeypatch):
    workload = Workload(
        seq_len=SEQ_LEN, chunk_tokens=SEQ_LEN // 4, chunks_per_round=4, rounds_per_step=1
    )
    layout, recipe = (
        Layout(cp=2, cp_exchange="ring", zero=0),
        RECIPE.model_copy(update={"lora": lora}),
    )
    seen = scratch_of(lower(spec_of("qwen3"), workload, recipe, layout), monkeypatch)
    assert len(seen) == (16 if lora is None else 15), seen
    assert all(most == declared for most, declared in seen.values()), seen


@pytest.mark.parametrize(
    ("family", "level"),
    [("qwen3", "ATTENTION"), ("qwen3", "INPUT"), ("qwen2_moe", "EXPERTS"), ("dots1", "ATTENTION")],
)
def test_what_is_made_again_has_the_bits_that_it_had(family, level):
    spec = spec_of(family)
    kept, again = (step_in_parts(spec, 2 * SEQ_LEN, 2, levels) for levels in ((), (level,)))
    assert kept.loss == again.loss
    assert all(torch.equal(again.gradients[n], one) for n, one in kept.gradients.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 3])
@pytest.mark.parametrize("lora", [None, "r=4,alpha=8,targets=q,down"])
def test_parts_take_the_scratch_that_is_declared(family, chunk_tokens, lora, monkeypatch):
    recipe = RECIPE if lora is None else RECIPE.model_copy(update={"lora": lora_of(lora)})
    seen = scratch_of(chain_of(spec_of(family), chunk_tokens, 2, recipe), monkeypatch)
    # All but embed_part_forward and add_parts; the embedding of adapters is frozen.
    assert len(seen) == (11 if lora is None else 10), seen
    assert all(most == declared for most, declared in seen.values()), seen


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "dots1"])
@pytest.mark.parametrize("lora", [None, "r=4,alpha=8,targets=q,down,experts"])
def test_parts_with_experts_take_the_scratch_that_is_declared(family, lora, monkeypatch):
    recipe = RECIPE if lora is None else RECIPE.model_copy(update={"lora": lora_of(lora)})
    seen = scratch_of(chain_of(spec_of(family), 2 * SEQ_LEN, 2, recipe), monkeypatch)
    assert len(seen) == (12 if lora is None else 11), seen
    assert all(most == declared for most, declared in seen.values()), seen


@pytest.mark.parametrize("base", ["nf4", "8bit"])
def test_parts_of_a_base_in_few_bits_take_the_scratch_that_is_declared(base, monkeypatch):
    recipe = RECIPE.model_copy(update={"lora": lora_of("r=4,alpha=8"), "base": base})
    seen = scratch_of(chain_of(load_preset("tiny"), 2 * SEQ_LEN, 2, recipe), monkeypatch)
    assert len(seen) == 10, seen
    assert all(most == declared for most, declared in seen.values()), seen


def scratch_of(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """By kernel of parts the most that is taken, and what is declared."""
    taken: list[Workspace] = []
    make = Workspace.__init__

    def noted(self: Workspace, scratch: torch.Tensor) -> None:
        make(self, scratch)
        taken.append(self)

    monkeypatch.setattr(Workspace, "__init__", noted)
    memory, seen = ChainMemory(chain, {}), dict[str, tuple[int, int]]()
    tasks = [*chain.tasks, *(again.task for again in chain.recomputes)]
    for task in tasks:
        call = chain.calls[task.call]
        if call.kernel == COMMUNICATE:
            continue
        declared = workspace_bytes(call.kernel, call.attributes)
        if not ("part" in call.kernel and declared):
            continue
        taken.clear()
        for attributes in attributes_of_ranks(call.attributes):
            registered_kernel(call.kernel)(memory.operands_of(task), attributes)()
        most = max(one.high_water_bytes for one in taken)
        assert most <= declared, call.kernel
        seen[call.kernel] = max(seen.get(call.kernel, (0, 0)), (most, declared))
    return seen
