"""The limits of each attention implementation, so that a plan can be refused without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Literal

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError

_MOST_PROBABILITIES_BYTES = 512 * 2**20
_MOST_SLICES, _SLICE_QUERIES, _MOST_SLICED_KEYS = 8, 1024, 4
DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Library:
    """The distribution that an implementation needs, beside torch, and how it is installed."""

    distribution: str
    install: str
    least_version: tuple[int, ...] = ()

    def missing(self) -> str | None:
        """What of it is not installed; imports nothing."""
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            return f"{self.distribution} is not installed ({self.install})"
        release = re.match(r"\d+(\.\d+)*", found)  # of 2.7.4.post1 it is 2.7.4
        numbers = tuple(int(part) for part in release.group().split(".")) if release else ()
        if numbers < self.least_version:
            needed = ".".join(str(number) for number in self.least_version)
            return (
                f"{self.distribution} is {found}, and {needed} or newer is needed ({self.install})"
            )
        return None


@dataclass(frozen=True)
class AttentionLimits:
    """The limits of an implementation (None: no limit); `capabilities` are major ones of CUDA.

    With `variable_length` one call takes packed sequences of unequal lengths; without, each of
    them is a call. `deterministic` means the same bits from run to run, as the executor calls it.
    """

    device: DeviceName | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    most_head_dim: int | None = None
    head_dim_multiple: int = 1
    capabilities: tuple[int, ...] = ()
    variable_length: bool = False
    deterministic: bool = True
    library: Library | None = None

    def refusal(self, dtype: str, head_dim: int) -> str | None:
        """Why such heads cannot be computed, or None."""
        if dtype not in self.dtypes:
            return f"it computes {' and '.join(self.dtypes)}, not {dtype}"
        if self.most_head_dim is not None and head_dim > self.most_head_dim:
            return f"head_dim {head_dim} is over its limit of {self.most_head_dim}"
        if head_dim % self.head_dim_multiple:
            return f"head_dim {head_dim} is no multiple of {self.head_dim_multiple}"
        return None


class UnknownAttentionError(TwinstreamError):
    """No attention implementation of that name."""


def attention_names() -> tuple[str, ...]:
    """Return the names of all implementations, whether they can run here or not."""
    return tuple(_limits())


def attention_limits(name: str) -> AttentionLimits:
    """
    Raises:
        UnknownAttentionError: the message lists those there are.
    """
    limits = _limits()
    if name not in limits:
        raise UnknownAttentionError(
            f"attention implementation '{name}' is unknown; known implementations: "
            f"{', '.join(limits)}"
        )
    return limits[name]


def attention_refusal(
    name: str, device: DeviceName, dtype: str, head_dim: int, capability: int | None = None
) -> str | None:
    """Why an implementation cannot compute such heads on a kind of device, or None.

    `capability` is the device's major compute capability; None is unknown, and not refused.

    Raises:
        UnknownAttentionError: there is none of that name.
    """
    limits = attention_limits(name)
    if limits.device is not None and limits.device != device:
        return f"it runs on {limits.device}, not on {device}"
    if limits.capabilities and capability is not None and capability not in limits.capabilities:
        made_for = ", ".join(str(major) for major in limits.capabilities)
        return f"it is for compute capability {made_for}, not {capability}"
    return limits.refusal(dtype, head_dim)


def nondeterministic_kernels(schedule: RankSchedule) -> tuple[str, ...]:
    """Return the kernels that give other bits from run to run; empty where none does."""
    names = {call.attributes.get("attention") for call in schedule.calls.values()}
    known = sorted(name for name in names if isinstance(name, str) and name in _limits())
    return tuple(f"attention {name}" for name in known if not _limits()[name].deterministic)


def cudnn_key_heads(
    num_sequences: int, num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int
) -> int:
    """Key heads of one call of cuDNN's deterministic backward, which may keep all probabilities.

    As many, and a divisor of all, as have at most 512 MiB of them; at least one.

    >>> cudnn_key_heads(1, 8192, 8192, 32, 8), cudnn_key_heads(16, 1024, 1024, 32, 8)
    (1, 4)
    """
    of_one = 2 * num_sequences * num_heads // num_kv_heads * num_queries * num_keys
    divisors = (n for n in range(num_kv_heads, 0, -1) if num_kv_heads % n == 0)
    return next((n for n in divisors if n * of_one <= _MOST_PROBABILITIES_BYTES), 1)


def query_slices(num_queries: int, num_keys: int) -> tuple[slice, ...]:
    """The slices of queries of `cudnn_sliced`: its bits are those of this rule.

    n slices leave (n + 1) / 2n of the square of the queries to be computed. Eight at most, of 1,024
    queries at least where there are so many, two of shorter sequences from 1,024 on. With more than
    four times as many keys as queries nearly all that is computed is seen, and each slice would add
    to nearly all of dK and dV, so there is one.

    Source: an H200's samples of cuDNN 9.18 (docs/benchmarks/nvidia-h200.json): by the rectangle its
    rate is 458 to 468 TFLOP/s for 16 thousand queries and 1 to 4 times as many keys.

    >>> [len(query_slices(n, n)) for n in (512, 1024, 4096, 8192, 16384)]
    [1, 2, 4, 8, 8]
    >>> len(query_slices(4096, 8192)), len(query_slices(4096, 32768))
    (4, 1)
    """
    count = min(_MOST_SLICES, max(num_queries // _SLICE_QUERIES, 2))
    if num_queries < _SLICE_QUERIES or num_keys > _MOST_SLICED_KEYS * num_queries:
        count = 1
    ends = [num_queries * i // count for i in range(count + 1)]
    return tuple(slice(start, end) for start, end in pairwise(ends))


def _limits() -> Mapping[str, AttentionLimits]:
    return {
        "eager": AttentionLimits(),
        "sdpa_cpu": AttentionLimits(device="cpu"),
        "sdpa_flash": _on_cuda(256, (8, 9, 10, 11, 12)),
        "sdpa_cudnn": replace(
            _on_cuda(128, (8, 9, 10, 12)), variable_length=False, deterministic=False
        ),
        "flash2": _on_cuda(256, (8, 9, 10, 12), Library(
            "flash-attn", "pip install flash-attn", (2, 7)
        )),
        "flash3": _on_cuda(192, (9,), Library(
            "flash-attn-3", "build the folder hopper of github.com/Dao-AILab/flash-attention"
        )),
        "flash4": _on_cuda(128, (9, 10, 11), Library(
            "flash-attn-4", "pip install --pre flash-attn-4"
        )),
        "cudnn_frontend": replace(
            _on_cuda(128, (9, 10), Library(
                "nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend", (1, 18)
            )),
            variable_length=False,
        ),
        "cudnn_sliced": replace(
            _on_cuda(128, (9, 10), Library(
                "nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend", (1, 18)
            )),
            variable_length=False,
        ),
    }  # fmt: skip


def _on_cuda(
    most_head_dim: int, capabilities: tuple[int, ...], library: Library | None = None
) -> AttentionLimits:
    return AttentionLimits(
        "cuda", ("bfloat16",), most_head_dim, 8, capabilities, variable_length=True,
        library=library,
    )  # fmt: skip
