"""Models that take tensors of samples by name: images, lists of lookups, masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch.nn import functional as F  # noqa: N812

from tests.front_door.command_line import call, error_of
from tests.training.small_runs import Seen, state_files, trained
from twinstream.data.data_error import DataError
from twinstream.data.options import Source
from twinstream.data.packing import Chunk
from twinstream.data.samples import SampleData
from twinstream.executor.modules.blocks import RowLosses
from twinstream.models.providers.traced_parts import TracedInput
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.python_file import object_of_file
from twinstream.training.options import TrainOptions
from twinstream.training.run.steps import StepBatches
from twinstream.training.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
MOMENTUM, STEPS = 0.9, 3


def given(name: str, folder: Path, count: int = 48, **more: Any) -> dict[str, Any]:
    """Options of a run of an example, on data that it has written."""
    data = folder / name
    object_of_file(EXAMPLES / f"{name}.py", "write_samples")(data, count)
    known = {
        "model": f"{EXAMPLES}/{name}.py:build", "data": (str(data),), "output": folder / "run",
        "steps": STEPS, "tokens_per_step": 32, "chunk_tokens": 8, "machine": "cpu",
        "backend": "cpu", "save_every": "never", "data_workers": 0, "optim": "sgd",
        "beta1": MOMENTUM, "weight_decay": 0.0, "max_grad_norm": 0.0, "learning_rate": 1e-2,
    }  # fmt: skip
    if name == "dlrm":
        known["loss"] = f"{EXAMPLES}/dlrm.py:click_loss"
    return known | more


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, labels, reduction="sum", ignore_index=-100)


def summed_clicks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits[:, 0], labels.float(), reduction="none").sum()


def plain(
    wanted: TrainOptions, trainer: Trainer, build: Any, loss_of: RowLosses
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a loop in plain torch, over the same samples in the same order; SGD
    with momentum written out, since torch's own rounds once less."""
    prepared = trainer.prepare()
    plan, threads = prepared.plan, torch.get_num_threads()
    batches = StepBatches(plan.chunks(prepared.data, wanted.seed), plan.chunks_per_step, 1)
    torch.set_num_threads(1)
    torch.manual_seed(wanted.seed)
    model = build().train()
    momentum = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    losses = []
    for step in range(1, STEPS + 1):
        model.zero_grad()
        found, total = batches.step(step), torch.zeros(())
        for chunk in reversed(found.chunks):
            assert chunk.samples is not None
            made = model(**{name: torch.from_numpy(x) for name, x in chunk.samples.items()})
            logits = made if isinstance(made, torch.Tensor) else made.logits
            loss = loss_of(logits, torch.from_numpy(chunk.labels).long())
            loss = loss * torch.tensor(1 / found.targets)
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        with torch.no_grad():
            for name, one in model.named_parameters():
                if one.grad is None:  # forward does not read it
                    continue
                momentum[name].mul_(MOMENTUM).add_(one.grad)
                one.sub_(momentum[name] * torch.tensor(prepared.rate(step)))
    torch.set_num_threads(threads)
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(("name", "caps"), [("vit", ("4GiB", "2MiB")), ("dlrm", ("4GiB", "2MiB"))])
def test_an_example_trains_with_the_bits_of_plain_torch_under_any_cap(
    name: str, caps: tuple[str, str], tmp_path: Path
) -> None:
    file, moved = EXAMPLES / f"{name}.py", []
    loss_of = summed_clicks if name == "dlrm" else summed
    for cap in caps:
        seen = Seen()
        wanted = TrainOptions.of(given(name, tmp_path, output=tmp_path / cap, device_mem=cap))
        trainer = Trainer(wanted, callbacks=[seen])
        result = trainer.train()
        losses, weights = plain(wanted, trainer, object_of_file(file, "build"), loss_of)
        assert seen.losses == losses
        assert result.model is not None
        written = load_file(result.model / "model.safetensors")
        assert written.keys() == weights.keys()
        for key, values in weights.items():
            assert torch.equal(written[key], values), (cap, key)
        moved.append(trainer.prepare().summary.h2d_bytes)
    assert moved[0] < moved[1], "the smaller cap moves weights between memories"


def test_a_large_chunk_has_its_head_in_slices_of_samples(tmp_path: Path) -> None:
    """Two of 600 rows, whose gradients are added in another order than at once."""
    known = given("dlrm", tmp_path, count=1200, tokens_per_step=1200, chunk_tokens=1200)
    seen, wanted = Seen(), TrainOptions.of(known)
    trainer = Trainer(wanted, callbacks=[seen])
    result = trainer.train()
    calls = trainer.prepare().plan.parts[0].schedule.calls.values()
    assert [c.attributes["row_slice"] for c in calls if "row_slice" in c.attributes] == [600]
    build = object_of_file(EXAMPLES / "dlrm.py", "build")
    losses, weights = plain(wanted, trainer, build, summed_clicks)
    assert seen.losses == pytest.approx(losses, abs=1e-6)
    assert result.model is not None
    for name, values in load_file(result.model / "model.safetensors").items():
        assert torch.allclose(values, weights[name], atol=1e-7)
    whole = Recipe(max_row_slice=30)
    assert (whole.row_slice(48, 12), whole.row_slice(36, 12), whole.row_slice(64)) == (24, 12, 16)
    assert whole.row_slice(100, 50) == 50


def test_a_run_goes_on_under_another_cap_to_the_bits_of_one_that_did_not_stop(
    tmp_path: Path,
) -> None:
    """The last chunk of an epoch is filled up, and so is the last pass of an evaluation."""
    known = given("dlrm", tmp_path, output=tmp_path / "whole", steps=6, chunk_tokens=20,
                  tokens_per_step=40)  # fmt: skip
    wanted = TrainOptions.of(known | {"eval_data": known["data"], "eval_every": 6})
    whole, straight = trained(wanted)
    again = wanted.model_copy(update={"output": tmp_path / "stopped"})
    stopped, before = trained(again, stop_after=2)
    assert stopped.step < 6
    _, after = trained(again.model_copy(update={"device_mem": "2MiB"}), resume=True)
    assert before.losses[: stopped.step] + after.losses == straight.losses
    assert state_files(again.output, 6) == state_files(whole.folder, 6)
    model = object_of_file(EXAMPLES / "dlrm.py", "build")()
    assert whole.model is not None
    model.load_state_dict(load_file(whole.model / "model.safetensors"))
    data = Trainer(wanted.model_copy(update={"output": tmp_path / "other"})).prepare().data
    assert isinstance(data, SampleData)
    chunks = an_epoch(data, 48)
    samples, labels = chunks[0].samples, torch.from_numpy(chunks[0].labels)
    assert samples is not None and len(chunks) == 1
    logits = model(**{name: torch.from_numpy(array) for name, array in samples.items()})
    assert straight.evals[0].loss == pytest.approx(summed_clicks(logits, labels).item() / 48, 1e-6)


INPUTS = (
    TracedInput(name="x", shape=(2,), dtype="float32"),
    TracedInput(name="rows", shape=(2, 3), dtype="int64", fill=9),
)
ARRAYS = {
    "x": np.arange(10, dtype=np.float32).reshape(5, 2),
    "rows": np.arange(12),
    "rows.offsets": np.array([0, 1, 1, 4, 5, 7, 7, 8, 11, 11, 12]),
    "labels": np.array([0, 1, -100, 1, 0]),
}
LISTS = [[[0], []], [[1, 2, 3], [4]], [[5, 6], []], [[7], [8, 9, 10]], [[], [11]]]


def folder_of(folder: Path, **changed: np.ndarray | None) -> Path:
    folder.mkdir()
    for name, array in (ARRAYS | changed).items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


def data_of(*paths: Path, classes: int | None = 2) -> SampleData:
    return SampleData.open([Source(path) for path in paths], INPUTS, 1, classes=classes)


def an_epoch(data: SampleData, size: int = 2) -> list[Chunk]:
    chunks = []
    with data.chunks(chunk_tokens=size, most_documents=2, seed=3) as stream:
        for chunk in stream:
            chunks.append(chunk)
            if stream.position.epoch:
                return chunks
    raise AssertionError


def test_lists_are_filled_up_and_each_sample_comes_once_an_epoch(tmp_path: Path) -> None:
    found = {}
    for chunk in an_epoch(data_of(folder_of(tmp_path / "a"))):
        assert chunk.samples is not None
        for at, label in enumerate(chunk.labels.tolist()):
            x, rows = chunk.samples["x"][at].tolist(), chunk.samples["rows"][at].tolist()
            found[x[0]] = (x[1], [[n for n in one if n != 9] for one in rows], label)
    wanted = [[[n for n in one if n != 9] for one in lists] for lists in LISTS]
    labels = [0, 1, -100, 1, 0]
    # the sixth fills up the last chunk: it has what fills up, and a label that does not count
    filled = {float(2 * n): (2.0 * n + 1, wanted[n], labels[n]) for n in range(5)}
    assert found.pop(0.0) in (filled.pop(0.0), (0.0, [[], []], -101))
    assert found == filled


def test_a_safetensors_file_and_two_folders_are_the_same_samples(tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    save_file(ARRAYS, file)
    one = an_epoch(data_of(folder_of(tmp_path / "a")))
    other = an_epoch(data_of(file))
    for left, right in zip(one, other, strict=True):
        assert left.labels.tolist() == right.labels.tolist()
        assert left.samples is not None and right.samples is not None
        for name, array in left.samples.items():
            assert np.array_equal(array, right.samples[name])
    both = data_of(tmp_path / "a", file)
    assert both.num_samples == 10 and len(an_epoch(both)) == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": None}, r"has no x\.npy: it needs x, rows, labels"),
        ({"labels": None}, r"has no labels\.npy"),
        ({"x": np.zeros((5, 3), np.float32)}, r"'x' is \[5, 3\]: of 5 samples.*takes \[5, 2\]"),
        ({"x": np.zeros((5, 2))}, "'x' is float64, and the model takes float32"),
        ({"labels": np.zeros(5)}, "labels are float64"),
        ({"labels": np.array([0, 1, 2, 0, 0])}, "a label is 2, and the model has 2 classes"),
        ({"labels": np.full(5, -100)}, "no label is 0 or more"),
        ({"rows.offsets": np.array([0, 12])}, "5 samples have 10 lists, with 11 offsets"),
        (
            {"rows.offsets": np.array([0, 4, 4, 4, 5, 7, 7, 8, 11, 11, 12])},
            "lists of 'rows' have 0 to 4 numbers, and the model takes 0 to 3",
        ),
    ],
)
def test_arrays_that_are_not_the_models_are_refused(
    tmp_path: Path, changed: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        data_of(folder_of(tmp_path / "a", **changed))


MODELS = """
import torch
from torch import nn

class Clicks(nn.Module):
    def __init__(self, **inputs):
        super().__init__()
        self.sample_inputs = inputs or {"x": torch.zeros(4), "rows": torch.zeros(3, 2).long()}
        self.bottom = nn.Linear(4, 8)
        self.tables = nn.ModuleList(nn.EmbeddingBag(10, 8) for _ in range(3))
        self.top = nn.Linear(32, 2)
    def forward(self, x, rows):
        found = [table(rows[:, at]) for at, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(x), *found], 1))

class Scalars(Clicks):
    def forward(self, x, rows):
        return super().forward(x, rows)[:, 0]

def beside(): return Clicks()
def two_values(): return Clicks(x=torch.arange(4.0))
def no_tensor(): return Clicks(x=4)
def scalars(): return Scalars()
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("beside", "it may read what blocks are given and return"),
        ("two_values", "'x' is float32 [4]: give a tensor of real numbers and of one value"),
        ("no_tensor", "'x' is no tensor of one sample"),
        ("scalars", "makes logits of shape (2,) of 2 samples: expected [2, classes]"),
    ],
)
def test_a_module_that_cannot_be_fed_samples_is_refused(
    tmp_path: Path, function: str, message: str
) -> None:
    (tmp_path / "clicks.py").write_text(MODELS)
    assert message in error_of("trace", f"{tmp_path}/clicks.py:{function}")


def test_samples_have_one_length_and_are_not_scored(tmp_path: Path) -> None:
    wanted = given("vit", tmp_path)
    model, data = wanted["model"], wanted["data"][0]
    told = error_of("train", model, data, "-o", tmp_path / "run", "--seq-len", 8)
    assert "sequences of up to 1 tokens, not 8" in told and "--seq-len 1" in told
    assert "takes tensors of samples" in error_of("score", model, data)
    clicks = given("dlrm", tmp_path)
    told = error_of("train", clicks["model"], clicks["data"][0], "-o", tmp_path / "run")
    assert "makes one logit" in told and "--loss" in told


def test_a_batch_size_counts_samples(tmp_path: Path) -> None:
    known = {n: v for n, v in given("dlrm", tmp_path).items() if n != "tokens_per_step"}
    prepared = Trainer(TrainOptions.of(known | {"batch_size": 24})).prepare()
    assert prepared.tokens_per_step == 24 and prepared.options.seq_len == 1


def test_a_plan_of_such_a_model_runs_without_data(tmp_path: Path) -> None:
    file, plan = EXAMPLES / "dlrm.py", tmp_path / "plan.json"
    step = ("--seq-len", 1, "--tokens-per-step", 16, "--chunk-tokens", 8, "--machine", "cpu")
    model = ("--model", f"{file}:build", "--loss", f"{file}:click_loss")
    assert call("plan", *model, *step, "-o", plan).code == 0
    ran = call("run", plan, "--steps", 2, "--trust-remote-code")
    assert ran.code == 0, ran.err
    assert "loss" in ran.out


ENCODERS = """
import torch
import transformers as hf

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}

def bert():
    sizes = SIZES | {"intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 16}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = hf.BertForMaskedLM(hf.BertConfig(**sizes, tie_word_embeddings=False))
    one = torch.zeros(12, dtype=torch.int64)
    model.sample_inputs = {"input_ids": one, "attention_mask": one + 1, "labels": one}
    return model

def dinov2():
    config = hf.Dinov2Config(**SIZES, image_size=28, patch_size=14, num_labels=10)
    model = hf.Dinov2ForImageClassification(config)
    model.sample_inputs = {"pixel_values": torch.zeros(3, 28, 28)}
    return model
"""


@pytest.mark.parametrize(("name", "labels"), [("bert", 12), ("dinov2", 1)])
def test_another_encoder_trains_with_the_bits_of_plain_torch(
    name: str, labels: int, tmp_path: Path
) -> None:
    """BERT has a label for each token, of which most do not count, and padding that its mask hides,
    in some samples of a chunk or in none."""
    (tmp_path / "encoders.py").write_text(ENCODERS)
    draw, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    targets = draw.integers(0, 10, (48, labels))
    targets[draw.random((48, labels)) > 0.4] = -100
    mask = np.ones((48, 12), np.int64)
    mask[::5, 8:] = 0
    arrays = {
        "input_ids": draw.integers(0, 100, (48, 12)), "attention_mask": mask,
        "pixel_values": draw.standard_normal((48, 3, 28, 28)).astype(np.float32),
        "labels": targets.reshape(48, *((12,) if labels > 1 else ())),
    }  # fmt: skip
    for key, array in arrays.items():
        np.save(data / f"{key}.npy", array)
    known = given("vit", tmp_path) | {
        "model": f"{tmp_path}/encoders.py:{name}", "data": (str(data),),
        "tokens_per_step": 16 * labels, "chunk_tokens": 4 * labels,
    }  # fmt: skip
    seen, wanted = Seen(), TrainOptions.of(known)
    trainer = Trainer(wanted, callbacks=[seen])
    result = trainer.train()
    build = object_of_file(tmp_path / "encoders.py", name)
    losses, weights = plain(wanted, trainer, build, summed)
    assert seen.losses == losses
    assert result.model is not None
    written = load_file(result.model / "model.safetensors")
    assert all(torch.equal(written[key], values) for key, values in weights.items())
