"""Recompute levels: what each saves, and which blocks get which."""

import pytest

from tests.helpers.tiny_chains import tiny_chain
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.planner.rules.levels import LevelChoice, Option, SavedBlock, saved_blocks
from twinstream.schedule.chain import Chain
from twinstream.schedule.workload import Workload

LEVELS = (None, "ATTENTION", "INPUT")


def blocks_of(chain: Chain, call_ns: float = 1.0) -> list[SavedBlock]:
    return saved_blocks(chain, UnitMap(chain), dict.fromkeys(chain.calls, call_ns))


def dense_chain(preset: str, workload: Workload) -> Chain:
    return lower(load_preset(preset).model_copy(update={"num_layers": 2}), workload)


PACKED = Workload(seq_len=1024, chunk_tokens=2048, chunks_per_round=2, rounds_per_step=2)
SLICED = Workload(seq_len=8192, chunk_tokens=2048, chunks_per_round=4, rounds_per_step=1)


@pytest.mark.parametrize("workload", [PACKED, SLICED], ids=["packed", "sliced"])
def test_saved_bytes_are_those_of_the_design_table_for_8b(workload):
    for block in blocks_of(dense_chain("8b", workload)):
        assert [option.level for option in block.options] == list(LEVELS)
        per_token = [block.saved_bytes(i) / workload.chunk_tokens for i in range(3)]
        assert per_token == [94_344, 20_616, 12_296]


@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3"])
@pytest.mark.parametrize("workload", [PACKED, SLICED], ids=["packed", "sliced"])
def test_saved_bytes_follow_the_table_where_heads_are_wider_than_the_model(preset, workload):
    # float32: d the layer input, x_o and per-head width as below; two fp32 norm scalars a token
    spec = load_preset(preset)
    d, q, f, item = spec.d_model, spec.num_heads * spec.head_dim, spec.d_ff, 4
    k = spec.num_kv_heads * spec.head_dim
    input_bytes = item * (d + 2 * k) + 8
    attention_bytes = input_bytes + item * q + 4 * spec.num_heads
    full_bytes = attention_bytes + item * (q + d + 2 * f)
    for block in blocks_of(dense_chain(preset, workload)):
        per_token = [block.saved_bytes(i) / workload.chunk_tokens for i in range(3)]
        assert per_token == [full_bytes, attention_bytes, input_bytes]


def test_there_is_a_block_for_every_layer_and_chunk_in_forward_order_shared_by_the_rounds():
    blocks = blocks_of(tiny_chain("packed"))
    named = [block.groups for block in blocks]
    assert named == [
        tuple(f"r{r}.block.{layer}.{chunk}" for r in range(2)) for layer, chunk in
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]  # fmt: skip


def test_a_block_waits_for_its_backward_while_the_tasks_in_between_run():
    # embed 0 1, forward 0.0 0.1 1.0 1.1, head 1 0, backward 1.1 1.0 0.1 0.0: 1 ns each
    gaps = [block.gap_ns for block in blocks_of(tiny_chain("packed"))]
    assert gaps == [8, 6, 4, 2]
    assert [block.forward_ns for block in blocks_of(tiny_chain("packed"), 7.0)] == [7.0] * 4


# --- choosing


def block(name: str, sizes: tuple[int, int, int], gap_ns: float = 1.0) -> SavedBlock:
    """A block of three units, the first two of which can be made again."""
    units = (f"{name}.b", f"{name}.a", f"{name}.in")
    options = (
        Option(None, frozenset()),
        Option("ATTENTION", frozenset(units[:1])),
        Option("INPUT", frozenset(units[:2])),
    )
    return SavedBlock((f"r0.{name}", f"r1.{name}"), units, sizes, options, gap_ns, forward_ns=100.0)


BLOCKS = [block("x", (50, 30, 20)), block("y", (50, 30, 20)), block("z", (500, 30, 20))]


def levels(choice: LevelChoice) -> list[str | None]:
    found = choice.levels
    assert all(found.get(f"r0.{name}") == found.get(f"r1.{name}") for name in "xyz")
    return [found.get(f"r0.{name}") for name in "xyz"]


def test_at_first_every_block_is_saved_at_the_lowest_level():
    choice = LevelChoice(BLOCKS)
    assert levels(choice) == ["INPUT"] * 3
    assert choice.kept_units == set()


def test_kept_blocks_stay_whole_and_are_not_recomputed():
    choice = LevelChoice(BLOCKS)
    choice.keep(lambda found: found is BLOCKS[1])
    assert levels(choice) == ["INPUT", None, "INPUT"]
    assert choice.kept_units == {"y.b", "y.a", "y.in"}
    choice.offload_what_hides(lambda size: 0.0)
    choice.lower_by(10**6)
    assert choice.kept_units == {"y.b", "y.a", "y.in"}
    assert levels(choice)[1] is None


def test_blocks_are_offloaded_at_the_first_level_whose_copies_hide_under_their_forward():
    choice = LevelChoice(BLOCKS)
    choice.offload_what_hides(lambda size: float(size))  # forward takes 100 ns
    assert levels(choice) == [None, None, "ATTENTION"]
    choice = LevelChoice(BLOCKS)
    choice.offload_what_hides(lambda size: 5.0 * size)
    assert levels(choice) == ["INPUT"] * 3
    choice = LevelChoice(BLOCKS)
    choice.offload_what_hides(lambda size: 2.0 * size)
    assert levels(choice) == ["ATTENTION"] * 3


def test_to_save_less_all_blocks_go_down_one_level_before_any_goes_down_two():
    def after(excess: int) -> list[str | None]:
        choice = LevelChoice(BLOCKS)
        choice.offload_what_hides(lambda size: 0.0)
        choice.lower_by(excess)
        return levels(choice)

    assert after(0) == [None, None, None]
    assert after(1) == ["ATTENTION", None, None]  # the first forward is saved longest
    assert after(50) == ["ATTENTION", None, None]
    assert after(51) == ["ATTENTION", "ATTENTION", None]
    assert after(600) == ["ATTENTION"] * 3
    assert after(601) == ["INPUT", "ATTENTION", "ATTENTION"]
    assert after(10**6) == ["INPUT"] * 3
