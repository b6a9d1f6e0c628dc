"""Folders as runs leave them, with figures that can be worked out by hand."""

import math
from pathlib import Path

from tests.training.test_metrics import checkpoint, evaluation, step
from twinstream.log.metrics import FILE, MetricsLog


def write_run(folder: Path, num_steps: int = 40) -> Path:
    """A falling loss, an evaluation every ten steps, a checkpoint every twenty."""
    folder.mkdir()
    with MetricsLog(folder / FILE) as log:
        for number in range(1, num_steps + 1):
            log.append(
                step(number, loss_at(number), learning_rate=number * 1e-5, grad_norm=1.0 / number,
                     tokens_per_s=200.0, predicted_tokens_per_s=210.0)
            )  # fmt: skip
            if number % 10 == 0:
                log.append(evaluation(number))
            if number % 20 == 0:
                log.append(checkpoint(number))
    return folder


def loss_at(number: int) -> float:
    return 2.0 + 8.0 * math.exp(-number / 10)
