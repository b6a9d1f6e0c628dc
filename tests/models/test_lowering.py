"""A training step as a chain: exact FLOPs and bytes, order of tasks, versions."""

from math import prod

import pytest

from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import is_compute_unit
from twinstream.models.lowering.lower import lower
from twinstream.models.options import RopeScaling
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.planner.policies import plan_by_rule
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.workload import Packing, Workload

PACKED = Workload(seq_len=2048, chunk_tokens=8192, chunks_per_round=2, rounds_per_step=2)
SLICED = Workload(seq_len=32768, chunk_tokens=8192, chunks_per_round=8, rounds_per_step=2)


def executed_flops(chain: Chain) -> int:
    per_call = {
        name: sum(work.flops for work in call.cost if is_compute_unit(work.unit))
        for name, call in chain.calls.items()
    }
    return sum(per_call[task.call] for task in chain.tasks)


@pytest.mark.parametrize("workload", [PACKED, SLICED], ids=["packed", "sliced"])
@pytest.mark.parametrize("name", ["1b", "8b", "32b"])
def test_tasks_execute_the_model_flops_and_the_scores_that_attention_computes_again(name, workload):
    spec, length = load_preset(name), workload.seq_len
    chain = lower(spec, workload)
    d, layers, vocabulary = spec.d_model, spec.num_layers, spec.vocab_size
    d_q, d_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matmul = 2 * length * (2 * d * d_q + 2 * d * d_kv + 3 * d * spec.d_ff)
    attention = 2 * length * length * d_q  # forward, causal half; backward is twice that
    model = layers * (3 * matmul + 3 * attention) + 6 * length * d * vocabulary
    sequences = workload.tokens_per_step // length
    assert chain.model_flops == sequences * model
    # Flash backward has five matmuls instead of four: one more of S x S x d_q, causal half.
    again = layers * length * length * d_q
    assert executed_flops(chain) == sequences * (model + again)


UNEQUAL = Workload(
    seq_len=3000, chunk_tokens=4096, chunks_per_round=2, rounds_per_step=3,
    packing=Packing(most_sequences=9, expected_lengths=(1000, 1, 3000, 95)),
)  # fmt: skip


@pytest.mark.parametrize("vector", ["eager", "triton"])
def test_unequal_lengths_take_the_flops_of_each_sequence(vector):
    spec = load_preset("8b")
    chain = lower(spec, UNEQUAL, Recipe(kernels=KernelChoice(vector=vector)))
    d, d_kv = spec.d_model, spec.num_kv_heads * spec.head_dim
    per_token = 6 * (2 * d * d + 2 * d * d_kv + 3 * d * spec.d_ff)
    squares = 1000**2 + 1 + 3000**2 + 95**2
    per_chunk = spec.num_layers * (per_token * 4096 + 6 * squares * d)
    model = 2 * 3 * (per_chunk + 6 * 4096 * d * spec.vocab_size)
    assert chain.model_flops == model
    assert executed_flops(chain) == model + 2 * 3 * spec.num_layers * squares * d
    assert chain.calls["block_forward@0"].attributes["most_sequences"] == 9


@pytest.mark.parametrize(("attention", "launches"), [("flash3", 1), ("sdpa_cudnn", 4)])
def test_attention_of_unequal_lengths_is_one_call_where_the_library_takes_them(attention, launches):
    recipe = Recipe(kernels=KernelChoice(attention=attention))
    works = lower(load_preset("8b"), UNEQUAL, recipe).calls["block_forward@0"].cost
    (found,) = (work for work in works if work.unit == "attention_forward")
    assert found.launches == launches
    # a token sees on average as many keys as in sequences of this length
    mean = round((1000**2 + 1 + 3000**2 + 95**2) / 4096)
    assert found.shape == (mean, mean, 32, 128, 4)


def test_blocks_of_flash_2_that_find_no_sequence_are_priced_as_launches():
    """Of 8 sequences of 3,000 tokens, 24 blocks each, 34 have something to do, in every head."""
    for attention in ("sdpa_flash", "flash2"):
        recipe = Recipe(kernels=KernelChoice(attention=attention))
        works = lower(load_preset("8b"), UNEQUAL, recipe).calls["block_backward@0"].cost
        (found,) = (work for work in works if work.unit == "attention_backward")
        assert found.launches == 1 + (8 * 24 - (8 + 1 + 24 + 1)) * 32 // 300
    full = Workload(
        seq_len=4096, chunk_tokens=4096, chunks_per_round=1, rounds_per_step=1,
        packing=Packing(most_sequences=1, expected_lengths=(4096,)),
    )  # fmt: skip
    works = lower(load_preset("8b"), full, recipe).calls["block_backward@0"].cost
    assert [w.launches for w in works if w.unit == "attention_backward"] == [1]


def test_8b_at_8192_tokens_takes_51_47_gflop_per_token():
    workload = Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=1)
    chain = lower(load_preset("8b"), workload)
    assert round(chain.model_flops / 8192 / 1e9, 2) == 51.47


def test_saved_bytes_of_an_8b_block_are_those_of_the_three_levels():
    workload = Workload(seq_len=8192, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=1)
    chain = lower(load_preset("8b"), workload)
    size = {t.tensor_id: t.size_bytes for t in chain.tensors}
    at_input = size["input.3.0"] + size["kv.3.0"]
    assert at_input == 8192 * 12_296
    assert at_input + size["attention.3.0"] == 8192 * 20_616
    assert at_input + size["attention.3.0"] + size["projections.3.0"] == 8192 * 94_344


def test_backward_takes_layers_and_chunks_in_reverse_and_optimizers_follow_at_once():
    workload = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=2, rounds_per_step=2)
    chain = lower(load_preset("tiny"), workload)
    kinds = [task.task_id for task in chain.tasks]
    last = kinds[kinds.index("r1.head_loss.1") :]
    assert last[:2] == ["r1.head_loss.1", "r1.head_loss.0"]
    blocks = [name for name in last if "block_backward" in name or "optimizer" in name]
    expected = ["optimizer.head"]
    for layer in (3, 2, 1, 0):
        expected += [f"r1.block_backward.{layer}.1", f"r1.block_backward.{layer}.0"]
        expected.append(f"optimizer.{layer}")
    assert blocks == [*expected, "optimizer.embedding"]
    assert not any("optimizer" in name for name in kinds[: kinds.index("r1.embed_forward.0")])


def test_a_chunk_attends_to_the_chunks_before_it_and_their_gradients_accumulate():
    workload = Workload(seq_len=256, chunk_tokens=64, chunks_per_round=4, rounds_per_step=1)
    chain = lower(load_preset("tiny"), workload)
    tasks = {task.task_id: {o.name: o for o in task.operands} for task in chain.tasks}
    assert "context" not in tasks["r0.block_forward.2.0"]
    assert tasks["r0.block_forward.2.3"]["context"].num_parts == 3
    last, first = (tasks[f"r0.block_backward.2.{chunk}"]["d_context"] for chunk in (3, 0))
    assert (last.mode, last.num_parts) == ("write", 4)
    assert (first.mode, first.num_parts) == ("update", 1)
    assert first.version == last.version + 2


def test_the_first_gradient_of_a_step_is_a_write_and_all_later_ones_are_updates():
    workload = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=2, rounds_per_step=3)
    chain = lower(load_preset("tiny"), workload)
    modes = [
        operand.mode
        for task in chain.tasks
        for operand in task.operands
        if operand.tensor == "grad.1" and operand.mode != "read"
    ]
    assert modes == ["write"] + ["update"] * 5


def test_large_tables_are_updated_in_parts_no_larger_than_a_layer():
    chain = lower(load_preset("8b"), PACKED)
    size = {t.tensor_id: t.size_bytes for t in chain.tensors}
    parts = [t for t in chain.tensors if t.parent == "param.embedding"]
    assert len(parts) == 3
    assert sum(part.size_bytes for part in parts) == 2 * 128_256 * 4096
    assert max(part.size_bytes for part in parts) <= size["param.0"]


@pytest.mark.parametrize("workload", [PACKED, SLICED], ids=["packed", "sliced"])
@pytest.mark.parametrize("name", ["8b", "32b"])
def test_triton_kernels_compute_the_same_flops_and_move_less_in_the_head(name, workload):
    eager, triton = (
        lower(load_preset(name), workload, Recipe(kernels=KernelChoice(vector=vector)))
        for vector in ("eager", "triton")
    )
    assert executed_flops(triton) == executed_flops(eager)
    moved = [
        {work.unit: work.hbm_bytes for work in chain.calls["head_loss"].cost}
        for chain in (eager, triton)
    ]
    assert moved[1]["cross_entropy"] * 2 == moved[0]["cross_entropy"]


def test_bytes_of_tritons_norms_and_residual_by_hand():
    """8B, 8,192 tokens: x in, normed out; x and what is added in, their sum and it normed out."""
    chain = lower(load_preset("8b"), PACKED, Recipe(kernels=KernelChoice(vector="triton")))
    forward = {work.unit: work for work in chain.calls["block_forward@0"].cost}
    assert forward["rms_norm"].hbm_bytes == (2 + 4) * 8192 * 4096 * 2
    assert forward["rms_norm"].launches == 2
    assert forward["copy"].hbm_bytes == 2 * 8192 * 4096 * 2
    assert forward["swiglu"].hbm_bytes == 3 * 8192 * 14336 * 2
    backward = [w for w in chain.calls["block_backward@0"].cost if w.unit == "rms_norm"]
    shares = 2 * 264 * 4096 * 4
    assert [work.hbm_bytes for work in backward] == 2 * [6 * 8192 * 4096 * 2 + shares]


def test_a_rope_that_is_stretched_is_told_to_every_block_and_costs_nothing():
    workload = Workload(seq_len=32, chunk_tokens=16, chunks_per_round=2, rounds_per_step=1)
    plain = load_preset("tiny")
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    )
    before = lower(plain, workload)
    after = lower(plain.model_copy(update={"rope_scaling": scaling}), workload)
    assert "rope_scaling" not in before.model.spec
    assert after.model.spec["rope_scaling"] == scaling.model_dump()
    assert after.model.content_hash != before.model.content_hash
    told = {f"rope_scaling.{name}": value for name, value in scaling}
    for name, call in before.calls.items():
        more = told if call.kernel.startswith("block") else {}
        assert after.calls[name].attributes == call.attributes | more
        assert after.calls[name].cost == call.cost


@pytest.mark.parametrize("workload", [PACKED, SLICED, UNEQUAL], ids=["packed", "sliced", "unequal"])
@pytest.mark.parametrize("name", ["8b", "1b"])
def test_a_forward_alone_is_the_begin_of_the_step_with_a_head_that_makes_the_loss(name, workload):
    spec = load_preset(name)
    step, chain = lower(spec, workload), lower(spec, workload.forward)
    before_head = workload.chunks_per_round * (1 + spec.num_layers)
    assert chain.tasks[:before_head] == step.tasks[:before_head]
    heads = chain.tasks[before_head:]
    assert len(heads) == workload.chunks_per_round
    for head, training in zip(heads, step.tasks[before_head:], strict=False):
        assert (head.task_id, head.call) == (training.task_id, "head_evaluate")
        given = [o for o in head.operands if o.name != "scratch"]
        made = {"d_hidden", "gradients", "embedding_gradients", "scratch"}
        assert given == [o for o in training.operands if o.name not in made]
    assert 3 * chain.model_flops * workload.rounds_per_step == step.model_flops
    assert executed_flops(chain) == chain.model_flops
    assert [(o.tensor, o.version) for o in chain.outputs] == [("loss", workload.chunks_per_round)]


def test_a_forward_alone_has_the_whole_state_and_nothing_of_the_backward():
    step, chain = (lower(load_preset("8b"), each, Recipe(clips=True)) for each in (
        PACKED, PACKED.forward
    ))  # fmt: skip
    assert chain.persistent == step.persistent
    roots = {t.tensor_id for t in chain.tensors if t.parent is None}
    assert set(chain.persistent) <= roots
    assert not any(name.startswith(("grad", "d_")) for name in roots)
    fresh = set(chain.tensors) - set(step.tensors)
    assert {tensor.tensor_id for tensor in fresh} == {"scratch.head_evaluate"}
    assert chain.recomputes == ()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(optimizer_state="8bit", clips=True)], ids=str)
def test_the_shape_of_every_tensor_is_its_elements(recipe):
    sizes = {"bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}
    chain = lower(load_preset("8b"), PACKED, recipe)
    for tensor in chain.tensors:
        assert prod(tensor.shape) * sizes[tensor.dtype] == tensor.size_bytes, tensor
    embedding = next(t for t in chain.tensors if t.tensor_id == "param.embedding")
    assert (embedding.dtype, embedding.shape) == ("bfloat16", (128256 * 4096,))


def test_schedules_with_flat_shapes_in_bytes_still_conform():
    workload = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=1, rounds_per_step=2)
    chain = lower(load_preset("tiny"), workload)
    schedule = plan_by_rule(chain, load_machine("cpu"), Caps(), "resident")
    before = schedule.model_copy(
        update={
            "tensors": tuple(
                t.model_copy(update={"shape": (t.size_bytes,)}) if t.dtype != "uint8"
                and len(t.shape) == 1 else t
                for t in schedule.tensors
            )
        }
    )  # fmt: skip
    assert before != schedule and not conforms(before, chain)
    odd = tuple(t.model_copy(update={"shape": (1, *t.shape)}) for t in schedule.tensors)
    assert conforms(schedule.model_copy(update={"tensors": odd}), chain)
