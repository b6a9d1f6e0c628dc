"""Our plans beside what LLMQ states of itself on one node of cards without NVLink, in bfloat16.

python -m benchmarks.accuracy.one_node peers_one_node.csv -o rows.csv

Each row of several GPUs is planned as `plan --machine CARD --gpus N` does: any layout that runs,
any chunks, optimizer state in bfloat16 as LLMQ has it. Host memory is the profile's. Rows that are
there already are kept, so a run goes on.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import twinstream as ts
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.decoders.to_hf_config import to_hf_config
from twinstream.schedule.errors import TwinstreamError

MACHINES = {
    "RTX 4090": "rtx4090", "RTX 5090": "rtx5090", "RTX PRO 6000": "rtx_pro_6000", "L40S": "l40s",
}  # fmt: skip
# Qwen2.5's config.json: layers, width, heads, KV heads, feed-forward width, vocabulary, tied.
SIZES = {
    "0.5B": (24, 896, 14, 2, 4864, 151936, True),
    "1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "3B": (36, 2048, 16, 2, 11008, 151936, True),
    "7B": (28, 3584, 28, 4, 18944, 152064, False),
    "14B": (48, 5120, 40, 8, 13824, 152064, False),
    "32B": (64, 5120, 40, 8, 27648, 152064, False),
}
TOKENS = 524288  # of a step, where the table does not say
COLUMNS = (
    "gpu", "gpus", "model", "measured_tokens_per_s", "predicted_tokens_per_s", "error", "bar",
    "layout", "device_gib", "host_gib", "above_bound",
)  # fmt: skip
_GIB = 2**30


def qwen(name: str) -> ModelSpec:
    """Return a Qwen2.5 by its size, as `Qwen2.5-7B`."""
    layers, width, heads, kv_heads, d_ff, vocab, tied = SIZES[name.removeprefix("Qwen2.5-")]
    return ModelSpec(
        name=name.lower(), num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=width // heads, d_ff=d_ff, vocab_size=vocab, norm_eps=1e-6, rope_theta=1e6,
        qkv_bias=True, tied_embeddings=tied,
    )  # fmt: skip


def wanted(path: Path) -> Iterator[dict[str, str]]:
    """LLMQ's rows in bfloat16 on several cards."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            is_asked = (row["trainer"], row["dtype"]) == ("llmq", "bf16") and int(row["gpus"]) > 1
            if is_asked and row["gpu"] in MACHINES:
                yield row


def planned(row: dict[str, str], folder: Path) -> dict[str, str]:
    """A row beside our plan for it; `layout` says why where there is none."""
    config = folder / "config.json"
    config.write_text(json.dumps(to_hf_config(qwen(row["model"]))))
    found = {name: row[name] for name in ("gpu", "gpus", "model")}
    found["measured_tokens_per_s"] = row["tokens_per_s"]
    try:
        answer = ts.query(
            model=str(config), machine=MACHINES[row["gpu"]], ranks=int(row["gpus"]),
            seq_len=int(row["seq_len"]), tokens_per_step=int(row["tokens_per_step"] or TOKENS),
            optimizer_state="model",
        ).answer()  # fmt: skip
    except TwinstreamError as error:
        return found | {"layout": str(error)}
    summary = answer.summary
    speed, bar = summary.tokens_per_s, summary.uncertainty
    return found | {
        "predicted_tokens_per_s": f"{speed:.0f}",
        "error": f"{speed / float(row['tokens_per_s']) - 1:+.3f}",
        "bar": "" if bar is None else f"{bar.mean:.2f}",
        "layout": answer.layout_text,
        "device_gib": f"{summary.device_peak_bytes / _GIB:.1f}",
        "host_gib": f"{summary.host_peak_bytes / _GIB:.1f}",
        "above_bound": "" if answer.gap is None else f"{answer.gap:.3f}",
    }


def main() -> None:
    """Plan what is not in the output yet, a line at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    given = parser.parse_args()
    done: list[dict[str, str]] = []
    if given.output.exists():
        with given.output.open(encoding="utf-8", newline="") as file:
            done = list(csv.DictReader(file))
    known = {(row["gpu"], row["gpus"], row["model"]) for row in done}
    for row in wanted(given.table):
        size = row["model"].removeprefix("Qwen2.5-")
        if (row["gpu"], row["gpus"], row["model"]) in known or size not in given.sizes:
            continue
        with TemporaryDirectory() as folder:
            done.append(planned(row, Path(folder)))
        with given.output.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(done)
        print(done[-1], file=sys.stderr)
    errors = [float(row["error"]) for row in done if row.get("error")]
    mean, bias = (fmean(map(abs, errors)), fmean(errors)) if errors else (0.0, 0.0)
    print(f"{len(done)} rows, {len(errors)} planned: mean error {mean:.1%}, bias {bias:+.1%}")


if __name__ == "__main__":
    main()
