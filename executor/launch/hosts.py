"""Ranks on several machines: they come to the process of rank 0, which trains with them.

Rank 0 listens at a free port of its machine's address, which it tells in the store that all ranks
reach, with a key that nobody else has. What then passes is what passes to processes of one machine.
"""

import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
)
from time import monotonic

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from twinstream.executor.launch.worker import serve_host
from twinstream.executor.ranks.errors import RendezvousError
from twinstream.executor.ranks.torchrun import StartedRank
from twinstream.executor.ranks.world import Patience, StoreAddress, reach_store

_WHERE = "trainer"
_LOOK_AGAIN_S = 0.2
_KEY_BYTES = 32
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


@dataclass(frozen=True)
class OtherRanks:
    """The ends of the ways to all ranks but this process's, by rank from 1 on.

    All meet at a store, which is open for as long as this is kept; `name` is theirs in it.
    """

    pipes: Sequence[Connection]
    address: StoreAddress
    name: str
    store: Store


def meet_ranks(me: StartedRank, patience: Patience) -> OtherRanks:
    """Wait until all other ranks have come; called by rank 0.

    Raises:
        RendezvousError: the port is taken, or a rank did not come in `patience.start_s`.
    """
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(me, patience, opens=not has_store)
    until = monotonic() + patience.start_s
    key, found = secrets.token_bytes(_KEY_BYTES), dict[int, Connection]()
    with socket.create_server((me.address, 0), family=_family(me.address)) as listening:
        listening.settimeout(_LOOK_AGAIN_S)
        store.set(_WHERE, f"{listening.getsockname()[1]} {key.hex()}")
        while len(found) < me.size - 1:
            if monotonic() > until:
                raise _late(me, set(found), patience)
            with contextlib.suppress(TimeoutError):
                pipe = _connection(listening.accept()[0])
                # a stranger may say nothing for ever
                threading.Thread(target=_admit, args=(pipe, key, found), daemon=True).start()
    pipes = [found[rank] for rank in sorted(found)]
    return OtherRanks(pipes, StoreAddress(me.port, me.address), _name(), store)


def _admit(pipe: Connection, key: bytes, found: dict[int, Connection]) -> None:
    """Add who has the key."""
    try:
        deliver_challenge(pipe, key)
        answer_challenge(pipe, key)
        found[int.from_bytes(pipe.recv_bytes(8), "big")] = pipe
    except (AuthenticationError, EOFError, OSError):
        pipe.close()


def work_for_trainer(me: StartedRank, patience: Patience | None = None) -> None:
    """Be a rank of the training that rank 0 starts, until it is through: then the process ends.

    Raises:
        RendezvousError: rank 0 did not come, or cannot be reached.
    """
    patience = patience or Patience()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends a run, after a checkpoint
    store = _store(me, patience)
    try:
        store.wait([_WHERE], timedelta(seconds=patience.start_s))
        port, key = store.get(_WHERE).decode().split()
        pipe = _connection(socket.create_connection((me.address, int(port)), patience.start_s))
        answer_challenge(pipe, bytes.fromhex(key))
        deliver_challenge(pipe, bytes.fromhex(key))
        pipe.send_bytes(me.rank.to_bytes(8, "big"))
    except (RuntimeError, OSError, EOFError) as error:
        raise RendezvousError(
            f"rank {me.rank} cannot come to rank 0 at {me.address}: "
            f"{str(error).splitlines()[0]}; is it running, and can this machine reach it?"
        ) from None
    serve_host(pipe, me.rank, me.local_rank)


def _store(me: StartedRank, patience: Patience, *, opens: bool = False) -> Store:
    """The store at the address of rank 0, which torchrun has opened or rank 0 opens."""
    return PrefixStore(
        _name(), reach_store(StoreAddress(me.port, me.address), patience, opens=opens)
    )


def _name() -> str:
    """A key space of its own for each time that torchrun starts all ranks."""
    return f"twinstream/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _connection(made: socket.socket) -> Connection:
    """Of a machine that is gone it ends within a minute, too."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(made.detach())


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


def _late(me: StartedRank, come: set[int], patience: Patience) -> RendezvousError:
    left = ", ".join(str(rank) for rank in range(1, me.size) if rank not in come)
    return RendezvousError(
        f"rank 0 of {me.size} waited {patience.start_s:g} s at {me.address} for rank {left}, which "
        "did not come: is torchrun running on every machine, and can it reach this one?"
    )
