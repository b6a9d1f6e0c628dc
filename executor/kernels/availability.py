"""Whether the kernels that a schedule names can run here, asked before anything is touched."""

import importlib.util

from twinstream.executor.kernels.attention.canary import require_runnable_attention
from twinstream.executor.kernels.updates.element_step import check_own_rule, own_rules
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError


class KernelsUnavailableError(TwinstreamError):
    """A schedule names kernels that cannot run on this backend."""


def require_kernels(schedule: RankSchedule, backend: DeviceName) -> None:
    """Refuse a schedule whose vector kernels, attention or own rules cannot run on `backend`.

    Raises:
        AttentionNotAvailable: with the reason, what to install and what can run.
        KernelsUnavailableError: with the reason and what to plan with instead.
        UpdateRuleError: an optimizer of a person's own is none.
    """
    for name in sorted({call.kernel.split("/")[-1] for call in schedule.calls.values()}):
        if reason := vector_reason(name, backend):
            raise KernelsUnavailableError(
                f"the schedule has {name} kernels, and {reason}; or plan with --kernels eager "
                "(in Python: Recipe(kernels=KernelChoice(vector='eager')))"
            )
    require_runnable_attention(schedule, backend)
    for rule in own_rules(schedule.calls.values()):
        check_own_rule(rule)


def vector_reason(name: str, backend: str) -> str | None:
    """Why vector kernels of that name cannot run on `backend`; None where they can."""
    if name != "triton":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton (Linux)"
    import triton

    interpreted = triton.knobs.runtime.interpret
    if backend == "cpu" and not interpreted:
        return (
            "Triton needs a CUDA device: run with --backend cuda (on a CPU only its interpreter "
            "runs them, thousands of times slower: TRITON_INTERPRET=1)"
        )
    if backend == "cuda" and interpreted:
        return "TRITON_INTERPRET is set, which would run them on the CPU: unset it"
    return None
