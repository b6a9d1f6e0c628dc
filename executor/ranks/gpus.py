"""The GPU of each rank, and the connection of its groups there.

Not yet run on a GPU (see docs/benchmarks/README.md). It is tested with stand-ins.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from twinstream.executor.memory.device_memory import expand_segments
from twinstream.executor.ranks.errors import GpusError

_LOOK = "import sys, twinstream.executor.ranks.gpus as g; g.print_gpus(int(sys.argv[1]))"


@dataclass(frozen=True)
class LocalGpus:
    """The GPUs of this machine that ranks run on, all of one kind.

    `free_bytes` is that of the GPU with the least; `nvlink` says whether NVLink links each with
    each, and is None where nobody knows.
    """

    name: str
    free_bytes: int
    nvlink: bool | None


def require_gpus(num_ranks: int) -> None:
    """
    Raises:
        GpusError: this machine has fewer GPUs than ranks.
    """
    found = torch.cuda.device_count()
    if num_ranks > found:
        raise GpusError(
            f"{num_ranks} ranks on one machine need a GPU each, and it has {found}: plan for "
            f"{found} ranks, or run on its cores (--backend cpu)"
        )


def num_gpus() -> int:
    """Return how many GPUs of this machine this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def detect_gpus(num_ranks: int) -> LocalGpus:
    """Return the GPUs of so many ranks of this machine.

    A process of its own looks at them: it creates a CUDA context on each, which ends with it.

    Raises:
        GpusError: it could not look, or they are of several kinds.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, str(num_ranks)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise GpusError(f"{num_ranks} GPUs cannot be looked at: {why}")
    found = json.loads(done.stdout)
    names = found["names"]
    if len(set(names)) > 1:
        kinds = "; ".join(f"GPU {number} is {name}" for number, name in enumerate(names))
        raise GpusError(
            f"{num_ranks} ranks need GPUs of one kind, and {kinds}: choose some that are alike "
            "with CUDA_VISIBLE_DEVICES, or --ranks 1"
        )
    return LocalGpus(names[0], min(found["free_bytes"]), found["nvlink"])


def print_gpus(num_ranks: int) -> None:
    """Print what `detect_gpus` reads of the GPUs, as JSON."""
    gpus = range(num_ranks)
    uuids = [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]
    found = {
        "names": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "free_bytes": [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus],
        "nvlink": linked_by_nvlink(uuids),
    }
    print(json.dumps(found))


def linked_by_nvlink(uuids: Sequence[str], nvml: Any = None) -> bool | None:
    """Return whether NVLink joins each pair of these devices ("GPU-..."); None without NVML.

    Args:
        nvml: the module, by default `pynvml`.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return all(
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == nvml.NVML_P2P_STATUS_OK
            for one, other in combinations(handles, 2)
        )
    except nvml.NVMLError:
        return None


def take_gpu(local_rank: int) -> torch.device:
    """The GPU of a rank among those of its machine, in order; it is current from now on.

    NCCL is told to connect whatever it may use when a group is made, not when it is used first.

    Raises:
        GpusError: there is none for it.
    """
    require_gpus(local_rank + 1)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    torch.cuda.set_device(local_rank)
    expand_segments()  # before groups allocate
    return torch.device("cuda", local_rank)


def connect_group(
    group: dist.ProcessGroup, members: tuple[int, ...], device: torch.device, *, is_message: bool
) -> None:
    """Connect a group: exchange something of each kind once, and wait for it.

    NCCL makes connections and their buffers at the first exchange of a kind, for which the host
    waits: that is done here, by all ranks in one order, and neither in a run nor beside it.

    Args:
        members: sender and receiver of messages, or the group in rank order.
    """
    one = torch.zeros(1, device=device)
    if is_message:
        sender, receiver = members
        if dist.get_rank() == sender:
            dist.send(one, receiver, group=group)
        else:
            dist.recv(one, sender, group=group)
    else:
        each = torch.zeros(len(members), device=device)
        dist.all_to_all_single(torch.zeros_like(each), each, group=group)
        dist.all_gather(list(each.tensor_split(len(members))), one, group=group)
        dist.reduce_scatter_tensor(one, each, group=group)
        dist.all_reduce(one, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
