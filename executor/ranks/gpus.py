"""Which GPU a rank has, and its groups' first meeting there.

Not yet run on a GPU (see docs/benchmarks/README.md). It is tested with stand-ins.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

from twinstream.executor.ranks.errors import TooFewGpusError

_LOOK = """
import sys
import torch
print(min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(int(sys.argv[1]))))
"""


def require_gpus(num_ranks: int) -> None:
    """
    Raises:
        TooFewGpusError: this machine has fewer GPUs than ranks.
    """
    found = torch.cuda.device_count()
    if num_ranks > found:
        raise TooFewGpusError(
            f"{num_ranks} ranks on one machine need a GPU each, and it has {found}: plan for "
            f"{found} ranks, or run on its cores (--backend cpu)"
        )


def num_gpus() -> int:
    """Of this machine, as far as this process may use them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def least_free_bytes(num_ranks: int) -> int:
    """The least that is free of the GPUs of so many ranks.

    A process of its own looks: CUDA's context, which stays on each GPU that one has looked at,
    ends with it.

    Raises:
        TooFewGpusError: it could not look.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, str(num_ranks)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise TooFewGpusError(f"the free memory of {num_ranks} GPUs cannot be read: {why}")
    return int(done.stdout)


def take_gpu(local_rank: int) -> torch.device:
    """The GPU of a rank among those of its machine, in order; it is current from now on.

    NCCL is told to connect whatever it may use when a group is made, not when it is used first.

    Raises:
        TooFewGpusError: there is none for it.
    """
    require_gpus(local_rank + 1)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def meet_first(
    group: dist.ProcessGroup, members: tuple[int, ...], device: torch.device, *, is_message: bool
) -> None:
    """Have a group exchange something of each kind once, and wait for it.

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
