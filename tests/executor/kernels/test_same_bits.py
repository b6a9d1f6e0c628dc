"""Bits that must not depend on recomputation, on dead bytes, or on the run."""

import pytest
import torch

from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import (
    FAMILIES,
    SEQ_LEN,
    kernel_step,
    random_tokens,
    tiny_spec,
)

DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
FAMILY = pytest.mark.parametrize("family", FAMILIES)
CHUNKS = pytest.mark.parametrize("chunk_tokens", [2 * SEQ_LEN, SEQ_LEN // 3])


def all_bits(step: Step) -> dict:
    """Everything that the kernels of a step leave behind, after running it."""
    step.run()
    return step.buffers


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


@FAMILY
@DTYPE
@CHUNKS
def test_recompute_makes_the_bytes_of_the_forward(family, dtype, chunk_tokens):
    spec = tiny_spec(family, dtype)
    tokens = random_tokens(spec)
    kept = all_bits(kernel_step(spec, tokens, chunk_tokens))
    for level in ("ATTENTION", "INPUT"):
        assert_same_bits(all_bits(kernel_step(spec, tokens, chunk_tokens, recompute=level)), kept)


@FAMILY
@DTYPE
@CHUNKS
def test_content_of_written_operands_and_scratch_does_not_matter(family, dtype, chunk_tokens):
    spec = tiny_spec(family, dtype)
    tokens = random_tokens(spec)
    options = {"recompute": "INPUT"}
    poisoned = all_bits(kernel_step(spec, tokens, chunk_tokens, **options))
    clean = all_bits(kernel_step(spec, tokens, chunk_tokens, fill=0, **options))
    assert_same_bits(poisoned, clean)


def test_two_runs_with_two_threads_give_the_same_bits():
    torch.set_num_threads(2)
    spec = tiny_spec("qwen3", "bfloat16")
    tokens = random_tokens(spec)
    first, second = (all_bits(kernel_step(spec, tokens, 2 * SEQ_LEN)) for _ in range(2))
    assert_same_bits(first, second)
