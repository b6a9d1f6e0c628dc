"""Requests carried out: the only part of a campaign that touches torch and the device."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, assert_never

from benchmarks.gpu import requests
from benchmarks.gpu.facts import driver_version, facts_of
from benchmarks.gpu.jobs import Peer
from benchmarks.gpu.probe_chains import probe_chains
from benchmarks.gpu.requests import Answer, Request
from benchmarks.gpu.results import SampleRatio
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Machine
from twinstream.models.recipe import KernelChoice
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document

if TYPE_CHECKING:
    from benchmarks.gpu.measuring import MeasuringSession
    from benchmarks.gpu.worker import Backend

# Whose datasheet a device's nominal rates are of, by a part of its name.
_DATASHEETS = {"H200": "h200", "H100": "h100_datasheet", "A100": "a100", "B200": "b200"}


class DeviceSide:
    """Holds the host arena from request to request.

    On CUDA torch's allocator is set as `execute` sets it, which only the first in a process can.
    torch's compiler gets few processes of its own: they would stand beside 100 GiB that are pinned.
    """

    def __init__(self, backend: Backend) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        self._backend = backend
        self._session: MeasuringSession | None = None
        if backend == "cpu":
            import torch

            torch.set_num_threads(1)
        else:
            _set_allocator()

    def answer(self, request: Request) -> Answer:
        match request:
            case requests.DescribeDevice():
                return describe(self._backend)
            case requests.NoteFacts():
                return requests.Facts(facts_of(self._backend, request.pinned_bytes))
            case requests.TryAttention():
                return try_attention(self._backend, request)
            case requests.TryKernels():
                return try_kernels(self._backend, request.kernels)
            case requests.ProbeDevice():
                self._close_session()
                return probe_device(self._backend, request)
            case requests.TakeHostMemory():
                return self._take(request)
            case requests.RunSchedules():
                return self._run(request)
            case requests.RunPeer():
                return self._peer(request.peer)
            case _:
                assert_never(request)

    def close(self) -> None:
        self._close_session()

    def _take(self, request: requests.TakeHostMemory) -> requests.Taken:
        start_s = time.perf_counter()
        note = self._opened(0).take_host_anyway(request.size_bytes)
        return requests.Taken(time.perf_counter() - start_s, note)

    def _run(self, request: requests.RunSchedules) -> requests.RanSchedules:
        session = self._opened(request.host_bytes)
        runs = []
        for path, num_passes in request.runs:
            measured = session.measure(read_document(Schedule, path), num_passes)
            runs.append(
                requests.ScheduleRun(
                    timeline=measured.timeline,
                    losses=measured.losses,
                    prepared_s=measured.prepared_s,
                    run_s=measured.run_s,
                    states=measured.states,
                )
            )
        return requests.RanSchedules(tuple(runs))

    def _peer(self, peer: Peer) -> requests.RanPeer:
        import torch

        from benchmarks.gpu.peers.measure import PeerWork, measure_peer

        if peer.kind == "fsdp_offload":  # its own pinned memory does not fit beside the arena
            self._close_session()
        work = PeerWork(peer.kind, peer.spec, peer.seq_len, peer.micro_batch_tokens)
        times = measure_peer(work, torch.device(self._backend))
        return requests.RanPeer(
            times.micro_batch_s, times.update_s, times.loss, times.device_used_bytes
        )

    def _opened(self, host_bytes: int) -> MeasuringSession:
        from benchmarks.gpu.measuring import MeasuringSession

        if self._session is None:
            self._session = MeasuringSession(self._backend, host_bytes)
        return self._session

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _set_allocator() -> None:
    """Where there is no device, the first request says so."""
    import torch

    from twinstream.executor.memory.device_memory import expand_segments

    if torch.cuda.is_available():
        expand_segments()


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


def try_attention(backend: Backend, request: requests.TryAttention) -> requests.TriedAttention:
    """One implementation on the shapes of the cells; see `executor/probe/tasks/attention.py`."""
    from twinstream.executor.kernels.attention.registry import attention_implementation
    from twinstream.executor.probe.tasks.attention import (
        NoAttentionError,
        attention_cases,
        probe_attention,
    )

    presets = ("tiny",) if backend == "cpu" else request.presets
    cases = [
        case
        for chain in probe_chains(KernelChoice(), presets, "bfloat16")
        for case in attention_cases(ModelSpec.model_validate(chain.model.spec), chain.workload)
    ]
    deterministic = attention_implementation(request.name).deterministic
    try:
        found = probe_attention(
            cases, backend, names=[request.name], allow_nondeterministic=not deterministic
        )
    except NoAttentionError as error:
        return requests.TriedAttention(0.0, str(error))
    best = found.best
    return requests.TriedAttention(best.time_ns, None, best.excess_bytes, deterministic)


def try_kernels(backend: Backend, kernels: KernelChoice) -> requests.TriedKernels:
    """A round of a small model, in bf16 on CUDA."""
    import torch

    from twinstream.executor.kernels.attention.registry import require_attention
    from twinstream.executor.kernels.availability import KernelsUnavailableError, vector_reason
    from twinstream.executor.probe.tasks.trial import TOLERANCE, differs_from_eager

    if reason := vector_reason(kernels.vector, backend):
        raise KernelsUnavailableError(reason)
    require_attention(kernels.attention, backend)
    dtype = "bfloat16" if backend == "cuda" else "float32"
    found = differs_from_eager(kernels, torch.device(backend), dtype)
    return requests.TriedKernels(found.tensor, found.relative, TOLERANCE[dtype])


def probe_device(backend: Backend, request: requests.ProbeDevice) -> requests.ProbedDevice:
    """The profile of the device."""
    if backend == "cpu":
        from twinstream.executor.probe.cpu import probe_cpu

        return requests.ProbedDevice(probe_cpu(), (), ())
    import torch

    from twinstream.executor.probe.cuda import ProbeRequest, probe_cuda

    device = torch.device("cuda", torch.cuda.current_device())
    small = request.presets == ("tiny",)
    wanted = ProbeRequest(
        chains=probe_chains(request.kernels, request.presets, "bfloat16"),
        datasheet=datasheet_of(torch.cuda.get_device_name(device)),
        commit=request.commit,
        date=request.date,
        warm_seconds=0.5 if small else 4.0,
        load_seconds=0.05 if small else 0.5,
        attention_chains=tuple(
            chain
            for name in request.others
            for chain in probe_chains(
                _with_attention(request.kernels, name), request.presets, "bfloat16"
            )
        ),
        excess_bytes=request.excess_bytes,
    )
    probed = probe_cuda(wanted, device)
    choice = AttentionChoice(
        name=request.kernels.attention,
        kind="measured",
        source=f"the fastest of those that are right and deterministic, {request.date}",
    )
    return requests.ProbedDevice(
        machine=probed.machine.model_copy(update={"attention": choice}),
        links=probed.links.copies,
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


def _with_attention(kernels: KernelChoice, name: str) -> KernelChoice:
    return kernels.model_copy(update={"attention": name, "deterministic": False})


def datasheet_of(device_name: str) -> Machine | None:
    """The shipped profile whose nominal rates a device has, if any."""
    for part, profile in _DATASHEETS.items():
        if part in device_name:
            return load_machine(profile)
    return None
