"""The campaign's probe alone: the profile of a CUDA device."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.engine import Engine, Settings
from benchmarks.gpu.jobs import Size, campaign_of
from benchmarks.gpu.probe_chains import ALL_PRESETS, presets_of
from benchmarks.gpu.store import Store
from benchmarks.gpu.where import where_is
from benchmarks.gpu.worker import DeviceProcess
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.errors import TwinstreamError

_MINUTES = 15.0


class ProbeError(TwinstreamError):
    """A device could not be measured."""


def probed_machine(
    backend: Literal["cpu", "cuda"], tell: Callable[[str], None], size: Size = "full"
) -> Machine:
    """The profile of a device, which also names the attention that is right and fastest on it.

    Args:
        backend: whose device.
        tell: takes a line on how far it is.
        size: `full`, some minutes, or `tiny`, which only tries it.

    Raises:
        ProbeError: a part failed; it says which and why.
    """
    settings = Settings(
        backend, size, stages=("probe",), host_bytes=None, num_jobs=0, tests=(),
        vector="auto", attention="auto", presets=presets_of(size, ALL_PRESETS),
    )  # fmt: skip
    plan = campaign_of(size, None, backend)
    with tempfile.TemporaryDirectory() as folder, DeviceProcess(backend) as worker:
        where = where_is(worker, backend, "twinstream probe")
        store = Store(Path(folder), where, size)
        engine = Engine(settings, plan, store, worker, Budget(60.0 * _MINUTES), tell)
        engine.run()
        if store.profile.exists():
            return load_machine(store.profile)
        failed = [f"{job}: {o.reason}" for job, o in store.results.outcomes.items() if o.reason]
        failed += [f"{job}: no time left of {_MINUTES:g} minutes" for job in engine.waiting]
        if (log := store.folder / "log.txt").exists():
            tell(log.read_text(encoding="utf-8"))
    raise ProbeError(f"{where.device} could not be measured: {'; '.join(failed)}")
