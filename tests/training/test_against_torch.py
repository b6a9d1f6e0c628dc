"""Twenty steps beside a plain PyTorch loop: autograd, torch.optim.AdamW, clip_grad_norm_."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.weights.small_models import random_model, save
from tests.training.small_runs import Seen, options, write_rows
from twinstream.data.packing import Chunk
from twinstream.data.spans import NO_LABEL
from twinstream.training.preparing import Prepared
from twinstream.training.run.steps import StepBatches
from twinstream.training.trainer import Trainer

NUM_STEPS, MAX_NORM = 20, 0.5


def wanted_options(tmp_path: Path, model: Path, kind: str) -> Any:
    if kind == "packed":  # two rounds of chunks with several documents and padding
        rows = write_rows(tmp_path / "rows.jsonl").read_text().upper()  # in a vocabulary of 97
        data, shape = tmp_path / "upper.jsonl", {"seq_len": 64, "chunk_tokens": 128}
        data.write_text(rows.replace('"TEXT"', '"text"'))
    else:  # each sequence in two slices
        data, shape = tmp_path / "text.txt", {"seq_len": 64, "chunk_tokens": 32}
        data.write_text("".join(f"LINE {n} OF {n * n} LINES\n" for n in range(400)))
    return options(
        tmp_path, model=str(model), data=(str(data),), steps=NUM_STEPS, tokens_per_step=256,
        warmup="5", decay="cosine", weight_decay=0.1, max_grad_norm=MAX_NORM, beta2=0.95,
        learning_rate=3e-3, **shape,
    )  # fmt: skip


def reference(prepared: Prepared, model: torch.nn.Module) -> tuple[list[float], list[float]]:
    """Losses and norms of the same steps, each document by itself."""
    plan, opts = prepared.plan, prepared.options
    stream = plan.chunks(prepared.data, opts.seed)
    batches = StepBatches(stream, plan.chunks_per_step, 1, plan.pieces)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": opts.weight_decay},
         {"params": others, "weight_decay": 0.0}],
        betas=(prepared.recipe.beta1, prepared.recipe.beta2), eps=opts.eps,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(1, NUM_STEPS + 1):
        for group in adamw.param_groups:
            group["lr"] = prepared.rate(step)
        adamw.zero_grad()
        found = batches.step(step)
        loss = sum(summed_loss(model, chunk) for chunk in found.chunks) / found.targets
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        adamw.step()
    return losses, norms


def summed_loss(model: torch.nn.Module, chunk: Chunk) -> torch.Tensor:
    total, at = torch.zeros(()), 0
    for length in chunk.lengths:
        ids = torch.from_numpy(chunk.ids[at : at + length]).long()[None]
        labels = torch.from_numpy(chunk.labels[at : at + length]).long()
        if (labels >= 0).any():
            logits = model(input_ids=ids).logits[0].float()
            total = total + torch.nn.functional.cross_entropy(
                logits, labels.clamp(min=NO_LABEL), ignore_index=NO_LABEL, reduction="sum"
            )
        at += length
    return total


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "packed"), ("qwen3_tied", "packed"), ("qwen2_tied", "sliced")]
)
def test_twenty_steps_are_those_of_plain_torch(name: str, kind: str, tmp_path: Path) -> None:
    model = random_model(name, torch.float32)
    save(model, tmp_path / "model")
    seen = Seen()
    trainer = Trainer(wanted_options(tmp_path, tmp_path / "model", kind), callbacks=[seen])
    prepared = trainer.prepare()
    work = prepared.plan.workload
    assert (work.chunk_tokens < work.seq_len) == (kind == "sliced")
    losses, norms = reference(prepared, model)
    trainer.train()
    assert max(norms) > MAX_NORM  # some steps are clipped
    assert seen.losses == pytest.approx(losses, abs=1e-5)
    assert [step.grad_norm for step in seen.steps] == pytest.approx(norms, rel=1e-4)
