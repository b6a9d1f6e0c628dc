"""What is looked at before a GPU is relied on: links, and whether attention in slices is right.

Bits twice, error against eager attention in float32, and the rate, of attention in slices of
queries beside the same called whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from benchmarks.gpu.jobs.campaign import Backend
from benchmarks.gpu.jobs.results import AttentionChecked, CheckFound, LinkRate
from twinstream.executor.kernels.attention.registry import (
    attention_implementation,
    attention_reason,
)
from twinstream.executor.kernels.attention.trial import AttentionTrial
from twinstream.executor.probe.cuda import matmul_load
from twinstream.executor.probe.tasks.attention import reference_error
from twinstream.executor.probe.timing.device_timing import DeviceTimer
from twinstream.executor.probe.timing.fit import UnsteadyLinkError
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_shape import AttentionShape

_NAMES: Mapping[Backend, tuple[str, ...]] = {
    "cuda": ("cudnn_frontend", "cudnn_sliced"), "cpu": ("eager", "sdpa_cpu"),
}  # fmt: skip
_LENGTHS: Mapping[Backend, tuple[int, ...]] = {"cuda": (1024, 8192, 16384), "cpu": (64, 128)}
_HEADS = ((32, 8, 128), (32, 8, 64))
_TOKENS = {"cuda": 16384, "cpu": 128}
_LOAD_S = {"cuda": 0.2, "cpu": 0.0}
# The reference computes all scores in float32; so many queries are cut into slices, too.
_MOST_COMPARED = 4096
_COMPARED_KEY_HEADS = 1


def check_device(backend: Backend) -> CheckFound:
    """Links and attention, in half a minute; of a CPU attention alone.

    What breaks is said, and takes nothing else with it.
    """
    links, unsteady = _links(backend)
    return CheckFound(links=links, unsteady=unsteady, attention=tuple(_attention(backend)))


def attention_shapes(backend: Backend) -> Iterator[AttentionShape]:
    """As many tokens in sequences of each length, with heads of both sizes."""
    for heads, key_heads, head_dim in _HEADS:
        for length in _LENGTHS[backend]:
            yield AttentionShape(
                num_sequences=_TOKENS[backend] // length,
                num_queries=length,
                num_keys=length,
                num_heads=heads,
                num_kv_heads=key_heads,
                head_dim=head_dim,
                dtype="bfloat16" if backend == "cuda" else "float32",
                sliced=False,
            )


def checked(name: str, shape: AttentionShape, timer: DeviceTimer) -> AttentionChecked:
    """One implementation on one shape, or why it cannot be had."""
    device: DeviceName = "cuda" if timer.device.type == "cuda" else "cpu"
    if reason := attention_reason(name, device, shape):
        return _refused(name, shape, reason)
    try:
        return _measured(name, shape, timer, device)
    except torch.AcceleratorError:
        raise  # the device is lost to this process
    except RuntimeError as error:  # of the library, for this shape
        return _refused(name, shape, str(error))


def _refused(name: str, shape: AttentionShape, reason: str) -> AttentionChecked:
    return AttentionChecked(**_told(name, shape), refused=reason)  # type: ignore[arg-type]


def _told(name: str, shape: AttentionShape) -> dict[str, object]:
    return {
        "name": name, "seq_len": shape.num_queries, "num_sequences": shape.num_sequences,
        "head_dim": shape.head_dim,
    }  # fmt: skip


def _measured(
    name: str, shape: AttentionShape, timer: DeviceTimer, device: DeviceName
) -> AttentionChecked:
    with torch.no_grad():
        trial = AttentionTrial(attention_implementation(name), shape, timer.device)
        same_bits = trial.results().same_bits(trial.results())
        forward_ns, backward_ns = timer.mean_ns(trial.forward), timer.mean_ns(trial.backward)
        del trial
        error = reference_error(name, _compared(shape), device)
    return AttentionChecked(
        **_told(name, shape),  # type: ignore[arg-type]
        same_bits=same_bits,
        error=error,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        backward_flop_per_s=backward_flops(shape) / backward_ns * 1e9,
    )


def backward_flops(shape: AttentionShape) -> int:
    """Of five products, under the causal mask."""
    seen = shape.num_queries * (shape.num_queries + 1) // 2
    return 5 * 2 * shape.num_sequences * shape.num_heads * shape.head_dim * seen


def _compared(shape: AttentionShape) -> AttentionShape:
    """A sequence of as many queries, if the reference can have so many, and one group of heads."""
    length = min(shape.num_queries, _MOST_COMPARED)
    heads = shape.num_heads // shape.num_kv_heads * _COMPARED_KEY_HEADS
    return replace(
        shape, num_sequences=1, num_queries=length, num_keys=length, num_heads=heads,
        num_kv_heads=_COMPARED_KEY_HEADS,
    )  # fmt: skip


def _attention(backend: Backend) -> Iterator[AttentionChecked]:
    device = torch.device(backend)
    load, _ = matmul_load(device)
    timer = DeviceTimer(device, load=load, load_s=_LOAD_S[backend])
    for shape in attention_shapes(backend):
        for name in _NAMES[backend]:
            yield checked(name, shape, timer)


def _links(backend: Backend) -> tuple[tuple[LinkRate, ...], str]:
    """The rates, or why there are none."""
    if backend == "cpu":
        return (), ""
    from twinstream.executor.probe.cuda_links import measure_copies

    try:
        copies = measure_copies(torch.device(backend))
    except UnsteadyLinkError as error:
        return (), str(error)
    rates = (
        LinkRate(direction=direction, size_bytes=size, gb_per_s=rate)
        for direction, size, rate in copies.rates
    )
    return tuple(rates), ""
