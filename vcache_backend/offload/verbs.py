"""Mooncake's verbs and the meaning of its return codes. Only the offload process (process.py)
imports the library.

The library holds the GIL while it connects (4.4 s without a master, measured), may take half a
minute for one call, and crashes if used before its set-up or after its end.

Return codes:
- -900, the master did not answer: StoreLost, since each further call would take 4 s to fail.
- -901, the master was late: StoreDown.
- -800, a transfer failed, as after a provider's death, which the master notices 10 s later: the
  object counts as absent; StoreDown if no object of the batch could be read.
- -200, no room: FULL, also for an object larger than Mooncake's largest segment.
- Other negative codes: the object is absent, or was not stored."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig, mooncake_environment, split_address
from vcache_backend.errors import ConfigError, VCacheError

STORED, FULL, FAILED = "stored", "full", "failed"
"""Outcomes of a put. FULL: a later try may succeed. FAILED: the bytes did not arrive, or nobody
knows; no reader finds half of an object. STORED is no proof: after an interrupted put, the store
answers STORED for the object for half a minute."""
NO_ROOM, TRANSFER_FAILED, RPC_FAILED, RPC_TIMED_OUT = -200, -800, -900, -901
INSTALL = "pip install 'vcache-backend[mooncake]', without CUDA mooncake-transfer-engine-non-cuda"
NEEDED = {
    "libibverbs": "apt-get install libibverbs1",
    "libmlx5": "apt-get install ibverbs-providers",
    "libcuda": "this build needs CUDA: pip install mooncake-transfer-engine-non-cuda",
}
"""What to do if a library is missing with which Mooncake's is linked."""
Place = tuple[int, int]
"""The first byte in the shared memory, and the number of bytes."""


class StoreDown(VCacheError):
    """The store, or its connection, failed: the outcome is unknown."""


class StoreLost(StoreDown):
    """The store failed, and this process can no longer use it."""


class Mooncake:
    """The verbs. Objects have names, and the first writer wins; callers check the contents
    (objects.py). Any thread.

    Calls block as long as the library does. All calls raise StoreDown, also before `open`."""

    def __init__(self, config: MooncakeConfig, memory: int) -> None:
        """memory: a memfd, the source of puts and the target of gets; the size may be set later."""
        self._config, self._fd = config, memory
        self._library: Any = None
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._raw: Any = None
        self._is_open = False

    def load(self) -> None:
        """Load the library, before `open`. ConfigError says what to install."""
        mooncake_environment(self._config)
        self._library = _load_library()

    def open(self) -> dict[str, str]:
        """Connect. Returns the settings in force, for people; empty if already connected. Takes 30
        ms, or `rpc_seconds` without an answer of a master."""
        if self._is_open:
            return {}
        config = self._config
        hostname = _way_to(config.master, config.rpc_seconds)
        hostname = config.hostname or hostname
        environment = mooncake_environment(msgspec.structs.replace(config, hostname=hostname))
        # `setup` ignores unknown settings. Lend no memory: providers do, and outlive us. Scratch
        # memory is not needed.
        settings = {
            "local_hostname": hostname,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": "0",
            "local_buffer_size": "0",
            "protocol": config.protocol,
            "rdma_devices": config.devices,
            "master_server_addr": config.master,
        }
        # Never drop the object: its destructor takes 13 s.
        self._raw = self._library.MooncakeDistributedStore()
        code = self._raw.setup(settings)
        if code:
            given = f"hostname {hostname}, protocol {config.protocol}, devices {config.devices}"
            raise StoreLost(f"setup failed ({code}) with {given}")
        self._is_open = True
        self._addresses([])
        return settings | environment

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Whether each object exists. Takes no lease if the library has such a call (0.3.14), since
        a lease keeps an object from eviction for 10 s."""
        raw = self._opened()
        probe = getattr(raw, "batch_probe_key", raw.batch_is_exist)
        return [code == 1 for code in _checked("look-up", probe(list(names)))]

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[str]:
        """Write objects in one batched call. Returns STORED, FULL or FAILED for each."""
        raw, sizes = self._opened(), [nbytes for _, nbytes in places]
        codes = raw.batch_put_from(list(names), self._addresses(places), sizes)
        codes = _checked("put", codes)
        return [STORED if code == 0 else FULL if code == NO_ROOM else FAILED for code in codes]

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[int]:
        """Read objects in one batched call. Returns the bytes of each object: 0 if absent or
        unreadable. A place may be larger than its object."""
        raw, sizes = self._opened(), [nbytes for _, nbytes in places]
        codes = raw.batch_get_into(list(names), self._addresses(places), sizes)
        return [max(0, code) for code in _checked("get", codes)]

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, even while they are being read."""
        _checked("remove", self._opened().batch_remove(list(names), True))

    def remove_under(self, start: str) -> int:
        """Remove all objects with names that begin with `start`, of all writers, even during a
        read. Returns their number."""
        removed = self._opened().remove_by_regex("^" + re.escape(start), True)
        (code,) = _checked("remove", [removed])
        if code < 0:
            raise StoreDown(f"objects under {start!r} could not be removed ({code})")
        return code

    def _opened(self) -> Any:
        if not self._is_open:
            raise StoreDown("the store is not open")
        return self._raw

    def _addresses(self, places: Sequence[Place]) -> list[int]:
        """The addresses of places in this process. Maps the memory once it has a size. StoreDown
        for a place outside of the memory."""
        with self._lock:
            size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
            if self._memory is None and size:
                # Populate all pages before a transfer.
                self._memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                rdma = self._config.protocol == "rdma"
                if rdma and self._raw.register_buffer(self._base(), size):
                    raise StoreLost(f"{size:,} B of memory could not be registered")
        for start, nbytes in places:
            stop = start + nbytes
            if self._memory is None or not 0 <= start <= stop <= len(self._memory):
                raise StoreDown(f"bytes {start:,} to {stop:,} are not in the shared memory")
        return [self._base() + start for start, _ in places]

    def _base(self) -> int:
        assert self._memory is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def _checked(what: str, codes: list[int]) -> list[int]:
    if RPC_FAILED in codes:
        raise StoreLost(f"{what}: no connection to the master ({RPC_FAILED})")
    if RPC_TIMED_OUT in codes:
        raise StoreDown(f"{what}: no answer from the master in time ({RPC_TIMED_OUT})")
    if TRANSFER_FAILED in codes and all(code < 0 for code in codes):
        none = f"none of {len(codes)} objects could be transferred ({TRANSFER_FAILED})"
        raise StoreDown(f"{what}: {none}")
    return codes


def _load_library() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        needed = (advice for library, advice in NEEDED.items() if library in str(error))
        advice = next(needed, INSTALL)
        raise ConfigError(f"Mooncake's client does not load: {error}; {advice}") from error
    return store


def _way_to(master: str, seconds: float) -> str:
    """Find the address of this host from which packets to `master`, HOST:PORT, leave. StoreDown
    unless a Mooncake master listens there: it refuses 64 zero bytes, and hangs up."""
    here = ""
    try:
        with socket.create_connection(split_address(master, "master"), seconds) as probe:
            here = str(probe.getsockname()[0])
            probe.sendall(bytes(64))
            probe.recv(1)
    except ConnectionResetError:
        pass
    except OSError as error:
        raise StoreDown(f"no answer from the master at {master}: {error}") from error
    return here
