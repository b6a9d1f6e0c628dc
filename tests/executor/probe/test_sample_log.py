"""What a probe that was cut leaves, and what the next one takes from it."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from twinstream.executor.probe.cuda import kernel_samples
from twinstream.executor.probe.tasks.sample_log import SampleLog, count_samples
from twinstream.executor.probe.timing.device_timing import DeviceTimer, Timing
from twinstream.executor.run.device_state import DeviceState
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.schedule.workload import Workload

SPEC = load_preset("tiny").model_copy(update={"num_layers": 1})
CHAIN = lower(SPEC, Workload(seq_len=32, chunk_tokens=32, chunks_per_round=1, rounds_per_step=1))
STATE = DeviceState(num_readings=2, sm_clock_mhz=1500.0, power_w=690.0)


class CountingTimer(DeviceTimer):
    """Takes no time: the n-th timing is n ns."""

    def timed(self, call):
        self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        call()
        return Timing(float(self.__dict__["count"]), STATE)


def timer() -> CountingTimer:
    return CountingTimer(torch.device("cpu"))


@pytest.mark.parametrize("cut_after", [1, 16, 20, None])
def test_a_probe_that_is_cut_leaves_what_it_has_and_the_next_measures_the_rest(tmp_path, cut_after):
    path = tmp_path / "samples.jsonl"
    first = timer()
    begun = list(islice(kernel_samples([CHAIN], first, SampleLog(path, "here")), cut_after))
    assert count_samples(path) == first.__dict__["count"] == len(begun)
    with path.open("a") as file:
        file.write('{"key": "half of a li')
    second = timer()
    found = list(kernel_samples([CHAIN], second, SampleLog(path, "here")))
    assert found[: len(begun)] == begun
    assert len(found) == len(begun) + second.__dict__.get("count", 0)
    assert (cut_after is None) == ("count" not in second.__dict__)
    assert found[0].state == STATE


def test_samples_of_another_source_are_not_taken(tmp_path):
    path = tmp_path / "samples.jsonl"
    list(islice(kernel_samples([CHAIN], timer(), SampleLog(path, "an H100")), 3))
    other = SampleLog(path, "an H200")
    again = timer()
    list(islice(kernel_samples([CHAIN], again, other), 3))
    assert again.__dict__["count"] == 3 == count_samples(path)


@pytest.mark.parametrize("content", ["", "\x00", "[]\n", '{"source": 3}\n{}\n'])
def test_a_file_that_is_no_samples_is_begun_anew(tmp_path: Path, content):
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    log = SampleLog(path, "here")
    assert count_samples(path) == 0 and not log.knows("matmul", ())
    log.take("a product", "matmul", (), lambda: Timing(5.0))
    assert count_samples(path) == 1 and SampleLog(path, "here").knows("matmul", ())
    path.write_text(path.read_text().replace('"time_ns":5.0', '"time_ns":50.0'))
    assert not SampleLog(path, "here").knows("matmul", ())
