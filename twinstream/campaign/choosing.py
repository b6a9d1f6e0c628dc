"""Which kernels a campaign runs: the fastest of those that are right on the device."""

from twinstream.campaign import requests
from twinstream.campaign.worker import Backend, JobFailed, JobRefused, Worker
from twinstream.models.attention_scratch import attention_names
from twinstream.models.recipe import KernelChoice

AUTO = "auto"
_ATTENTION_LIMIT_S = 60.0
_KERNELS_LIMIT_S = 150.0  # Triton compiles its kernels


def choose_kernels(
    worker: Worker, backend: Backend, vector: str, attention: str, *, small: bool = False
) -> tuple[KernelChoice, tuple[str, ...]]:
    """The kernels asked for; of those left open (`auto`) the best, and why not the others.

    Each is tried in the device's process, so that one that breaks the process breaks only itself.

    Raises:
        JobRefused: what was asked for cannot run here, or nothing can.
    """
    if backend == "cpu" and vector == attention == AUTO:
        return KernelChoice(), ()
    notes: list[str] = []
    chosen = _attention(worker, backend, notes, small=small) if attention == AUTO else attention
    vectors = ("triton", "eager") if vector == AUTO and backend == "cuda" else (vector,)
    for name in ("eager",) if vectors == (AUTO,) else vectors:
        if name not in ("eager", "triton"):
            raise JobRefused(f"there are no vector kernels '{name}'; known: auto, eager, triton")
        kernels = KernelChoice(vector="triton" if name == "triton" else "eager", attention=chosen)
        reason = _fault(worker, kernels)
        if reason is None:
            return kernels, tuple(notes)
        notes.append(f"{name} kernels with attention {chosen} are left out: {reason}")
    raise JobRefused("; ".join(notes))


def _attention(worker: Worker, backend: Backend, notes: list[str], *, small: bool) -> str:
    """The fastest that is right; eager, which is right everywhere, where none is."""
    if backend == "cpu":
        return "eager"
    times: dict[str, float] = {}
    for name in attention_names():
        if name == "eager":
            continue
        try:
            tried = worker.ask(
                requests.TryAttention(name, small), requests.TriedAttention, _ATTENTION_LIMIT_S
            )
        except (JobRefused, JobFailed) as error:
            notes.append(f"attention {name} is left out: {error}")
            continue
        if tried.refused is not None:
            notes.append(f"attention {name} is left out: {tried.refused}")
        else:
            times[name] = tried.time_ns
    notes += [f"attention {name}: {time_ns / 1e6:.2f} ms" for name, time_ns in times.items()]
    return min(times, key=lambda name: times[name]) if times else "eager"


def _fault(worker: Worker, kernels: KernelChoice) -> str | None:
    try:
        tried = worker.ask(requests.TryKernels(kernels), requests.TriedKernels, _KERNELS_LIMIT_S)
    except (JobRefused, JobFailed) as error:
        return str(error)
    if tried.relative <= tried.tolerance:
        return None
    return (
        f"{tried.tensor} is {tried.relative:.1e} off the eager kernels, over {tried.tolerance:.0e}"
    )
