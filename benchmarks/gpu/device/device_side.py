"""Requests carried out: the only part of a campaign that touches torch and the device."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, assert_never

from benchmarks.gpu.device import requests
from benchmarks.gpu.device.facts import driver_version, facts_of
from benchmarks.gpu.device.requests import Answer, Request
from benchmarks.gpu.jobs.campaign import Backend, Peer
from benchmarks.gpu.jobs.results import SampleRatio
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.files import read_document

if TYPE_CHECKING:
    from benchmarks.gpu.device.measuring import MeasuringSession


class DeviceSide:
    """Holds the host arena from request to request.

    On CUDA torch's allocator is set as `execute` sets it, which only the first in a process can.
    torch's compiler gets few processes of its own: they would stand beside 100 GiB that are pinned.
    """

    def __init__(self, backend: Backend) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        self._backend = backend
        self._session: MeasuringSession | None = None
        from twinstream.executor.probe.device import begin_device

        begin_device(backend)

    def answer(self, request: Request) -> Answer:
        match request:
            case requests.DescribeDevice():
                return describe(self._backend)
            case requests.NoteFacts():
                return requests.Facts(facts_of(self._backend, request.pinned_bytes))
            case requests.CheckDevice():
                from benchmarks.gpu.device.check import check_device

                self.close()
                return check_device(self._backend)
            case requests.ProbeDevice():
                self.close()
                return probe_device(self._backend, request)
            case requests.TakeHostMemory():
                return self._take(request)
            case requests.RunSchedules():
                return self._run(request)
            case requests.RunPeer():
                return self._peer(request.peer)
            case _:
                assert_never(request)

    def _take(self, request: requests.TakeHostMemory) -> requests.Taken:
        start_s = time.perf_counter()
        note = self._opened(0).take_host_anyway(request.size_bytes)
        return requests.Taken(time.perf_counter() - start_s, note)

    def _run(self, request: requests.RunSchedules) -> requests.RanSchedules:
        session = self._opened(request.host_bytes)
        measured = (
            session.measure(read_document(RankSchedule, path), n) for path, n in request.runs
        )
        runs = tuple(requests.ScheduleRun(m.timeline, m.losses, m.states) for m in measured)
        return requests.RanSchedules(runs)

    def _peer(self, peer: Peer) -> requests.RanPeer:
        import torch

        from benchmarks.gpu.peers.measure import PeerWork, measure_peer

        if peer.kind == "fsdp_offload":  # its own pinned memory does not fit beside the arena
            self.close()
        work = PeerWork(peer.kind, peer.spec, peer.seq_len, peer.micro_batch_tokens)
        times = measure_peer(work, torch.device(self._backend))
        return requests.RanPeer(
            times.micro_batch_s, times.update_s, times.loss, times.device_used_bytes
        )

    def _opened(self, host_bytes: int) -> MeasuringSession:
        from benchmarks.gpu.device.measuring import MeasuringSession

        if self._session is None:
            self._session = MeasuringSession(self._backend, host_bytes)
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def describe(backend: Backend) -> requests.DeviceDescription:
    """The device as its driver names it."""
    import platform

    import torch

    if backend == "cpu":
        name = f"{platform.machine()} CPU"
        return requests.DeviceDescription(name, platform.release(), torch.__version__)
    from twinstream.executor.run.execute import choose_backend

    choose_backend("cuda")
    name = torch.cuda.get_device_name()
    return requests.DeviceDescription(name, driver_version(), torch.__version__)


def probe_device(backend: Backend, request: requests.ProbeDevice) -> requests.ProbedDevice:
    """The profile of the device."""
    if backend == "cpu":
        from twinstream.executor.probe.cpu import probe_cpu

        return requests.ProbedDevice(probe_cpu(), (), ())
    from twinstream.executor.probe import device

    probed = device.probe_device(
        backend, request.chosen, request.presets, request.commit, request.samples
    )
    return requests.ProbedDevice(
        machine=probed.machine,
        links=probed.links.copies.rates,
        samples=tuple(
            SampleRatio(
                name=sample.name,
                time_ns=sample.time_ns,
                ratio=probed.ratios.get(sample.name, 1.0),
                state=sample.state,
            )
            for sample in probed.samples
        ),
        sustained_flop_per_s=probed.sustained.flop_per_s,
        sustained=probed.sustained.state,
    )
