"""Runs of a very small model on a few texts, ready to be started."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_chains import small
from twinstream.log.metrics import CheckpointMetrics, EvalMetrics, StepMetrics
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.training.callbacks import Callback
from twinstream.training.options import TrainOptions
from twinstream.training.trainer import Trainer, TrainResult

SHAPE = ["--seq-len", "64", "--tokens-per-step", "256", "--machine", "cpu", "--backend", "cpu"]
WORDS = tuple("the quick brown fox jumps over a lazy dog while it rains in town".split())  # noqa: SIM905


def write_rows(path: Path, count: int = 120, **fields: str) -> Path:
    """Documents of 3 to 40 words, each another."""
    lines = []
    for number in range(count):
        text = " ".join(WORDS[(number * 7 + at) % 14] for at in range(3 + number * 11 % 38))
        lines.append(json.dumps(fields or {"text": f"{number} {text}"}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_config(folder: Path, preset: str = "tiny", **changes: object) -> Path:
    """A config.json of a model with two narrow layers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(to_hf_config(small(preset, **changes))))
    return path


def options(folder: Path, **given: Any) -> TrainOptions:
    """Six steps of 256 tokens, in `folder/run`."""
    model = given.pop("model", None) or str(write_config(folder / "model"))
    data = given.pop("data", None) or (str(write_rows(folder / "rows.jsonl")),)
    known = {
        "output": folder / "run", "seq_len": 64, "tokens_per_step": 256, "steps": 6,
        "machine": "cpu", "backend": "cpu", "save_every": "never", "data_workers": 0,
        "learning_rate": 1e-2, "warmup": "1", "tokenizer": "bytes",
    }  # fmt: skip
    return TrainOptions.of({"model": model, "data": data} | known | given)


class Seen(Callback):
    """Keeps what happened; asks for the end after a step, if told."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[StepMetrics] = []
        self.evals: list[EvalMetrics] = []
        self.checkpoints: list[CheckpointMetrics] = []
        self.lines: list[str] = []
        self.trainer: Trainer | None = None
        self._stop_after = stop_after

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        if metrics.step == self._stop_after:
            assert self.trainer is not None
            self.trainer.stop()

    def on_eval(self, metrics: EvalMetrics) -> None:
        self.evals.append(metrics)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.checkpoints.append(metrics)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def trained(
    wanted: TrainOptions, *, resume: bool = False, stop_after: int | None = None
) -> tuple[TrainResult, Seen]:
    """Train, looking on."""
    seen = Seen(stop_after)
    seen.trainer = Trainer(wanted, resume=resume, callbacks=[seen], tell=seen.lines.append)
    return seen.trainer.train(), seen


def state_files(folder: Path, step: int) -> dict[str, bytes]:
    """Weights, or adapters, and optimizer state of a checkpoint."""
    checkpoint = folder / f"checkpoint-{step}"
    paths = [*checkpoint.glob("*.safetensors"), *sorted((checkpoint / "optimizer").iterdir())]
    assert len(paths) > 1
    return {path.name: path.read_bytes() for path in paths}


def same_bits_after_a_stop(folder: Path, again: dict[str, Any], **given: Any) -> TrainResult:
    """A run stopped after three steps goes on with other options to the bits of one that is not."""
    whole, straight = trained(options(folder / "a", **given))
    wanted = options(folder / "b", **given)
    stopped, before = trained(wanted, stop_after=3)
    assert stopped.stopped and 3 <= stopped.step < 6
    result, after = trained(wanted.model_copy(update=again), resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert straight.losses[-1] < straight.losses[0]
    assert state_files(wanted.output, 6) == state_files(whole.folder, 6)
    return result


def there_and_back(first: TrainOptions, second: TrainOptions) -> tuple[TrainResult, list[float]]:
    """Train eight steps by the first options, go on by the second and by the first again; return
    the end and the losses of all steps."""
    begun, one = trained(first, stop_after=2)
    further, two = trained(second, resume=True, stop_after=begun.step + 1)
    result, three = trained(first, resume=True)
    assert begun.step < further.step < 8
    done = [*one.losses[: begun.step], *two.losses[: further.step - begun.step], *three.losses]
    return result, done
