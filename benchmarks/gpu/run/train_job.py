"""`twinstream train` as a user calls it, once: clipping, two evaluations and a checkpoint."""

import json
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.jobs.campaign import Backend, ModelSize
from benchmarks.gpu.jobs.results import TrainFound
from benchmarks.gpu.run.gpu_tests import run_within
from twinstream.data.text import default_text
from twinstream.executor.probe.process import JobFailed, JobTimeout
from twinstream.log.metrics import (
    CheckpointMetrics,
    EvalMetrics,
    StepMetrics,
    events_of_kind,
    read_metrics,
)

# Model and further arguments by size; documents are of some hundred tokens, packed.
_WHAT: dict[ModelSize, tuple[str, ...]] = {
    "full": ("1b", "--steps", "20", "--eval-every", "10"),
    "tiny": ("tiny", "--steps", "2", "--eval-every", "1", "--seq-len", "64",
             "--tokens-per-step", "256"),
}  # fmt: skip
_EVAL_TOKENS = {"full": "100000", "tiny": "256"}
_DATA_BYTES = {"full": 8 * 10**6, "tiny": 10_000}  # a byte is a token
_CUDA_BF16 = ("--dtype", "bfloat16")


def trained(size: ModelSize, backend: Backend, limit_s: float) -> TrainFound:
    """What a short run came to, on the bytes of Python's help topics.

    Raises:
        JobFailed: it ended with an error, or without its evaluations and its checkpoint.
        JobTimeout: it did not end in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, held_out, run = folder / "data.jsonl", folder / "eval.jsonl", folder / "run"
        documents = [part for part in default_text().decode().split("\n\n") if part.strip()]
        _write(data, documents, _DATA_BYTES[size])
        _write(held_out, documents[::7], int(_EVAL_TOKENS[size]))
        model, *more = _WHAT[size]
        command = (
            sys.executable, "-m", "twinstream", "train", model, str(data), "-o", str(run),
            "--eval-data", str(held_out), "--eval-tokens", _EVAL_TOKENS[size],
            "--backend", backend, "--ranks", "1", *(_CUDA_BF16 if backend == "cuda" else ()), *more,
        )  # fmt: skip
        printed, code = run_within(command, limit_s, {}, folder / "printed.txt")
        if code is None:
            raise JobTimeout(f"`twinstream train {model}` had not ended after {limit_s:.0f} s")
        if code:
            last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
            raise JobFailed(
                f"`twinstream train {model}` ended with code {code}: {last[0]}", printed
            )
        return _found(run)


def _write(path: Path, documents: list[str], num_bytes: int) -> None:
    """As many documents, again and again, as have so many bytes."""
    lines: list[str] = []
    written = 0
    while written < num_bytes:
        document = documents[len(lines) % len(documents)]
        lines.append(json.dumps({"text": document}))
        written += len(document.encode())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _found(run: Path) -> TrainFound:
    steps = events_of_kind(read_metrics(run / "metrics.jsonl"), StepMetrics)
    evaluations = events_of_kind(read_metrics(run / "metrics.jsonl"), EvalMetrics)
    checkpoints = events_of_kind(read_metrics(run / "metrics.jsonl"), CheckpointMetrics)
    if not steps or len(evaluations) < 2 or not checkpoints:
        raise JobFailed(
            f"`twinstream train` told of {len(steps)} steps, {len(evaluations)} evaluations and "
            f"{len(checkpoints)} checkpoints; two evaluations and a checkpoint were asked for"
        )
    if any(step.grad_norm is None for step in steps) or not _all_finite(s.loss for s in steps):
        raise JobFailed(
            f"losses are {[s.loss for s in steps]}: the run is wrong, or clipped nothing"
        )
    warm = steps[len(steps) // 2 :]
    return TrainFound(
        losses=tuple(step.loss for step in steps),
        eval_losses=tuple(found.loss for found in evaluations),
        tokens_per_s=sum(step.tokens for step in warm) / sum(step.seconds for step in warm),
        predicted_tokens_per_s=steps[-1].predicted_tokens_per_s,
        checkpoint_bytes=checkpoints[-1].bytes,
        checkpoint_s=checkpoints[-1].seconds,
    )


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)
