"""Batch norm inside blocks: its statistics are state, carried from step to step, to the bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F  # noqa: N812

from tests.front_door.command_line import call
from tests.training.small_runs import Seen, options, same_bits_after_a_stop, trained
from twinstream.data.spans import NO_LABEL
from twinstream.executor.weights.checkpoint_files import CheckpointFiles
from twinstream.schedule.python_file import object_of_file
from twinstream.training.run.steps import StepBatches
from twinstream.training.trainer import Trainer

RESNET = """
import torch
from torch import nn

SIDE, CLASSES = 6, 10

class Pixels(nn.Module):
    '''Token ids of digits as an image, through the stem.'''
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
    def forward(self, ids):
        image = ids[:, : SIDE * SIDE].view(-1, 1, SIDE, SIDE).float() / 128
        return self.stem(image.to(self.stem.weight.dtype))

class Stage(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.one = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.short = nn.Conv2d(width, out, 1, stride)
    def forward(self, x):
        made = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(made)) + self.short(x))

class Pool(nn.Module):
    '''Of the image a row of features for every token.'''
    def __init__(self, seq_len):
        super().__init__()
        self.seq_len = seq_len
    def forward(self, x):
        return x.mean((2, 3))[:, None].expand(-1, self.seq_len, -1).contiguous()

class ResNet(nn.Module):
    seq_len = SIDE * SIDE + 1
    def __init__(self):
        super().__init__()
        self.pixels = Pixels(8)
        self.blocks = nn.ModuleList(
            [Stage(8, 8, 1), Stage(8, 16, 2), Stage(16, 16, 1), Pool(self.seq_len)]
        )
        self.head = nn.Linear(16, 260)
    def forward(self, input_ids):
        x = self.pixels(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build(): return ResNet()
"""
LENGTH = 37


@pytest.fixture
def given(tmp_path: Path) -> dict[str, object]:
    """The options of a run on images of 6 x 6 digits, each with the class that follows them."""
    own = tmp_path / "resnet.py"
    own.write_text(RESNET)
    rows = tmp_path / "images.jsonl"
    lines = []
    for number in range(160):
        digits = "".join(str((number * (at % 7 + 1) + at * at) % 10) for at in range(36))
        lines.append(json.dumps({"prompt": digits, "completion": str(number % 3)}))
    rows.write_text("\n".join(lines) + "\n")
    return {
        "model": f"{own}:build", "data": (str(rows),), "seq_len": LENGTH, "steps": 10,
        "chunk_tokens": 4 * LENGTH, "tokens_per_step": 8 * LENGTH, "tokenizer": "bytes",
    }  # fmt: skip


def test_ten_steps_are_those_of_plain_torch(tmp_path: Path, given: dict[str, object]) -> None:
    seen = Seen()
    wanted = options(tmp_path, **given, weight_decay=0.0, max_grad_norm=0.0)
    trainer = Trainer(wanted, callbacks=[seen])
    prepared = trainer.prepare()
    result = trainer.train()
    torch.manual_seed(wanted.seed)
    model = object_of_file(tmp_path / "resnet.py", "build")().train()
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    plan = prepared.plan
    batches = StepBatches(
        plan.chunks(prepared.data, wanted.seed), plan.chunks_per_step, 1, plan.pieces
    )
    losses = []
    for step in range(1, 11):
        adamw.zero_grad()
        adamw.param_groups[0]["lr"] = prepared.rate(step)
        found, total = batches.step(step), 0.0
        for chunk in found.chunks:
            ids = torch.from_numpy(chunk.ids).long().view(-1, LENGTH)
            labels = torch.from_numpy(chunk.labels).long()
            labels = labels.masked_fill(labels < 0, NO_LABEL)
            logits = model(ids).view(-1, 260)
            loss = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
            (loss / found.targets).backward()
            total += loss.item() / found.targets
        losses.append(total)
        adamw.step()
    assert seen.losses == pytest.approx(losses, abs=1e-5)
    assert seen.losses[0] == pytest.approx(losses[0], abs=1e-6)
    assert result.model is not None
    written = load_file(result.model / "model.safetensors")
    state = model.state_dict()
    assert written.keys() == state.keys()
    for name in state:
        if "num_batches" in name:
            assert int(written[name]) == 20  # two chunks a step
        elif "running" in name:
            assert written[name] == pytest.approx(state[name], abs=1e-4)


def test_statistics_of_the_first_step_are_torchs_to_the_bit(
    tmp_path: Path, given: dict[str, object]
) -> None:
    wanted = options(tmp_path, **(given | {"steps": 1}))
    trainer = Trainer(wanted)
    prepared = trainer.prepare()
    result = trainer.train()
    torch.manual_seed(wanted.seed)
    model = object_of_file(tmp_path / "resnet.py", "build")().train()
    plan = prepared.plan
    chunks = StepBatches(
        plan.chunks(prepared.data, wanted.seed), plan.chunks_per_step, 1, plan.pieces
    ).step(1).chunks  # fmt: skip
    with torch.no_grad():
        for chunk in chunks:
            model(torch.from_numpy(chunk.ids).long().view(-1, LENGTH))
    assert result.model is not None
    written = load_file(result.model / "model.safetensors")
    statistics = {name: x for name, x in model.state_dict().items() if "running" in name}
    assert len(statistics) == 12
    assert all(torch.equal(written[name], statistics[name]) for name in statistics)


def test_every_gradient_is_torchs_to_the_bit(tmp_path: Path, given: dict[str, object]) -> None:
    """Told by AdamW's first moment after one step; streams compute on one thread each."""
    one = {"steps": 1, "tokens_per_step": 4 * LENGTH, "max_grad_norm": 0.0}
    wanted = options(tmp_path, **(given | one))
    trainer = Trainer(wanted)
    prepared = trainer.prepare()
    result = trainer.train()
    torch.manual_seed(wanted.seed)
    model = object_of_file(tmp_path / "resnet.py", "build")().train()
    plan, spec = prepared.plan, prepared.model.spec
    batches = StepBatches(
        plan.chunks(prepared.data, wanted.seed), plan.chunks_per_step, 1, plan.pieces
    )
    found, threads = batches.step(1), torch.get_num_threads()
    (chunk,) = found.chunks
    labels = torch.from_numpy(chunk.labels).long()
    labels = labels.masked_fill(labels < 0, NO_LABEL)
    torch.set_num_threads(1)
    try:
        logits = model(torch.from_numpy(chunk.ids).long().view(-1, LENGTH)).view(-1, 260)
        loss = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
        (loss * torch.tensor(1 / found.targets)).backward()
    finally:
        torch.set_num_threads(threads)
    files = CheckpointFiles(result.folder / "checkpoint-1")
    named, compared = dict(model.named_parameters()), 0
    for group in spec.parameter_groups:
        if group in spec.untrained_groups:
            continue
        moments = files.read(f"opt.{group}").view(torch.float32)
        for inner in spec.group_layout(group).tensors:
            start = inner.offset_bytes // 4
            first = moments[start : start + inner.size_bytes // 4]
            gradient = named[inner.name].grad
            assert gradient is not None
            assert torch.equal(first, gradient.reshape(-1) * (1.0 - 0.9)), inner.name
            compared += 1
    assert compared == len(named) == 28


def test_a_run_goes_on_to_the_same_statistics_under_another_policy(
    tmp_path: Path, given: dict[str, object]
) -> None:
    again = {"policy": "streaming", "host_mem": "1GiB"}
    same_bits_after_a_stop(tmp_path, again, **(given | {"steps": 6}))


def test_an_evaluation_takes_the_statistics(tmp_path: Path, given: dict[str, object]) -> None:
    data = given["data"]
    assert isinstance(data, tuple)
    result, seen = trained(
        options(tmp_path, **given, eval_data=data, eval_every="10", eval_tokens=4 * LENGTH * 40)
    )
    model = object_of_file(tmp_path / "resnet.py", "build")()
    assert result.model is not None
    model.load_state_dict(load_file(result.model / "model.safetensors"))
    model.eval()
    losses = []
    for line in Path(data[0]).read_text().splitlines():
        row = json.loads(line)
        ids = torch.tensor([[*row["prompt"].encode(), ord(row["completion"])]])
        with torch.no_grad():
            logits = model(F.pad(ids, (0, LENGTH - ids.shape[1])))[0, 35]
        losses.append(float(F.cross_entropy(logits, ids[0, 36])))
    assert seen.evals[-1].loss == pytest.approx(sum(losses) / len(losses), abs=0.2)


def test_other_lengths_than_the_modules_own_are_refused(
    tmp_path: Path, given: dict[str, object]
) -> None:
    told = call("trace", given["model"], "--seq-len", 64, "-o", tmp_path / "m.json")
    assert told.code == 2 and "is of sequences of 37 tokens" in told.err
    asked = ("plan", "--model", given["model"], "--machine", "cpu", "--seq-len", LENGTH)
    assert call(*asked, "--tokens-per-step", 8 * LENGTH).code == 0
