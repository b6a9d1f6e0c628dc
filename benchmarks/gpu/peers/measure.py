"""Time a peer's micro-batches and updates, so that a step of any number of them can be told."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.device.measuring import random_tokens
from benchmarks.gpu.jobs.campaign import PeerKind
from benchmarks.gpu.peers.trainers import Trainer, trainer
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.errors import TwinstreamError


class PeerDoesNotFit(TwinstreamError):
    """A peer ran out of device memory."""


@dataclass(frozen=True)
class PeerWork:
    """What to time: micro-batches of whole sequences, so many after one that is not timed."""

    kind: PeerKind
    spec: ModelSpec
    seq_len: int
    micro_batch_tokens: int
    num_micro_batches: int = 3


@dataclass(frozen=True)
class PeerTimes:
    """Seconds of one micro-batch, forward and backward, and of one update; the last loss.

    `device_used_bytes` is the driver's figure of the whole device, None on a CPU.
    """

    micro_batch_s: float
    update_s: float
    loss: float
    device_used_bytes: int | None


def measure_peer(work: PeerWork, device: torch.device) -> PeerTimes:
    """Train a little: one update warms up, the second is timed.

    Raises:
        PeerDoesNotFit: device memory ran out; says how much there was.
    """
    try:
        return _measure(work, device)
    except torch.OutOfMemoryError as error:
        total = torch.cuda.mem_get_info(device)[1] / 2**30
        raise PeerDoesNotFit(
            f"{work.kind} {work.spec.name} with micro-batches of {work.micro_batch_tokens} tokens "
            f"does not fit the device's {total:.1f} GiB: {str(error).splitlines()[0]}"
        ) from None
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(work: PeerWork, device: torch.device) -> PeerTimes:
    peer = trainer(work.kind, work.spec, Recipe(), device)
    try:
        return _timed(work, peer, device)
    finally:
        peer.close()


def _timed(work: PeerWork, peer: Trainer, device: torch.device) -> PeerTimes:
    tokens = random_tokens(work.spec.vocab_size, work.micro_batch_tokens)
    batches = tokens.view(tokens.shape[0], 2, -1, work.seq_len)
    losses: list[torch.Tensor] = []

    def micro_batch(number: int) -> None:
        losses.append(peer.micro_batch(batches[number % len(batches)], 1.0))

    def several() -> None:
        for number in range(work.num_micro_batches):
            micro_batch(1 + number)

    micro_batch(0)
    peer.update()
    several_s = _seconds(several, device)
    update_s = _seconds(peer.update, device)
    used = None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = int(total - free)
    return PeerTimes(several_s / work.num_micro_batches, update_s, float(losses[-1]), used)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s
