"""Run each family of transformers' causal decoders block by block as it is trained, and table it.

    python -m tests.traced.families_page                   # all, and docs/record/families.*
    python -m tests.traced.families_page --few             # twelve, printed
    python -m tests.traced.families_page gemma3_text phi3  # those, printed

It ends with 1 where a family is not as `tests/traced/families.py` says of it. `make families` does
it with the newest transformers that is allowed, with TRANSFORMERS=4.57.0 the oldest.
"""

import argparse
import csv
import io
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from tests.traced.block_by_block import (
    SEQ_LEN,
    block_step,
    chunk_of,
    real_model,
    whole_step,
    wrong_gradients,
)
from tests.traced.families import FAMILIES, FEW, NOT_TO_THE_BIT, REFUSED, tiny_config
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.packing_probe import isolates_documents
from twinstream.executor.modules.tracing import trace
from twinstream.models.providers.traced import ModuleSource, TracedModel
from twinstream.schedule.files import write_text

PAGE = Path("docs/record/families.md")
ROWS = PAGE.with_suffix(".csv")
HEAD = ("family", "loss and gradients", "kinds", "edges", "FLOPs", "peak", "packed")
_CLOSE = 1e-4  # of a family whose sums are in another order
ABSENT = "not of this version"
OTHERS = "## Other runs\n"


def main(arguments: list[str]) -> int:
    """Make the table; 0 where all is as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", nargs="*", choices=[*FAMILIES, []], help="by default all")
    parser.add_argument("--few", action="store_true", help="twelve of the most used")
    wanted = parser.parse_args(arguments)
    names = wanted.family or (FEW if wanted.few else list(FAMILIES))
    warnings.simplefilter("ignore")
    rows, wrong = [], []
    for name in names:
        rows.append(row := row_of(name))
        print(line_of(row), flush=True)
        if not as_expected(row):
            wrong.append(name)
    if names == list(FAMILIES):
        write_text(csv_of(rows), ROWS)
        write_text(page_of(rows), PAGE)
    print(f"transformers {versions()[0]}: {len(rows)} families, not as expected: {wrong or 'none'}")
    return bool(wrong)


def versions() -> tuple[str, str]:
    """Of transformers and torch."""
    import transformers

    return str(transformers.__version__), str(torch.__version__)


def row_of(family: str) -> tuple[str, ...]:
    """Family, result, kinds of blocks, edges, FLOPs, peak, packing."""
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        return family, ABSENT, *[""] * 5
    try:
        source = ModuleSource(config=tiny_config(family))
        document = trace(source, dtype="float32", seq_len=SEQ_LEN)
    except ModuleRefusal as error:
        return family, f"refused: {error}", *[""] * 5
    model = real_model(document.source)
    ids, labels = chunk_of(document)
    whole, blocks = whole_step(model, ids, labels), block_step(document, model, ids, labels)
    off = wrong_gradients(whole, blocks)
    bits = not off and torch.equal(whole.loss, blocks.loss)
    peaks = [task[2] for task in blocks.tasks]
    return (
        family,
        "bits" if bits else f"{max(off.values(), default=0):.0e} off",
        str(len(document.kinds)),
        str(num_edges(document)),
        "equal" if all(task[1] for task in blocks.tasks) else "differ",
        f"{min(peaks):.3f} to {max(peaks):.3f}",
        isolates_documents(source),
    )


def as_expected(row: tuple[str, ...]) -> bool:
    """Whether a row is what the tests' table of families says."""
    family, result, *_ = row
    if result in ("bits", ABSENT):
        return True
    if family in REFUSED:
        return result.startswith("refused") and REFUSED[family] in result
    if versions()[0].startswith("4.") and result.startswith("refused"):  # experts in a loop
        return "aten.nonzero" in result and "transformers 5 computes experts" in result
    return family in NOT_TO_THE_BIT and float(result.removesuffix(" off")) < _CLOSE


def new_families() -> list[str]:
    """Causal decoders of the installed transformers of which the table has no row."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES))


def num_edges(document: TracedModel) -> int:
    """Inputs of blocks and postlude from a block that is not the one before."""
    last = len(document.calls)
    readers = [*((i, call.inputs) for i, call in enumerate(document.calls))]
    readers.append((last, document.postlude.inputs))
    return sum(
        name.startswith("block.") and int(name.split(".")[1]) != index - 1
        for index, inputs in readers
        for name in inputs
    )


def line_of(row: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(row)} |"


def csv_of(rows: list[tuple[str, ...]]) -> str:
    """Return the file of all rows, under the names of its columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEAD, *rows])
    return text.getvalue()


def page_of(rows: list[tuple[str, ...]]) -> str:
    """Return the page: counts, the families that are not to the bit, and what is in the file."""
    num_bits = sum(row[1] == "bits" for row in rows)
    refused = [row[0] for row in rows if row[1].startswith("refused")]
    off = [f"{row[0]} ({row[1]})" for row in rows if row[1].endswith(" off")]
    packed = Counter(row[-1] for row in rows if row[-1])
    transformers, torch_version = versions()
    return (
        "# Families of decoders, block by block\n\n"
        "Which families of transformers run block by block, to which bits, and which of them see "
        "other documents when packed?\n\n"
        f"{num_bits} of {len(rows)} families of transformers {transformers} give the loss and "
        f"every gradient of their own\nbackward to the bit, {len(refused)} are refused. "
        f"Tiny random models, float32, CPU, torch {torch_version}, 2 x {SEQ_LEN} tokens, "
        f"{date.today()};\n`python -m tests.traced.families_page` makes this page and "
        f"[its table]({ROWS.name}), a row a family:\n\n"
        "- *kinds* of blocks; *edges*: what blocks read of others than the one before;\n"
        "- *FLOPs*: traced against the real run; *peak*: traced to measured bytes of temporaries, "
        "the least and the most of all tasks;\n"
        "- *packed*: whether documents in one row see each other (`isolated_by_mask`: not with "
        "masks that know the positions):\n  "
        + ", ".join(f"{name} {count}" for name, count in packed.most_common())
        + f".\n\nNot to the bit: {', '.join(off) or 'none'}. Refused, with the reason in the "
        + f"table: {', '.join(refused) or 'none'}.\n\n"
        + "Without a row, since they read images or sound, encode, or have no small config: "
        + f"{', '.join(new_families())}.\n"
        + kept_of(PAGE)
    )


def kept_of(page: Path) -> str:
    """What a person wrote behind the table, of other runs."""
    text = page.read_text() if page.exists() else ""
    return f"\n{text[text.index(OTHERS) :]}" if OTHERS in text else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
