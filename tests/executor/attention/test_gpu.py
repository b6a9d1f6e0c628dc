"""Every attention implementation on a GPU, as far as it can run there; each skip says why not."""

import pytest
import torch

from tests.executor.attention import cases
from tests.executor.attention.cases import PACKED, SLICED, TOLERANCES
from twinstream.executor.kernels.attention.canary import check_shape
from twinstream.executor.kernels.attention.registry import (
    attention_implementation,
    attention_reason,
)
from twinstream.executor.kernels.attention.trial import AttentionTrial
from twinstream.executor.probe.tasks.attention import attention_cases, taken_bytes, try_attention
from twinstream.models.kernel_costs.attention_limits import attention_limits, attention_names
from twinstream.models.kernel_costs.attention_shape import AttentionShape
from twinstream.models.presets import load_preset
from twinstream.schedule.workload import Workload

pytestmark = pytest.mark.gpu

ON_CUDA = tuple(name for name in attention_names() if name not in ("eager", "sdpa_cpu"))
# Heads of 64 and 128, groups of one and of four; lengths of 64 modulo 128 among them.
HEADS = [(4, 4, 64), (8, 2, 128)]
LENGTHS = [(2, 64, 64), (3, 192, 192), (1, 704, 704), (1, 64, 192), (1, 1, 129), (1, 320, 1344)]
# Packed sequences of unequal lengths.
UNEQUAL = [[64, 1, 191], [704, 5, 64, 64, 130], [1, 2]]
# Packed, whole, sliced and unequal, as 8B has them.
REAL = [(8, 1024, 1024), (1, 8192, 8192), (1, 4096, 16384), [4096, 2048, 1024, 7 * 146, 2]]


def of_bf16(
    lengths: tuple[int, int, int] | list[int], heads: tuple[int, int, int]
) -> AttentionShape:
    if isinstance(lengths, list):
        return cases.unequal(tuple(lengths), *heads, "bfloat16")
    return cases.shape(*lengths, *heads, "bfloat16")


def require(name: str, shape: AttentionShape) -> None:
    if reason := attention_reason(name, "cuda", shape):
        pytest.skip(f"{name}: {reason}")


@pytest.mark.parametrize("lengths", [*LENGTHS, *UNEQUAL], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ON_CUDA)
def test_attention_agrees_with_the_oracle_from_buffers_of_nan(name, heads, lengths):
    """With fewer queries than keys, too: all are aligned alike."""
    shape = of_bf16(lengths, heads)
    require(name, shape)
    data = cases.random_data(shape, "cuda")
    found = cases.call(name, shape, data)
    cases.assert_close(found, cases.oracle(data), TOLERANCES["bfloat16"])


def test_flash_4_takes_more_sequences_than_it_looks_up_without_tables():
    """It makes tables of where the blocks of each are for more than 256."""
    shape = of_bf16(150 * [1, 2], (8, 2, 128))
    require("flash4", shape)
    data = cases.random_data(shape, "cuda")
    found = cases.call("flash4", shape, data)
    cases.assert_close(found, cases.oracle(data), TOLERANCES["bfloat16"])


@pytest.mark.parametrize("sizes", PACKED + SLICED)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_eager_attention_agrees_with_the_oracle(dtype, sizes):
    shape = cases.shape(*sizes, dtype)
    data = cases.random_data(shape, "cuda")
    cases.assert_close(cases.call("eager", shape, data), cases.oracle(data), TOLERANCES[dtype])


@pytest.mark.parametrize("lengths", REAL, ids=str)
@pytest.mark.parametrize("name", ON_CUDA)
def test_what_says_it_is_deterministic_has_the_same_bits_from_run_to_run(name, lengths):
    shape = of_bf16(lengths, (32, 8, 128))
    require(name, shape)
    if not attention_implementation(name).deterministic:
        pytest.skip(f"{name} does not say so")
    trial = AttentionTrial(attention_implementation(name), shape, torch.device("cuda"))
    with torch.no_grad():
        first = trial.results()
        assert all(trial.results().same_bits(first) for _ in range(3))


@pytest.mark.parametrize("lengths", [*LENGTHS, *UNEQUAL, *REAL], ids=str)
@pytest.mark.parametrize("name", ON_CUDA)
def test_results_are_finite_with_ordinary_and_with_low_scores(name, lengths):
    shape = of_bf16(lengths, (8, 2, 128))
    require(name, shape)
    with torch.no_grad():
        check_shape(name, shape, "cuda")


@pytest.mark.parametrize("lengths", [*LENGTHS, *UNEQUAL, *REAL], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 16, 64)])
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_library_takes_at_most_the_memory_declared(name, heads, lengths):
    """The second call: the first may compile, and keep what it made."""
    shape = of_bf16(lengths, heads)
    require(name, shape)
    trial = AttentionTrial(attention_implementation(name), shape, torch.device("cuda"))
    with torch.no_grad():
        trial.results()
        taken = [taken_bytes(trial.forward), taken_bytes(trial.backward)]
    declared = [attention_limits(name).allocates(p, shape) for p in ("forward", "backward")]
    assert taken[0] <= declared[0] and taken[1] <= declared[1], (taken, declared)


@pytest.mark.parametrize("name", ON_CUDA)
def test_the_probe_tries_what_is_here(name, capsys):
    workload = Workload(seq_len=1024, chunk_tokens=8192, chunks_per_round=1, rounds_per_step=1)
    found = try_attention(name, attention_cases(load_preset("8b"), workload), "cuda")
    with capsys.disabled():
        print(name, found.refused or f"{found.time_ns / 1e6:.3f} ms")
    if name == "sdpa_flash":
        assert found.refused is None and found.time_ns > 0
