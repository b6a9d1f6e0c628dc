"""What a checkpoint costs beside the disk.

`pytest -m bench -s tests/bench/test_bench_checkpoint.py`

The device waits while a checkpoint is written. It should wait no longer than the disk takes for as
many bytes; and memory should hold no second copy of the state.
"""

import os
from pathlib import Path
from time import perf_counter

import pytest

from tests.training.small_runs import Seen, options
from twinstream.training.trainer import Trainer

pytestmark = pytest.mark.bench
MODEL = {"num_layers": 6, "d_model": 1024, "d_ff": 4096, "head_dim": 64, "num_heads": 16}


def disk_s(path: Path, num_bytes: int) -> float:
    """To write so many bytes into one file, and have them on the disk."""
    block, start_s = os.urandom(1 << 24), perf_counter()
    with path.open("wb") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    took_s = perf_counter() - start_s
    path.unlink()
    return took_s


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_checkpoint_takes_what_the_disk_takes(tmp_path: Path) -> None:
    from tests.training.small_runs import write_config

    config = write_config(tmp_path / "model", **MODEL)
    seen = Seen()
    wanted = options(
        tmp_path, model=str(config), dtype="bfloat16", steps=3, save_every="1", keep=1,
        tokens_per_step=64, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(wanted, callbacks=[seen])
    trainer.prepare()
    trainer.train()
    for found in seen.checkpoints:
        raw_s = disk_s(tmp_path / "raw", found.bytes)
        print(
            f"\n{found.bytes / 1e6:,.0f} MB: the device waited {found.device_held_s:.2f} s, "
            f"{found.bytes / 1e6 / found.device_held_s:,.0f} MB/s; the disk alone takes "
            f"{raw_s:.2f} s, {found.bytes / 1e6 / raw_s:,.0f} MB/s; the process's peak is "
            f"{peak_bytes() / 1e6:,.0f} MB"
        )
