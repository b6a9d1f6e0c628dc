from importlib.util import find_spec

import pytest

from tests.executor.kernels.driver import block_attributes, run
from tests.executor.kernels.families import tiny_spec
from twinstream.executor.kernels.attention.registry import attention_implementation
from twinstream.executor.kernels.block.block_call import BlockCall
from twinstream.executor.kernels.registry import (
    kernel_keys,
    registered_kernel,
)
from twinstream.schedule.errors import TwinstreamError

ATTRIBUTES = block_attributes(tiny_spec("llama"), num_tokens=8, seq_len=8, chunk_start=0)


def test_every_kernel_is_there():
    assert len(kernel_keys()) == 109  # three of the host among them
    for key in kernel_keys():
        if key.endswith("/eager") or find_spec("triton"):
            assert callable(registered_kernel(key))


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
