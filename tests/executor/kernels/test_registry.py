from importlib.util import find_spec

import pytest
import torch

from tests.executor.kernels.driver import block_attributes, run
from tests.executor.kernels.families import tiny_spec
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.block.block_call import BlockCall
from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.kernels.registry import (
    kernel_keys,
    registered_kernel,
)
from twinstream.schedule.errors import TwinstreamError

ATTRIBUTES = block_attributes(tiny_spec("llama"), num_tokens=8, seq_len=8, chunk_start=0)


def test_every_kernel_is_there():
    assert len(kernel_keys()) == 16
    for key in kernel_keys():
        if key.endswith("/eager") or find_spec("triton"):
            assert callable(registered_kernel(key).function)


def test_unknown_kernel_lists_the_known_ones():
    with pytest.raises(TwinstreamError, match=r"'block_forward/cuda'.*head_loss/eager"):
        registered_kernel("block_forward/cuda")


def test_unknown_attention_lists_the_known_ones():
    with pytest.raises(TwinstreamError, match=r"'flash' is unknown; known implementations: eager"):
        attention_implementation("flash")
    with pytest.raises(TwinstreamError, match=r"'flash' is unknown.*eager"):
        run("block_forward", ATTRIBUTES | {"attention": "flash"}, {})


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_missing_attribute_is_named(name):
    without = {key: value for key, value in ATTRIBUTES.items() if key != name}
    with pytest.raises(TwinstreamError, match=name):
        BlockCall.from_attributes(without)


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "chunk_start"), [(12, 8, 0), (16, 8, 8), (8, 16, 12)]
)
def test_chunk_that_does_not_fit_its_sequences_is_refused(num_tokens, seq_len, chunk_start):
    place = {"num_tokens": num_tokens, "seq_len": seq_len, "chunk_start": chunk_start}
    with pytest.raises(TwinstreamError, match="neither packs whole sequences"):
        BlockCall.from_attributes(ATTRIBUTES | place)


def test_operand_that_is_too_small_is_refused():
    operand = KernelOperand(torch.zeros(40, dtype=torch.uint8), "read")
    assert operand.view(torch.float32, (2, 4), offset_bytes=8).shape == (2, 4)
    with pytest.raises(TwinstreamError, match="has 40 bytes, but its kernel needs 44"):
        operand.view(torch.float32, (11,))
