"""How far predictions are off of runs that read their frozen base from a drive of a given rate, or
keep what they train there.

python -m benchmarks.accuracy.drive FOLDER [--machine probed.toml] [--written]

Six runs of a LoRA of 8 layers of 3 MB beside random weights, in float32 on this CPU; the reader
keeps to the rate, and reads are most of each step. With --written six that train all of it, whose
reads and writes take turns at two rates. FOLDER gets the runs, and copies of the weights.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.models.presets import load_preset
from twinstream.training.trainer import train

SPEC = load_preset("tiny").model_copy(
    update={"num_layers": 8, "d_model": 256, "head_dim": 64, "d_ff": 1024}
)
STEPS = 4


@dataclass(frozen=True)
class Case:
    """Caps, the rate of the drive, and tokens of a step."""

    device_mem: str
    host_mem: str
    bandwidth: str
    tokens: int


CASES = (
    Case("10MiB", "8MiB", "10MB/s", 128),
    Case("10MiB", "16MiB", "8MB/s", 128),
    Case("16MiB", "8MiB", "5MB/s", 256),
    Case("12MiB", "12MiB", "10MB/s", 256),
    Case("8MiB", "10MiB", "12MB/s", 256),
    Case("14MiB", "9MiB", "6MB/s", 128),
)


WRITTEN = (
    Case("24MiB", "48MiB", "30MB/s,15MB/s", 128),
    Case("24MiB", "56MiB", "20MB/s,20MB/s", 128),
    Case("32MiB", "48MiB", "40MB/s,10MB/s", 256),
    Case("24MiB", "64MiB", "15MB/s,15MB/s", 256),
    Case("40MiB", "48MiB", "20MB/s,10MB/s", 128),
    Case("32MiB", "52MiB", "15MB/s,30MB/s", 256),
)


def errors(folder: Path, machine: str | None, *, written: bool) -> Iterator[float]:
    """Yield and print the relative error of each case's tokens/s."""
    model, text = folder / "model", folder / "text.txt"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(to_hf_config(SPEC)))
    text.write_text("\n\n".join(f"{n} words of a document, and some more" for n in range(300)))
    for case in WRITTEN if written else CASES:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        result = train(
            model / "config.json", text, run, lora=None if written else "r=4",
            dtype="float32", steps=STEPS, seq_len=64,
            tokens_per_step=case.tokens, tokenizer="bytes", data_workers=0, save_every="never",
            backend="cpu", machine=machine, device_mem=case.device_mem, host_mem=case.host_mem,
            disk=folder, disk_bandwidth=case.bandwidth,
        )  # fmt: skip
        assert result.measured_tokens_per_s is not None, "it has trained"
        error = result.predicted_tokens_per_s / result.measured_tokens_per_s - 1
        print(
            f"{case.device_mem} {case.host_mem} {case.bandwidth} {case.tokens}: predicted "
            f"{result.predicted_tokens_per_s:.1f} tokens/s, measured "
            f"{result.measured_tokens_per_s:.1f}, {error:+.1%}",
            flush=True,
        )
        yield error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine")
    parser.add_argument("--written", action="store_true")
    given = parser.parse_args()
    found = [abs(error) for error in errors(given.folder, given.machine, written=given.written)]
    print(f"mean {fmean(found):.1%}, worst {max(found):.1%}")


if __name__ == "__main__":
    main()
