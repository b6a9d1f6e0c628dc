"""The rendezvous of ranks: one store, one default process group, and checks that all agree."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from twinstream.executor.program.options import BackendName
from twinstream.executor.ranks.errors import CommunicationError, RanksDifferError, RendezvousError
from twinstream.executor.ranks.gpus import take_gpu
from twinstream.executor.ranks.torchrun import ENVIRONMENT, StartedRank, not_started

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_START_S = 120.0
_NEVER = timedelta(days=365)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Patience:
    """The time that a rank waits for others: `timeout_s` in each op, `start_s` for all to join."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    start_s: float = DEFAULT_START_S


@dataclass(frozen=True)
class StoreAddress:
    """Where ranks find the store that all share."""

    port: int
    address: str = _LOOPBACK


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, its device, and the store that all share."""

    rank: int
    size: int
    store: Store
    patience: Patience = Patience()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def group_timeout(self) -> timedelta:
        """The timeout of calls on process groups. NCCL gets none: it counts from the enqueueing."""
        return _NEVER if self.device.type == "cuda" else timedelta(seconds=self.patience.timeout_s)

    def for_run(self, number: int) -> "World":
        """Return the world with a key space of its own in the store, for one run."""
        return replace(self, store=PrefixStore(f"run{number}", self.store))

    def require_same(self, topic: str, claims: Mapping[str, str]) -> None:
        """Return when all ranks have made the same claims.

        Raises:
            RendezvousError: a rank has claimed nothing in `start_s`.
            RanksDifferError: one claims something else than rank 0.
        """
        said = self._all_gather(topic, json.dumps(dict(claims)), self.patience.start_s)
        for rank, theirs in enumerate(said):
            for what, value in json.loads(theirs).items():
                if value != (first := json.loads(said[0])[what]):
                    raise RanksDifferError(
                        f"rank {rank} has {what} {value}, and rank 0 has {first}: all ranks need "
                        "the same"
                    )

    def barrier(self, topic: str, limit_s: float) -> None:
        """Return when all ranks have reached this call.

        Raises:
            RendezvousError: one has not in `limit_s`.
        """
        self._all_gather(topic, "", limit_s)

    def broadcast(self, topic: str, value: int) -> int:
        """Return the value that rank 0 passes; every rank calls this."""
        if self.rank == 0:
            self.store.set(topic, str(value))
        self._await(topic, 0, self.patience.start_s)
        return int(self.store.get(topic))

    def shutdown(self) -> None:
        """Return when all ranks have finished; rank 0, which may own the store, leaves last.

        Raises:
            CommunicationError: one is not in `timeout_s`.
        """
        timeout_s = self.patience.timeout_s
        try:
            self._all_gather("through", "", timeout_s)
        except RendezvousError:
            late = [r for r in range(self.size) if not self.store.check([f"through/{r}"])]
            raise CommunicationError(
                f"rank {self.rank} is through, and {_ranks(late)} not {timeout_s:g} s later",
                rank=self.rank, op_id=None, peers=tuple(late), cause="timeout",
            ) from None  # fmt: skip
        if self.rank:
            self.store.set(f"left/{self.rank}", "")
        else:
            with contextlib.suppress(RendezvousError):
                for rank in range(1, self.size):
                    self._await(f"left/{rank}", rank, timeout_s)

    def _all_gather(self, topic: str, text: str, limit_s: float) -> list[str]:
        self.store.set(f"{topic}/{self.rank}", text)
        for rank in range(self.size):
            self._await(f"{topic}/{rank}", rank, limit_s)
        return [self.store.get(f"{topic}/{rank}").decode() for rank in range(self.size)]

    def _await(self, key: str, rank: int, limit_s: float) -> None:
        try:
            self.store.wait([key], timedelta(seconds=limit_s))
        except RuntimeError as error:  # what torch's store raises of everything
            raise RendezvousError(
                f"rank {self.rank} of {self.size} waited {limit_s:g} s for rank {rank}, which did "
                "not come: is it running, and can it reach the others?"
            ) from error


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


@contextlib.contextmanager
def world_of_environment(backend: BackendName, patience: Patience) -> Iterator[World]:
    """Join the world of torchrun, or of whoever set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    On CUDA the process takes the GPU of its LOCAL_RANK, where that is not set that of its RANK.

    Raises:
        ArgumentError: one of these is not set.
        GpusError: there is no GPU for it.
        RendezvousError: the port is taken, or somebody did not come.
    """
    me = StartedRank.here()
    if me is None:
        raise not_started(ENVIRONMENT)
    try:
        limit = timedelta(seconds=patience.start_s)
        store, rank, size = next(iter(rendezvous("env://", me.rank, me.size, timeout=limit)))
    except RuntimeError as error:
        raise _not_met(error, me.port, me.rank) from None
    device = device_of(backend, me.local_rank)
    with in_groups(World(rank, size, store, patience, device)) as world:
        yield world


def device_of(backend: BackendName, local_rank: int) -> torch.device:
    """Return the device of a rank, by its number among the ranks of its machine.

    Raises:
        GpusError: there is no GPU for it.
    """
    return take_gpu(local_rank) if backend == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def in_groups(world: World) -> Iterator[World]:
    """Make the world's default process group (gloo), and destroy it afterwards.

    After an error on a GPU groups are left as they are: destroying them would wait in NCCL for the
    other ranks, and the error would not be printed.

    Raises:
        RendezvousError: somebody did not come.
        RanksDifferError: ranks have different versions of twinstream or torch.
    """
    versions = {"twinstream": version("twinstream"), "torch": torch.__version__}
    world.require_same("versions", versions)
    if _is_local(os.environ.get("MASTER_ADDR", "")):
        _use_loopback()
    dist.init_process_group(
        "gloo", store=world.store, rank=world.rank, world_size=world.size,
        timeout=timedelta(seconds=world.patience.timeout_s),
    )  # fmt: skip
    try:
        yield world
    except BaseException:
        if world.device.type == "cpu":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def open_store(port: int | None) -> TCPStore:
    """Open a store that only processes of this machine can reach, by default on a free port.

    Left to itself, TCPStore listens on all interfaces, whatever host it is given.

    Raises:
        RendezvousError: the port is taken.
    """
    try:
        listening = socket.create_server((_LOOPBACK, port or 0))
    except OSError as error:
        raise _not_met(error, port or 0, 0) from None
    return TCPStore(
        _LOOPBACK, listening.getsockname()[1], is_master=True, wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def reach_store(where: StoreAddress, patience: Patience, *, opens: bool = False) -> TCPStore:
    """Connect to the store where ranks meet, or open it on all interfaces of this machine.

    Raises:
        RendezvousError: it is not there in `patience.start_s`, or the port is taken.
    """
    limit = timedelta(seconds=patience.start_s)
    try:
        return TCPStore(
            where.address, where.port, is_master=opens, timeout=limit, wait_for_workers=False
        )
    except RuntimeError as error:
        raise _not_met(error, where.port, 0) from None


def _not_met(error: RuntimeError | OSError, port: int, rank: int) -> RendezvousError:
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return RendezvousError(
            f"port {port}, on which rank {rank} was to wait for the others, is in use: name "
            "another one (MASTER_PORT), or none"
        )
    return RendezvousError(f"rank {rank} cannot meet the others: {str(error).splitlines()[0]}")


def _is_local(address: str) -> bool:
    return address in ("", _LOOPBACK, "localhost", "::1")


def _use_loopback() -> None:
    """A machine's own name may lead nowhere, or out and in again."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
