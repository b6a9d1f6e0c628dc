"""Tokenising in processes beside the training: the same chunks, one message, and no one left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.samples import an_epoch, data_of, lines_of, paragraphs, tokenizer_folder
from tests.helpers.waiting import comes, ended
from twinstream.data import training_data
from twinstream.data.data_error import DataError
from twinstream.data.options import DataOptions
from twinstream.data.token_feed import ProcessTokenFeed

BESIDE = DataOptions(workers=2)
SHAPE = {"chunk_tokens": 512, "most_documents": 99, "seed": 0}


@pytest.mark.usefixtures("small_blocks")
def test_chunks_are_the_same_as_without_and_the_caller_waits_but_for_the_first(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines_of({"text": text} for text in paragraphs()[:300]))
    folder, before = tokenizer_folder(tmp_path / "tokenizer"), set(threading.enumerate())
    here = an_epoch(data_of(path, folder).chunks(**SHAPE))
    with data_of(path, folder, options=BESIDE, cache=tmp_path / "c").chunks(**SHAPE) as stream:
        beside = an_epoch(stream)
        assert stream.first_wait_s > 0
        kept = stream.position
    assert len(here) == len(beside) > 10
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(here, beside, strict=True))
    assert kept.epoch == 1
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("small_blocks")
def test_what_a_process_finds_wrong_reaches_the_caller_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    lines = lines_of({"text": text} for text in paragraphs()[:100]).splitlines(keepends=True)
    lines[70] = "{" + lines[70]
    path.write_text("".join(lines))
    data = data_of(path, options=DataOptions(workers=1))  # whose sample does not come to it
    with (
        data.chunks(**SHAPE) as stream,
        pytest.raises(DataError, match=r"a.jsonl:71 is no JSON") as e,
    ):
        an_epoch(stream)
    assert type(e.value) is DataError
    assert e.value.__suppress_context__


def test_a_process_that_dies_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    data = data_of(tmp_path / "a.txt")
    feed = ProcessTokenFeed(data.encoding, None, 1)
    ((block,),) = data.blocks
    assert feed.take(block).ids.tolist() == list(b"text")
    (process,) = feed._pool._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a process that tokenises died"):
        for _ in range(1000):
            feed.take(block)
            time.sleep(0.01)
    feed.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.data.samples import data_of
from twinstream.data.options import DataOptions
data = data_of(Path(sys.argv[1]), options=DataOptions(workers=1))
stream = data.chunks(chunk_tokens=64, most_documents=9, seed=0)
next(stream)
(worker,) = stream._close.peek()[2][1]._pool._processes
Path(sys.argv[2]).write_text(str(worker))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_is_left_when_the_training_is_killed(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    (tmp_path / "run.py").write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, tmp_path / "run.py", tmp_path / "a.txt", tmp_path / "worker"]
    done = subprocess.run(command, env=environment)
    assert done.returncode == -signal.SIGKILL
    worker = int((tmp_path / "worker").read_text())
    if not ended([worker]):
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the process goes on without the training")


def test_a_stream_that_is_dropped_leaves_no_thread(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 1000)
    before = set(threading.enumerate())
    stream = data_of(tmp_path / "a.txt", options=DataOptions(workers=1)).chunks(**SHAPE)
    del stream
    assert comes(lambda: set(threading.enumerate()) <= before)


def test_groups_hold_enough_chunks_for_their_last_not_to_count():
    assert training_data._GROUP_CHUNKS >= 64
