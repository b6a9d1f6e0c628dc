"""Frozen weights and LoRA under Megatron's kernels: what is computed of a layer, by arithmetic."""

from twinstream.clusters.kernel_sets import with_kernels
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import Recipe, megatron_recipe

RANK, TOKENS = 16, 2048
ATTENTION = Lora(rank=RANK, alpha=32.0, targets=("q", "v"))


def job_of(recipe: Recipe, model: str = "8b", **fields: int) -> Job:
    layout = Layout.model_validate({"tp": 2, **fields})
    return Job(shape=load_preset(model), layout=layout, seq_len=TOKENS, global_batch=8,
               recipe=recipe)  # fmt: skip


def flops(works) -> int:
    return sum(work.flops for work in works if work.unit == "matmul")


def test_frozen_weights_have_no_gradients_and_adapters_have_small_ones():
    """d 4,096, 32 heads and 8 KV heads of 128 over tp 2: A is d x 32 (of q and v), B 32 x 3,072."""
    plain = job_of(megatron_recipe()).work.layer()
    recipe = megatron_recipe().model_copy(update={"lora": ATTENTION})
    lora = job_of(recipe).work.layer()
    low, out = 2 * RANK, (32 + 8 + 8) * 128 // 2
    adapter = 2 * TOKENS * low * (4096 + out)
    assert flops(lora.backward_weight) == adapter
    assert flops(lora.forward) == flops(plain.forward) + adapter
    assert flops(lora.backward_input) == flops(plain.backward_input) + adapter


def test_a_frozen_head_and_embedding_leave_their_products_with_inputs():
    recipe = megatron_recipe().model_copy(update={"lora": ATTENTION})
    frozen, plain = job_of(recipe).work, job_of(megatron_recipe()).work
    assert frozen.head().backward_weight == () == frozen.embedding().backward_weight
    assert frozen.head().backward_input == plain.head().backward_input != ()


def test_lora_on_a_layout_that_does_not_run_here_is_priced():
    priced = with_kernels(job_of(Recipe(lora=ATTENTION)), load_machine("h100"))
    assert priced.recipe.kernels is not None and priced.recipe.kernels.vector == "megatron"


def test_experts_that_are_frozen_have_no_gradients():
    recipe = megatron_recipe().model_copy(update={"lora": ATTENTION})
    work = job_of(recipe, "qwen3-30b-a3b", tp=1, dp=8, ep=8).work
    assert work.experts().backward_weight == ()
