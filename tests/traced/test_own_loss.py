"""A loss of a person's own: autograd's numbers through the executor, priced, or refused by name."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.front_door.command_line import call, error_of
from tests.training.small_runs import (
    Seen,
    options,
    same_bits_after_a_stop,
    state_files,
    trained,
    write_config,
    write_rows,
)
from tests.training.test_against_torch import summed_loss
from twinstream.data.packing import Chunk
from twinstream.executor.modules.rows_and_values import check_own_loss
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import OwnFunction
from twinstream.training.run.steps import StepBatches
from twinstream.training.trainer import Trainer

LOSS = """
import torch
from torch.nn import functional as F

def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)

def usual(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")

def summed(logits, labels):
    return F.cross_entropy(logits, labels)

def fails(logits, labels):
    return logits.nothing

def hardest(logits, labels):
    each = usual(logits, labels)
    return each * (each >= each.detach().median())

def over_rows(logits, labels):
    return usual(logits, labels) / len(labels)

def of_pairs(logits, labels):
    each = usual(logits, labels)
    return each + each.unflatten(0, (-1, 2)).mean(1).repeat_interleave(2)

def by_counts(logits, labels):
    return usual(logits, labels) / labels.bincount()[labels]

def sure(logits, labels):
    each = usual(logits, labels)
    return each * (1 + (each < 0.1).sum())

def by_place(logits, labels):
    return usual(logits, labels) * torch.arange(len(labels))

def of_detached(logits, labels):
    return usual(logits.detach(), labels)

def correct(logits, labels):
    return (logits.argmax(-1) == labels)

def itself(logits, labels):
    return labels

def infinite(logits, labels):
    return usual(logits, labels) / 0

def dropped(logits, labels):
    return usual(F.dropout(logits), labels)

def focal(logits, labels):
    each = usual(logits, labels)
    return each * (1 - (-each).exp()) ** 2

def in_place(logits, labels):
    return usual(logits.mul_(0.5), labels.clamp_(max=10))

class Weighted(torch.nn.Module):
    def forward(self, logits, labels):
        size = logits.shape[1]
        return usual(logits @ torch.eye(size), labels) * torch.linspace(1, 2, size)[labels]

weighted = Weighted()
"""


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    path = tmp_path / "my_loss.py"
    path.write_text(LOSS)
    return path


def smoothed_loss(model: torch.nn.Module, chunk: Chunk) -> torch.Tensor:
    total, at = torch.zeros(()), 0
    for length in chunk.lengths:
        ids = torch.from_numpy(chunk.ids[at : at + length]).long()[None]
        labels = torch.from_numpy(chunk.labels[at : at + length]).long()
        logits = model(input_ids=ids).logits[0].float()
        valid = labels >= 0
        if valid.any():
            total = total + F.cross_entropy(
                logits[valid], labels[valid], reduction="sum", label_smoothing=0.1
            )
        at += length
    return total


def test_a_step_has_the_loss_and_the_gradients_of_plain_torch(tmp_path: Path, losses: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = str(write_config(tmp_path / "model"))
    found = {}
    for name, loss_of in (("smoothed", smoothed_loss), ("usual", summed_loss)):
        seen = Seen()
        wanted = options(
            tmp_path, model=model, loss=f"{losses}:{name}", output=tmp_path / name,
            max_grad_norm=1e9, learning_rate=0.0, weight_decay=0.0,
        )  # fmt: skip
        trainer = Trainer(wanted, callbacks=[seen])
        prepared = trainer.prepare()
        trainer.train()
        reference = AutoModelForCausalLM.from_pretrained(
            tmp_path / name / "model", dtype=torch.float32
        )
        plan = prepared.plan
        stream = plan.chunks(prepared.data, wanted.seed)
        step = StepBatches(stream, plan.chunks_per_step, 1, plan.pieces).step(1)
        loss = sum(loss_of(reference, chunk) for chunk in step.chunks) / step.targets
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
        assert seen.losses[0] == pytest.approx(loss.item(), abs=1e-5)
        assert seen.steps[0].grad_norm == pytest.approx(norm, rel=1e-4)
        found[name] = seen.losses[0]
    assert found["smoothed"] != pytest.approx(found["usual"], abs=1e-3)


def test_a_run_goes_on_under_another_policy_to_the_same_bits(tmp_path: Path, losses: Path) -> None:
    again = {"policy": "streaming", "host_mem": "1GiB"}
    same_bits_after_a_stop(tmp_path, again, loss=f"{losses}:smoothed")


def test_cross_entropy_written_by_hand_trains_as_the_module_does(
    tmp_path: Path, losses: Path
) -> None:
    """Of a module that is traced anyway, to the bit."""
    from tests.traced.test_trained import write_model

    model = str(write_model(tmp_path / "model", "gpt2", weights=True))
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    given = {"model": model, "data": rows}
    one, _ = trained(options(tmp_path / "a", **given))
    other, _ = trained(options(tmp_path / "b", **given, loss=f"{losses}:usual"))
    weights = [state_files(result.folder, 6)["model.safetensors"] for result in (one, other)]
    assert weights[0] == weights[1]


def test_it_is_priced_and_part_of_a_traced_model(tmp_path: Path, losses: Path) -> None:
    config = write_config(tmp_path / "model")
    model = tmp_path / "model.json"
    asked = ("--seq-len", 64, "--loss", f"{losses}:smoothed")
    assert call("trace", config, *asked, "-o", model).code == 0
    assert json.loads(model.read_text())["source"]["loss"]["function"] == "smoothed"
    step = ("--machine", "cpu", "--tokens-per-step", 256)
    planned = call("plan", "--model", model, "--seq-len", 64, *step, "--json")
    direct = call("plan", "--model", config, *asked, *step, "--json")
    assert planned.json()["tokens_per_s"] == direct.json()["tokens_per_s"]


MIXES = "mixes rows: what it makes of one may not depend on others"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hardest", MIXES), ("over_rows", MIXES), ("of_pairs", "fails"), ("by_counts", MIXES),
        ("sure", MIXES), ("by_place", MIXES), ("of_detached", "has no gradient"),
        ("correct", "makes bool, which has no gradient"), ("itself", "makes int64"),
        ("infinite", "not finite"), ("dropped", "is not the same twice"),
        ("smoothed", None), ("focal", None), ("in_place", None), ("weighted", None),
    ],
)  # fmt: skip
def test_a_loss_is_tried_on_rows_whole_in_parts_and_in_another_order(
    losses: Path, name: str, says: str | None
) -> None:
    loss = OwnFunction.of(f"{losses}:{name}").load()
    with nullcontext() if says is None else pytest.raises(TwinstreamError, match=says):
        check_own_loss(loss, vocab_size=50)


def test_one_that_mixes_rows_is_refused_by_every_command(tmp_path: Path, losses: Path) -> None:
    config, loss = write_config(tmp_path / "model"), ("--loss", f"{losses}:hardest")
    step = ("--seq-len", 64, "--tokens-per-step", 256, "--machine", "cpu")
    for command in (
        ("plan", "--model", config, *step), ("run", "--model", config, *step, "--backend", "cpu"),
        ("trace", config, "--seq-len", 64),
        ("train", config, write_rows(tmp_path / "rows.jsonl"), *step, "-o", tmp_path / "run"),
    ):  # fmt: skip
        assert "mixes rows" in " ".join(error_of(*command, *loss).split())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("my_loss.py:summed", "expected a loss for each row"),
        ("my_loss.py:fails", "the loss fails fails: AttributeError"),
        ("my_loss.py", "names no function of a file"),
        ("none.py:loss", "cannot read"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, losses: Path, loss: str, says: str) -> None:
    wanted = options(tmp_path, loss=str(losses.parent / loss))
    with pytest.raises(TwinstreamError, match=says):
        Trainer(wanted).prepare()
    with pytest.raises(TwinstreamError, match="is described already"):
        Trainer(options(tmp_path, model="tiny", loss=f"{losses}:usual")).prepare()


FROM_BLOCKS = """
import torch
from torch import nn
import twinstream as ts
from my_loss import smoothed

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
    def forward(self, x): return x + torch.relu(self.linear(self.norm(x)))

def modules(): return [nn.Embedding(260, 32), Mix(), Mix(), nn.Linear(32, 260)]
def build(): return ts.from_blocks(modules(), loss=smoothed)
def usual(): return ts.from_blocks(modules())
def few(): return ts.from_blocks(modules()[:2])
def none(): return ts.from_blocks([1, 2, 3])
"""


def test_blocks_become_a_module_with_their_loss(tmp_path: Path, losses: Path) -> None:
    own = tmp_path / "of_blocks.py"
    own.write_text(FROM_BLOCKS)
    rows = (str(write_rows(tmp_path / "rows.jsonl")),)
    given = {"data": rows, "learning_rate": 1e-2}
    _, inside = trained(options(tmp_path / "a", model=f"{own}:build", **given))
    loss = f"{losses}:smoothed"
    _, beside = trained(options(tmp_path / "b", model=f"{own}:usual", loss=loss, **given))
    _, plain = trained(options(tmp_path / "c", model=f"{own}:usual", **given))
    assert inside.losses == beside.losses != plain.losses
    for name in ("few", "none"):
        told = call("trace", f"{own}:{name}", "-o", tmp_path / "m.json")
        assert told.code == 2 and "from_blocks got" in told.err
