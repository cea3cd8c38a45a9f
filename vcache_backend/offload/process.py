"""The offload process, `python -m vcache_backend.offload.process FD PARENT`: the only code that imports Mooncake. Started by
client.py.

The library keeps the interpreter's lock while it connects (4.4 s without a master, measured) and while it disconnects, may take half
a minute for one call, and crashes where it is used before its set-up or after its end. All of that happens here, where nobody computes
tokens. Whoever waits too long kills this process, and all that it was doing is over.

A message is MessagePack in a frame of multiprocessing's: `[number, verb, arguments]` from the parent, `[number, error, answer]` back,
in any order. Calls read and write memory of the parent's, whose fds follow the verb `share`. It ends with its parent, or with `leave`.

What Mooncake's return codes mean here. The master did not answer (-900): StoreLost, since each further call would take 4 s to say the
same. It was late (-901): StoreDown. A transfer failed (-800), as after a provider's death, which the master notices 10 s late: that
object is not there; StoreDown if none of its batch could be had. No room (-200): FULL; Mooncake says the same of an object larger than
its largest segment. Anything else below zero: that object is not there, or was not stored.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig, mooncake_environment
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.offload.workers import Workers

STORED, FULL, FAILED = "stored", "full", "failed"
"""What becomes of an object that is put. Only STORED says that it can be read; the store may have had it before. FULL: again later may
do. FAILED: its bytes did not arrive, or nobody knows; the store shows no half written object under its name."""
NO_ROOM, TRANSFER_FAILED, RPC_FAILED, RPC_TIMED_OUT = -200, -800, -900, -901
THREADS = 16
BACKLOG = 1 << 16
PARENT_SECONDS = 1.0
"""How often it looks whether the parent is still there."""
NICENESS = 10
"""How much more than the rest the threads that wait for a transfer step back. On two cores 512 MiB came 15 % faster; at 19 a load waited
0.3 s where others computed."""
Place = tuple[int, int, int]
"""Number of a shared memory, first byte in it, bytes."""


class StoreDown(VCacheError):
    """The store, or the way to it, failed; nothing is known about the objects. Counts against the breaker."""


class StoreLost(StoreDown):
    """The same, and this process is of no further use."""


class Mooncake:
    """The verbs. Objects by name, first writer wins; whoever puts and gets them checks their contents (objects.py). Any thread.

    Calls block for as long as the library does. All raise StoreDown. The library has no call before `open`.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Load the library. Raises ConfigError with what to install."""
        self._config = config
        mooncake_environment(config)
        self._library = _load_library()
        # The master keeps tenants apart only if it was started for that.
        self._prefix = f"{config.tenant}/" if config.tenant else ""
        self._memory: list[tuple[int, mmap.mmap]] = []
        self._raw: Any = None
        self._is_open = False

    def open(self) -> dict[str, str]:
        """Connect: what is in force, for people. Blocks for 30 ms, or until the master has not answered for `rpc_seconds`."""
        config = self._config
        _check_master(config.master, config.rpc_seconds)
        hostname = config.hostname or _way_out(config.master)
        environment = mooncake_environment(msgspec.structs.replace(config, hostname=hostname))
        # `setup` ignores what it does not know.
        settings = {
            "local_hostname": hostname,
            "metadata_server": config.metadata,
            "global_segment_size": str(int(config.segment_bytes)),
            "local_buffer_size": str(int(config.local_buffer_bytes)),
            "protocol": config.protocol,
            "rdma_devices": config.devices,
            "master_server_addr": config.master,
            "tenant_id": config.tenant or "default",
        }
        # Kept, since its destructor would take 13 s.
        self._raw = self._library.MooncakeDistributedStore()
        code = self._raw.setup(settings)
        if code:
            raise StoreLost(f"setup failed ({code})")
        for address, memory in self._memory:
            self._register(address, len(memory))
        self._is_open = True
        return settings | environment

    def share(self, fd: int) -> None:
        """Memory that objects will be put from and got into, before `open` or after."""
        # Populated, so that no page is missing in the middle of a transfer.
        memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory.append((address, memory))
        if self._is_open:
            self._register(address, len(memory))

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which are there; without a lease where the library can (0.3.14), since one keeps an object from being evicted for 10 s."""
        raw = self._opened()
        codes = _checked("look-up", getattr(raw, "batch_probe_key", raw.batch_is_exist)(self._full(names)))
        return [code == 1 for code in codes]

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[str]:
        """Write objects, in one batched call: STORED, FULL or FAILED for each."""
        config = self._library.ReplicateConfig()
        config.replica_num = self._config.replicas
        raw, sizes = self._opened(), [nbytes for _, _, nbytes in places]
        codes = _checked("put", raw.batch_put_from(self._full(names), self._addresses(places), sizes, config))
        return [STORED if code == 0 else FULL if code == NO_ROOM else FAILED for code in codes]

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[int]:
        """Read objects, in one batched call: the bytes of each, 0 if it is not there or could not be read. A place may be larger."""
        raw, sizes = self._opened(), [nbytes for _, _, nbytes in places]
        return [max(0, code) for code in _checked("get", raw.batch_get_into(self._full(names), self._addresses(places), sizes))]

    def remove(self, names: Sequence[str]) -> None:
        """Forget objects, also such as are being read."""
        _checked("remove", self._opened().batch_remove(self._full(names), True))

    def remove_under(self, start: str) -> int:
        """Forget all objects whose names begin with `start`, whoever wrote them, also such as are being read: how many."""
        (code,) = _checked("remove", [self._opened().remove_by_regex("^" + re.escape(self._prefix + start), True)])
        if code < 0:
            raise StoreDown(f"objects under {start!r} could not be removed ({code})")
        return code

    def close(self) -> None:
        """Leave, so that memory lent to the store is known to be gone; not during a call."""
        if self._is_open:
            self._raw.close()

    def _opened(self) -> Any:
        if not self._is_open:
            raise StoreDown("the store is not open")
        return self._raw

    def _full(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _addresses(self, places: Sequence[Place]) -> list[int]:
        """Here. Raises StoreDown for what is not in shared memory."""
        for number, start, nbytes in places:
            if not 0 <= number < len(self._memory) or not 0 <= start <= start + nbytes <= len(self._memory[number][1]):
                raise StoreDown(f"bytes {start:,} to {start + nbytes:,} of memory {number} are not shared")
        return [self._memory[number][0] + start for number, start, _ in places]

    def _register(self, address: int, nbytes: int) -> None:
        if self._config.protocol == "rdma" and self._raw.register_buffer(address, nbytes):
            raise StoreLost(f"{nbytes:,} B of memory could not be registered")


def _checked(what: str, codes: list[int]) -> list[int]:
    if RPC_FAILED in codes:
        raise StoreLost(f"{what}: no connection to the master ({RPC_FAILED})")
    if RPC_TIMED_OUT in codes:
        raise StoreDown(f"{what}: no answer from the master in time ({RPC_TIMED_OUT})")
    if TRANSFER_FAILED in codes and all(code < 0 for code in codes):
        raise StoreDown(f"{what}: none of {len(codes)} objects could be transferred ({TRANSFER_FAILED})")
    return codes


def _load_library() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "mooncake":
            raise ConfigError("offload.store: mooncake needs its client: pip install vcache-backend[mooncake]") from error
        hint = " (apt install libibverbs1)" if "libibverbs" in str(error) else ""
        raise ConfigError(f"offload.store: Mooncake's client does not load: {error}{hint}") from error
    return store


def _check_master(master: str, seconds: float) -> None:
    """Raises StoreDown unless something at HOST:PORT answers. What is sent is no request of Mooncake's: a master that lives hangs up."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as probe:
            probe.sendall(bytes(64))
            probe.recv(1)
    except ConnectionResetError:
        return
    except OSError as error:
        raise StoreDown(f"no answer from the master at {master}: {error}") from error


def _way_out(master: str) -> str:
    """The address of this host that packets to `master` leave from. Raises OSError."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class OffloadService:
    """Makes one parent's calls. Look-ups, transfers and removals have threads of their own, so that none waits for another kind."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._store: Mooncake | None = None
        asks = Workers("ask", THREADS, BACKLOG)
        transfers = Workers("transfer", THREADS, BACKLOG, _step_back)
        removals = Workers("remove", 1, BACKLOG)
        self._workers = {
            "open": asks,
            "exist": asks,
            "put": transfers,
            "get": transfers,
            "remove": removals,
            "remove_under": removals,
        }
        self._under_way = 0

    def serve(self) -> None:
        """Until the parent is gone or says `leave`."""
        while True:
            number, verb, arguments = msgspec.msgpack.decode(self._connection.recv_bytes())
            if verb == "leave":
                break
            if verb == "load":
                self._answer(number, verb, self._load, arguments)
            elif self._store is None:
                self._answer(number, verb, _not_loaded, [])
            elif verb == "share":
                self._answer(number, verb, self._store.share, [recv_handle(self._connection)])
            else:
                call = getattr(self._store, verb)
                self._workers[verb].submit(lambda n=number, v=verb, c=call, a=arguments: self._answer(n, v, c, a))  # type: ignore[misc]
        if self._store is not None and not self._under_way:
            self._store.close()

    def _load(self, settings: dict[str, Any]) -> None:
        self._store = Mooncake(msgspec.convert(settings, MooncakeConfig, strict=False, dec_hook=lambda kind, value: kind(value)))

    def _answer(self, number: int, verb: str, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
        error, answer = None, None
        with self._sending:
            self._under_way += 1
        try:
            answer = call(*arguments)
        except VCacheError as known:
            error = [type(known).__name__, str(known)]
        except Exception as unknown:  # noqa: BLE001 - the parent must not wait for an answer that never comes
            error = ["StoreDown", f"{verb}: {type(unknown).__name__}: {unknown}"]
        with self._sending:
            self._under_way -= 1
            self._connection.send_bytes(msgspec.msgpack.encode([number, error, answer]))


def _not_loaded() -> None:
    raise StoreDown("the library is not loaded")


def _step_back() -> None:
    """The library's transfers are moved by threads of its own, while the one that called spins, a core full, until they are through
    (0.3.13: 100 % of the time, measured). Where there are not cores enough it takes the core that moves the bytes, or computes."""
    # Of this thread alone: that is what Linux does.
    os.nice(NICENESS)


def _end_with(parent: int) -> None:
    """In a thread: end when the parent has, be it before this began, though a process that it forked may still hold the other end of the
    socket."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


def main() -> None:
    # Ctrl-C is for the parent, with which this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with suppress(OSError, EOFError):
        OffloadService(Connection(int(sys.argv[1]))).serve()
    # Not by way of the library's own clean-up: calls may be under way.
    os._exit(0)


if __name__ == "__main__":
    main()
