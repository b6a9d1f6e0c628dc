"""The two streams against timelines drawn by hand, and amounts of layers against arithmetic."""

from dataclasses import dataclass, field

import pytest

from twinstream.layered.step import LayeredTask, step_time
from twinstream.layered.strategy import GpuMesh, StrategyError, parse_strategy, spread_of
from twinstream.models.layered.model import LayeredModel, load_layered

MESH = GpuMesh(gpus=16, gpus_per_node=8)
TABLES = {"kind": "tables", "tables": 4, "rows": 1000, "width": 8, "lookups": 2}
BOTTOM = {"kind": "mlp", "name": "bottom", "widths": [8, 8]}
TOP = {"kind": "mlp", "name": "top", "widths": [8, 8], "repeat": 2, "joins": True}


def model(*layers: dict[str, object]) -> LayeredModel:
    return LayeredModel.model_validate({"name": "small", "layers": list(layers)})


@dataclass
class Given:
    """Every kind of piece takes what the test says, whatever the part."""

    times: dict[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str):
        return lambda *_: self.times.get(name, 0.0)

    def products(self, part, spread, passes):
        return self.times["products"] * max(1, passes)


def test_tables_join_at_the_top_in_forward():
    """Lookup 0..5, exchange 5..25; bottom 5..15 hides part of it; the top 25..35..45."""
    given = Given({"products": 10, "lookup": 5, "exchange": 20})
    task = LayeredTask(batch=16, name="inference")
    found = step_time(model(TABLES, BOTTOM, TOP), {"embedding": ("shard",)}, MESH, task, given)
    assert (found.step_ns, found.exposed_ns, found.overlapped_ns) == (45, 10, 10)


def test_gathers_wait_for_room_and_reductions_for_backward():
    """Three parts, gathers of 4, products of 10 (backward 20, the first part 10), scatters of 7.

    Forward: gathers at 0, 4, then 14 when the first part is computed; computed by 34.
    Backward with prefetch, from 34: gathers end at 38 and 42; products at 58, 78, 88; scatters
    from 58 to 65 and, behind the gather of the third part, from 78 and 88 to 95.
    """
    given = Given({"products": 10, "gather": 4, "scatter": 7})
    layers = {"kind": "mlp", "widths": [8, 8], "repeat": 3}
    found = step_time(model(layers), {"dense": ("fsdp",)}, MESH, LayeredTask(batch=16), given)
    assert (found.step_ns, found.compute_end_ns) == (95, 88)
    # Without, the gather of the second part is asked for before anything, but goes out in turn:
    # behind the scatter of the first, which waits for its products.
    task = LayeredTask(batch=16, prefetch=False)
    found = step_time(model(layers), {"dense": ("fsdp",)}, MESH, task, given)
    # Gathers 34..38; products 38..58; scatter ..65; gather ..69; products 69..89; scatter ..96;
    # gather ..100; products 100..110; scatter ..117.
    assert (found.step_ns, found.compute_end_ns) == (117, 110)


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [((), 5), (("bottom",), 4), (("embedding", "bottom"), 3), (("top",), 3),
     (("embedding", "top"), 3), (("dense",), 2)],
)  # fmt: skip
def test_frozen_layers_have_no_gradient_of_their_own(frozen, passes):
    """The bottom: of its weights alone. The top's two: of inputs, where anything before them is
    trained, and of weights, where they are: the second's inputs whenever the first is trained.
    """
    count: list[int] = []

    class Counting(Given):
        def products(self, part, spread, passes):
            count.append(passes)
            return 0.0

    task = LayeredTask(batch=16, name="finetune", frozen=frozenset(frozen))
    step_time(model(TABLES, BOTTOM, TOP), {"embedding": ("shard",)}, MESH, task, Counting())
    assert sum(count) == passes


def test_nothing_to_train_is_refused():
    task = LayeredTask(batch=16, name="finetune", frozen=frozenset({"embedding", "dense"}))
    with pytest.raises(StrategyError, match="everything is frozen"):
        step_time(model(TABLES, BOTTOM, TOP), {}, MESH, task, Given())


@pytest.mark.parametrize(
    ("name", "millions", "within"),
    [  # as their papers print them
        ("vit_l", 307, 0.02), ("vit_h", 632, 0.01), ("bert_base", 110, 0.02),
        ("bert_large", 340, 0.02), ("dinov2_g", 1100, 0.04), ("dlrm_a", 793_000, 0.02),
        ("dlrm_f", 12_000_000, 0.01), ("dlrm_i", 332_000, 0.01),
    ],
)  # fmt: skip
def test_models_are_as_large_as_published(name, millions, within):
    assert load_layered(name).parameters / 1e6 == pytest.approx(millions, rel=within)


def test_a_block_counts_what_its_matrices_do():
    layers = {"kind": "transformer", "layers": 1, "heads": 2, "width": 8, "ffn": 32, "seq_len": 4}
    attention, dense = model(layers).chain.parts
    assert attention.flops == 2 * 4 * (4 * 8 * 8) + 2 * 2 * 4 * 4 * 8  # four products, and scores
    assert dense.flops == 2 * 4 * (2 * 8 * 32)
    causal = model({**layers, "causal": True}).chain.parts[0]
    assert attention.flops - causal.flops == 2 * 4 * 4 * 8  # half of the scores
    gated = model({**layers, "gated": True}).chain.parts[1]
    assert gated.parameters == 3 * 8 * 32


def test_strategies_go_by_layer_then_class_then_dense():
    small = model(TABLES, BOTTOM, TOP)
    strategy = parse_strategy("embedding=tp,dense=fsdp/ddp,top=tp/ddp", small)
    table = spread_of(small.chain.embeddings[0], strategy, MESH, 64)
    bottom, top = (spread_of(small.chain.parts[n], strategy, MESH, 64) for n in (0, 1))
    assert (table.shards, table.samples) == (16, 64)
    assert (bottom.shards, bottom.replicas, bottom.samples) == (8, 16, 4)
    assert (top.shards, top.replicas, top.samples) == (8, 2, 32)
