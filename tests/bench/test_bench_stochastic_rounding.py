"""What an element of a bfloat16 AdamW costs on one core, with stochastic rounding and to nearest.

pytest tests/bench/test_bench_stochastic_rounding.py -m bench -s
"""

from time import process_time

import pytest
import torch

from tests.executor.kernels.test_adamw import adamw, randn, step_state

COUNT = 2**22
MOST_NS = 12.0  # with stochastic rounding


@pytest.mark.bench
def test_bench_stochastic_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    flats = [randn(COUNT, torch.bfloat16, seed) for seed in range(4)]
    flats[3].abs_()
    found_ns = {}
    for rounding in (True, False):
        times_s = []
        for step in range(1, 6):
            start_s = process_time()
            adamw(flats, step_state(lr=1e-3, step=step), stochastic_rounding=rounding)
            times_s.append(process_time() - start_s)
        found_ns[rounding] = min(times_s) / COUNT * 1e9
    with capsys.disabled():
        print(f"\nstochastic {found_ns[True]:.1f}, to nearest {found_ns[False]:.1f} ns an element")
    assert found_ns[True] <= MOST_NS
