"""Which kernels a campaign runs: the fastest of those that are right on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, get_args

from benchmarks.gpu import requests
from benchmarks.gpu.requests import Request
from benchmarks.gpu.results import KernelsFound
from benchmarks.gpu.worker import Backend, JobFailed, JobRefused, JobTimeout, Worker
from twinstream.models.demand.attention_limits import attention_limits, attention_names
from twinstream.models.demand.attention_scratch import require_known_attention
from twinstream.models.recipe import KernelChoice
from twinstream.planner.kernel_choice import KernelsOption, UnknownKernelsError

_AnswerT = TypeVar("_AnswerT")
AUTO = "auto"
_FALLBACK = "sdpa_flash"  # of CUDA: every torch has it, and it is deterministic
_ATTENTION_LIMIT_S = 150.0  # flash-attn 4 takes 10 to 17 s to import, and more to compile
_KERNELS_LIMIT_S = 150.0  # Triton compiles its kernels


@dataclass(frozen=True)
class Tries:
    """The device's process, and the seconds left for all tries together."""

    worker: Worker
    left_s: Callable[[], float]

    def ask(self, request: Request, kind: type[_AnswerT], limit_s: float) -> _AnswerT | str:
        """The answer, or why there is none.

        Raises:
            JobTimeout: there is no time left, so that nothing can be said of what was tried.
        """
        within_s = min(limit_s, self.left_s())
        try:
            if within_s > 0.0:
                return self.worker.ask(request, kind, within_s)
        except (JobRefused, JobFailed) as error:
            if not isinstance(error, JobTimeout) or within_s == limit_s:
                return str(error)
        raise JobTimeout("no time left to try all kernels")


def check_kernels(vector: str, attention: str) -> None:
    """Refuse names before anything is started.

    Raises:
        UnknownKernelsError: there are no such vector kernels.
        UnknownAttentionError: there is no such attention.
    """
    if vector not in get_args(KernelsOption):
        known = ", ".join(get_args(KernelsOption))
        raise UnknownKernelsError(f"--vector '{vector}' is unknown; known: {known}")
    if attention != AUTO:
        require_known_attention(attention)


def choose_kernels(
    tries: Tries, backend: Backend, vector: str, attention: str, presets: tuple[str, ...]
) -> KernelsFound:
    """The kernels asked for; of those left open (`auto`) the best, and why not the others.

    Each is tried in the device's process, so that one that breaks the process breaks only itself;
    attention on the shapes of these presets.

    Raises:
        JobRefused: what was asked for cannot run here.
        JobFailed: no attention is right here, no kernels are, or time ran out.
    """
    if backend == "cpu" and vector == attention == AUTO:
        return KernelsFound(kernels=KernelChoice(), others=("sdpa_cpu",))
    notes: list[str] = []
    chosen, excess_bytes, others = attention, 0, tuple[str, ...]()
    if attention == AUTO:
        chosen, excess_bytes, others = _attention(tries, backend, notes, presets)
    vectors = ("triton", "eager") if vector == AUTO and backend == "cuda" else (vector,)
    for name in ("eager",) if vectors == (AUTO,) else vectors:
        if name not in ("eager", "triton"):
            raise JobRefused(f"there are no vector kernels '{name}'; known: auto, eager, triton")
        kernels = KernelChoice(
            vector="triton" if name == "triton" else "eager", attention=chosen,
            deterministic=attention_limits(chosen).deterministic,  # what is named is allowed
        )  # fmt: skip
        reason = _fault(tries, kernels)
        if reason is None:
            return KernelsFound(
                kernels=kernels, notes=tuple(notes), excess_bytes=excess_bytes, others=others
            )
        notes.append(f"{name} kernels with attention {chosen} are left out: {reason}")
    raise (JobFailed if AUTO in (vector, attention) else JobRefused)("; ".join(notes))


def _attention(
    tries: Tries, backend: Backend, notes: list[str], presets: tuple[str, ...]
) -> tuple[str, int, tuple[str, ...]]:
    """The fastest that is right and deterministic, and those that are right without being that.

    Never eager on CUDA: it is right, but so slow that figures made with it would tell nothing.
    The bytes between are what any of them takes beyond what plans count with.
    """
    if backend == "cpu":
        return "eager", 0, ()
    right: dict[str, requests.TriedAttention] = {}
    wrong: set[str] = set()
    for name in attention_names():
        if name == "eager":
            continue
        wanted = requests.TryAttention(name, presets)
        tried = tries.ask(wanted, requests.TriedAttention, _ATTENTION_LIMIT_S)
        if isinstance(tried, str):
            notes.append(f"attention {name} is left out: {tried}")
        elif tried.refused is not None:
            notes.append(f"attention {name} is left out: {tried.refused}")
            wrong.add(name)
        else:
            right[name] = tried
    notes += [_told(name, tried) for name, tried in right.items()]
    others = tuple(name for name, tried in right.items() if not tried.deterministic)
    usable = [name for name in right if name not in others]
    if not usable and _FALLBACK in wrong:
        raise JobFailed(f"no attention is right here: {'; '.join(notes)}")
    if not usable:
        told = f"attention {_FALLBACK} is taken all the same: a small model tells if it is right"
        notes.append(told)
    best = min(usable, key=lambda name: right[name].time_ns, default=_FALLBACK)
    measured = [right[name].excess_bytes for name in (best, *others) if name in right]
    return best, max(measured, default=0), others


def _told(name: str, tried: requests.TriedAttention) -> str:
    told = f"attention {name}: {tried.time_ns / 1e6:.2f} ms"
    if not tried.deterministic:
        told += ", not deterministic (cells of its own run with it)"
    if not tried.excess_bytes:
        return told
    return (
        f"{told}; it takes {tried.excess_bytes} bytes of device memory more than it declares "
        "(reserved by the profile where it is chosen)"
    )


def _fault(tries: Tries, kernels: KernelChoice) -> str | None:
    tried = tries.ask(requests.TryKernels(kernels), requests.TriedKernels, _KERNELS_LIMIT_S)
    if isinstance(tried, str):
        return tried
    if tried.relative <= tried.tolerance:
        return None
    return (
        f"{tried.tensor} is {tried.relative:.1e} off the eager kernels, over {tried.tolerance:.0e}"
    )
