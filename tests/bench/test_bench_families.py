"""Every family of transformers' causal decoders, run block by block: the table of families."""

from pathlib import Path

import pytest
import torch

from tests.traced.block_by_block import (
    SEQ_LEN,
    block_step,
    chunk_of,
    real_model,
    whole_step,
    wrong_gradients,
)
from tests.traced.families import FAMILIES, tiny_config
from twinstream.executor.modules.blocks import ModuleRefusal
from twinstream.executor.modules.packing_probe import isolates_documents
from twinstream.executor.modules.tracing import trace
from twinstream.models.traced import ModuleSource, TracedModel
from twinstream.schedule.files import write_text

PAGE = Path("docs/benchmarks/families.md")


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore")
def test_bench_families():
    rows = [row_of(family) for family in FAMILIES]
    write_text(page_of(rows), PAGE)
    assert sum(row[1] == "bits" for row in rows) >= 100


def row_of(family: str) -> tuple[str, ...]:
    """Family, result, kinds of blocks, edges, FLOPs, peak, packing."""
    source = ModuleSource(config=tiny_config(family))
    try:
        document = trace(source, dtype="float32", seq_len=SEQ_LEN)
    except ModuleRefusal as error:
        return family, f"refused: {error}", *[""] * 5
    model = real_model(document.source)
    ids, labels = chunk_of(document)
    whole, blocks = whole_step(model, ids, labels), block_step(document, model, ids, labels)
    wrong = wrong_gradients(whole, blocks)
    bits = not wrong and torch.equal(whole.loss, blocks.loss)
    peaks = [task[2] for task in blocks.tasks]
    return (
        family,
        "bits" if bits else f"{max(wrong.values(), default=0):.0e} off",
        str(len(document.kinds)),
        str(num_edges(document)),
        "equal" if all(task[1] for task in blocks.tasks) else "differ",
        f"{min(peaks):.3f} to {max(peaks):.3f}",
        isolates_documents(source),
    )


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


def page_of(rows: list[tuple[str, ...]]) -> str:
    """The page."""
    num_bits = sum(row[1] == "bits" for row in rows)
    refused = sum(row[1].startswith("refused") for row in rows)
    head = "| family | loss and gradients | kinds | edges | FLOPs | peak | packed |"
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return (
        "# Families of decoders, block by block\n\n"
        f"{num_bits} of {len(rows)} families of transformers give the loss and every gradient of "
        f"their own backward to the bit, {refused} are refused. Tiny random models, float32, CPU, "
        f"2 x {SEQ_LEN} tokens; `pytest -m bench tests/bench/test_bench_families.py`. *Kinds* of "
        "blocks; *edges*: what blocks read of others than the one before; *peak*: traced to "
        "measured bytes of temporaries, the least and the most of all tasks; *packed*: whether "
        "documents in one row see each other.\n\n"
        f"{head}\n|{'---|' * 7}\n" + "\n".join(lines) + "\n"
    )
