"""State as tensor parallel ranks have it, in parts and shards, and whole again."""

from itertools import product

import pytest
import torch

from twinstream.executor.state.parted_state import RankStates
from twinstream.executor.state.training_state import State, initial_state
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe

SIZES = {"num_kv_heads": 4, "dtype": "bfloat16", "qkv_bias": True}
MASTER = Recipe(optimizer_state="float32_master", clips=True)


def noted(recipe: Recipe, preset: str = "tiny") -> tuple[RankStates, State]:
    spec = load_preset(preset).model_copy(update=SIZES)
    state = initial_state(spec, 1, recipe)
    generator = torch.Generator().manual_seed(2)
    for name, flat in state.items():
        if name.startswith("opt."):
            state[name] = torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8)
    return RankStates(spec, recipe, Layout()), state


@pytest.mark.parametrize("recipe", [Recipe(), MASTER, Recipe(update="sgd")])
@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, zero=0), Layout(tp=4, zero=0), Layout(parts=4, zero=0),
        Layout(tp=2, parts=4, zero=0), Layout(tp=2, dp=2, zero=1), Layout(tp=2, dp=3, zero=3),
        Layout(cp=3, zero=0), Layout(tp=2, cp=2, dp=2, zero=2),
    ],
    ids=lambda layout: layout.text.replace(" ", "-"),
)  # fmt: skip
def test_parts_put_together_are_the_state(layout, recipe, preset):
    whole, state = noted(recipe, preset)
    states = RankStates(whole.spec, recipe, layout)
    places = list(product(range(layout.dp), range(layout.cp), range(layout.tp)))
    cut = {place: states.of_rank(state, place) for place in places}
    again = states.whole(cut)
    assert again.keys() == state.keys()
    for name, flat in state.items():
        if name.startswith("param."):
            assert torch.equal(again[name], flat), name
    # of the optimizer's state all but what lies between weights
    twice = {place: states.of_rank(again, place) for place in places}
    for place in places:
        for name, flat in cut[place].items():
            assert torch.equal(twice[place][name], flat), name


def test_a_rank_has_its_own_heads_columns_and_rows():
    whole, state = noted(Recipe())
    states = RankStates(whole.spec, Recipe(), Layout(tp=2, zero=0))
    spec = whole.spec

    def named(name: str, flat: torch.Tensor, group: str, model: object) -> torch.Tensor:
        inner = model.group_layout(group).tensor(name)  # type: ignore[attr-defined]
        view = flat[inner.offset_bytes : inner.offset_bytes + inner.size_bytes]
        return view.view(torch.bfloat16).view(inner.shape)

    second = states.of_rank(state, (0, 0, 1))
    qkv = named("qkv_proj", state["param.1"], "1", spec)
    q, k, v = qkv.split([spec.d_q, spec.d_kv, spec.d_kv])
    own = torch.cat([one[len(one) // 2 :] for one in (q, k, v)])
    parted = states.split
    assert torch.equal(named("qkv_proj", second["param.1.tp0"], "1.tp0", parted), own)
    down = named("down_proj", state["param.1"], "1", spec)
    columns = down[:, spec.d_ff // 2 :]
    assert torch.equal(named("down_proj", second["param.1.tp0"], "1.tp0", parted), columns)
    rows = named("head", state["param.head"], "head", spec)[spec.vocab_size // 2 :]
    assert torch.equal(named("head", second["param.head.tp0"], "head.tp0", parted), rows)
    norm = named("ffn_norm", state["param.1"], "1", spec)
    assert torch.equal(named("ffn_norm", second["param.1"], "1", parted), norm)
