"""Clock, power and temperature beside what is timed, through an NVML of the tests."""

import sys
from time import perf_counter_ns

import torch

from tests.helpers.fake_nvml import FakeNvml
from tests.helpers.waiting import comes
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.run.device_state import (
    DeviceState,
    StateWatch,
    mean_state,
    state_reader,
)

CPU = torch.device("cpu")


def test_clock_power_temperature_and_reasons_are_read():
    nvml = FakeNvml(clock_mhz=1410, milliwatts=698_500, temperature_c=64, reasons=0x4 | 0x20 | 0x1)
    reader = state_reader("GPU-1234", nvml)
    assert nvml.uuid == "GPU-1234"
    assert reader.read() == DeviceState(
        sm_clock_mhz=1410, power_w=698.5, temperature_c=64,
        held_back=("power cap", "software thermal"),
    )  # fmt: skip


def test_what_a_device_does_not_tell_is_left_out():
    nvml = FakeNvml(refuses=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons"))
    found = state_reader("GPU-1234", nvml).read()
    assert found == DeviceState(sm_clock_mhz=1980, power_w=None, temperature_c=50)


def test_without_nvml_nothing_is_read_and_the_reason_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = state_reader("GPU-1234")
    assert (reader.read(), reader.missing) == (None, "nvidia-ml-py is not installed")
    reader = state_reader("GPU-1234", FakeNvml(refuses=("nvmlInit",)))
    assert (reader.read(), reader.missing) == (None, "NVML: not supported")


def test_readings_become_means_the_highest_temperature_and_every_reason():
    readings = [
        DeviceState(sm_clock_mhz=1000, power_w=None, temperature_c=60, held_back=("power cap",)),
        DeviceState(sm_clock_mhz=2000, power_w=500.0, temperature_c=70, held_back=()),
    ]
    assert mean_state(readings) == DeviceState(
        sm_clock_mhz=1500, power_w=500.0, temperature_c=70, held_back=("power cap",),
        num_readings=2,
    )  # fmt: skip
    assert mean_state([]) is None


def test_a_watch_gives_the_state_between_times():
    nvml = FakeNvml(clock_mhz=1000)
    with StateWatch(state_reader("GPU-1", nvml), poll_s=0.002) as watch:
        start_ns = perf_counter_ns()
        assert comes(lambda: watch.between([start_ns, perf_counter_ns()])[0])
        middle_ns = perf_counter_ns()
        nvml.clock_mhz = 2000
        later_ns = perf_counter_ns() + 10_000_000  # a reading that was under way is before this
        assert comes(lambda: watch.between([later_ns, perf_counter_ns()])[0])
        end_ns = perf_counter_ns()
    first, _, second = watch.between([start_ns, middle_ns, later_ns, end_ns])
    assert first is not None and first.sm_clock_mhz == 1000
    assert second is not None and second.sm_clock_mhz == 2000


def test_the_device_is_loaded_before_every_timing_and_its_state_noted():
    done: list[str] = []
    timer = DeviceTimer(
        CPU, budget_s=1e-6, load=lambda: done.append("load"), load_s=0.002,
        reader=state_reader("GPU-1", FakeNvml()),
    )  # fmt: skip
    timing = timer.timed(lambda: done.append("call"))
    assert timing.state is not None and timing.state.sm_clock_mhz == 1980
    last_load = len(done) - 1 - done[::-1].index("load")
    assert set(done[last_load + 1 :]) == {"call"}
    assert len(done) - last_load > 5, "everything that is timed comes after the load"
    assert DeviceTimer(CPU, budget_s=1e-6).timed(lambda: None).state is None
