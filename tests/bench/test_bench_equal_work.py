"""What chunks of equal work would gain beside chunks of equal tokens, of one long sequence.

pytest -m bench -s tests/bench/test_bench_equal_work.py

Compute of a layer's chunks, forward and backward with attention kept, by the prices that plans
have: a chunk may be of any number of tokens and begin anywhere.
"""

import pytest

from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.kernel_costs.triton_work import TritonChunkWork
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.kernel_choice import kernels_for
from twinstream.schedule.workload import Workload

_STEP = 256  # tokens that kernels are fast with
CELLS = [("h100", "8b", 65_536, 8), ("h100", "8b", 524_288, 64), ("rtx4090", "8b", 131_072, 32)]


def layer_s(machine: Machine, name: str, start: int, tokens: int) -> float:
    """Seconds of a layer's forward and backward of a chunk."""
    recipe = Recipe(kernels=kernels_for(machine))
    workload = Workload(
        seq_len=2 * tokens, chunk_tokens=tokens, chunks_per_round=2, rounds_per_step=1
    )
    work = TritonChunkWork(load_preset(name), workload, start, recipe)
    works = (*work.block_forward(), *work.recompute_attention(), *work.block_backward())
    return sum(work_time(one, machine).alone_ns for one in works) / 1e9


def equal_work(machine: Machine, name: str, seq_len: int, chunks: int) -> list[int]:
    """Tokens of so many chunks, the longest in time as short as it can be."""
    low, high = 0.0, layer_s(machine, name, 0, seq_len)
    found: list[int] = []
    while high - low > 1e-3 * high:
        most_s, start, sizes = (low + high) / 2, 0, list[int]()
        while start < seq_len and len(sizes) < chunks:
            few, many = 1, (seq_len - start) // _STEP
            while few < many:
                middle = (few + many + 1) // 2
                fits = layer_s(machine, name, start, middle * _STEP) <= most_s
                few, many = (middle, many) if fits else (few, middle - 1)
            sizes.append(few * _STEP)
            start += few * _STEP
        if start >= seq_len:
            high, found = most_s, sizes
        else:
            low = most_s
    return found


@pytest.mark.bench
@pytest.mark.parametrize(("gpu", "name", "seq_len", "chunks"), CELLS)
def test_chunks_of_equal_work_beside_equal_tokens(
    gpu: str, name: str, seq_len: int, chunks: int
) -> None:
    machine = load_machine(gpu)
    ways = {
        "tokens": [seq_len // chunks] * chunks,
        "work": equal_work(machine, name, seq_len, chunks),
    }
    for way, sizes in ways.items():
        assert sum(sizes) == seq_len
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        times = [layer_s(machine, name, *where) for where in zip(starts, sizes, strict=True)]
        print(
            f"\n{gpu} {name} {seq_len:,} equal {way}: {len(sizes)} chunks of {min(sizes):,} to "
            f"{max(sizes):,} tokens, {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f} ms each, "
            f"layer {sum(times):.4f} s"
        )
