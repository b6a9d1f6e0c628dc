"""What TensorBoard is given, by a writer that stands in for its own; and by its own if there."""

import sys
import types

import pytest

from tests.training.test_metrics import checkpoint, evaluation, step
from twinstream.log.tensorboard import TensorBoardLog, TensorBoardMissingError

MODULE = "torch.utils.tensorboard"


class Writer:
    made: list["Writer"]

    def __init__(self, folder, purge_step=None):
        self.folder, self.purge_step = folder, purge_step
        self.scalars, self.closed = [], False
        Writer.made.append(self)

    def add_scalar(self, name, value, global_step):
        self.scalars.append((name, value, global_step))

    def close(self):
        self.closed = True


@pytest.fixture
def stand_in(monkeypatch):
    Writer.made = []
    module = types.ModuleType(MODULE)
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, MODULE, module)


def test_steps_and_evaluations_are_scalars_at_their_step(stand_in, tmp_path):
    with TensorBoardLog(tmp_path / "tb", after_step=2) as log:
        for event in (step(3, grad_norm=0.5), evaluation(3), checkpoint(3), step(4)):
            log.append(event)
    (writer,) = Writer.made
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path / "tb"), 3, True)
    assert [(name, at) for name, _, at in writer.scalars] == [
        ("train/loss", 3), ("train/learning_rate", 3), ("train/grad_norm", 3),
        ("train/tokens_per_s", 3), ("eval/loss", 3), ("eval/perplexity", 3),
        ("train/loss", 4), ("train/learning_rate", 4), ("train/tokens_per_s", 4),
    ]  # fmt: skip
    assert writer.scalars[:2] == [("train/loss", 2.0, 3), ("train/learning_rate", 1e-3, 3)]


def test_a_missing_package_is_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(TensorBoardMissingError, match=r"pip install 'twinstream\[tensorboard\]'"):
        TensorBoardLog(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLog(tmp_path) as log:
        for number in (1, 2, 3):
            log.append(step(number, 1.0 / number))
    with TensorBoardLog(tmp_path, after_step=2) as log:
        log.append(step(3, 0.25))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(s.step, s.value) for s in found.Scalars("train/loss")] == [(1, 1), (2, 0.5), (3, 0.25)]
