"""A Mooncake store as the offload tier.

What its return codes mean here. The master did not answer (-900, -901): StoreDown, whatever else the batch says; after -900 the
store is BROKEN until `open`, since each further call would take 4 s to say the same. A transfer failed (-800), as after a provider's death,
which the master notices 10 s late: that object is not there; StoreDown if none of its batch could be had. No room (-200): FULL. Mooncake
says the same of an object larger than its largest segment, so TOO_LARGE is never answered. Anything else below zero: that object is
not there, or was not stored.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig, mooncake_environment
from vcache_backend.errors import VCacheError
from vcache_backend.offload.mooncake_client import Client, check_master, connect, load_library
from vcache_backend.offload.store import Put, Span, StoreDown

log = logging.getLogger(__name__)

NO_ROOM, TRANSFER_FAILED, RPC_FAILED, RPC_TIMED_OUT = -200, -800, -900, -901
DOUBT_SECONDS = 30.0
"""How long the master keeps the place of an object whose put was cut short. Until then further puts of it answer 0 and do nothing."""
MAX_DOUBTS = 1 << 16


class State(Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    CLOSED = "closed"


class MooncakeStore:
    """See ObjectStore. Threads: any. Raises ConfigError, here only, if the library is not installed."""

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._environment = mooncake_environment(config)
        self._library = load_library()
        self._pid = os.getpid()
        # The master keeps tenants apart only if it was started for that.
        self._prefix = f"{config.tenant}/" if config.tenant else ""
        self._lock = threading.Lock()
        self._state = State.NEW
        self._client: Client | None = None
        self._clients: list[Client] = []
        self._memory: list[Span] = []
        self._doubts: OrderedDict[str, float] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._error = ""

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_open(self) -> bool:
        return self._state is State.OPEN and self._pid == os.getpid()

    def open(self) -> None:
        """Blocks for 30 ms, or until the master has not answered for `rpc_seconds`."""
        self._check_process()
        with self._lock:
            if self._state is State.OPEN:
                return
            if self._state is State.OPENING:
                raise StoreDown(f"Mooncake at {self._config.master} is being opened by another thread")
            self._state = State.OPENING
            memory, client = list(self._memory), self._client
        try:
            check_master(self._config.master, self._config.rpc_seconds)
            settings = self._settings()
            if client is None:
                client = connect(self._library, settings, memory if self._config.protocol == "rdma" else [])
            else:
                self._check(client)
        except (OSError, VCacheError) as error:
            with self._lock:
                if self._state is State.OPENING:
                    self._state = State.BROKEN
            raise self._down(f"no connection: {error}") from error
        with self._lock:
            self._clients = [one for one in self._clients if one is not client and not one.done(0)] + [client]
            if self._state is not State.OPENING:
                client.retire()
                raise StoreDown("closed while it was opened")
            self._client, self._state = client, State.OPEN
            late = self._memory[len(memory) :]
        self._count(opened=1)
        said = settings | self._environment
        log.info("Mooncake: %s", " ".join(f"{name}={value}" for name, value in said.items() if value))
        for span in late:
            self._register(span)

    def register(self, memory: Span, fd: int = -1) -> None:
        self._check_process()
        with self._lock:
            self._memory.append(memory)
            now = self._state is State.OPEN
        if now:
            self._register(memory)

    def contains_prefix(self, names: Sequence[str]) -> int:
        if not names:
            return 0
        codes = self._exist(self._full(names))
        return next((place for place, code in enumerate(codes) if code != 1), len(codes))

    def put(self, names: Sequence[str], sources: Sequence[Span]) -> list[Put]:
        if not names:
            return []
        full, addresses, sizes = self._full(names), [span.address for span in sources], [span.nbytes for span in sources]
        config = self._library.ReplicateConfig()
        config.replica_num = self._config.replicas
        codes = self._call(lambda raw: raw.batch_put_from(full, addresses, sizes, config))
        doubted = self._note_doubts(full, codes)
        self._raise_if_down("put", codes)
        seen = dict(zip(doubted, self._exist(doubted), strict=True)) if doubted else {}
        stored = [code == 0 and seen.get(name, 1) == 1 for name, code in zip(full, codes, strict=True)]
        self._count(put_bytes=sum(itertools.compress(sizes, stored)))
        answers = [
            Put.STORED if good else Put.FULL if code == NO_ROOM else Put.FAILED for good, code in zip(stored, codes, strict=True)
        ]
        self._count(**Counter(f"put_{answer.value}" for answer in answers))
        return answers

    def get_into(self, names: Sequence[str], targets: Sequence[Span]) -> list[int]:
        if not names:
            return []
        full, addresses, sizes = self._full(names), [span.address for span in targets], [span.nbytes for span in targets]
        codes = self._call(lambda raw: raw.batch_get_into(full, addresses, sizes))
        self._raise_if_down("get", codes)
        got = [max(0, code) for code in codes]
        self._count(get_bytes=sum(got), got=sum(size > 0 for size in got), not_got=sum(size == 0 for size in got))
        return got

    def remove(self, names: Sequence[str]) -> None:
        if not names:
            return
        codes = self._call(lambda raw: raw.batch_remove(self._full(names), True))
        self._raise_if_down("remove", codes)
        self._count(removed=sum(code == 0 for code in codes))

    def remove_under(self, start: str) -> int:
        pattern = "^" + re.escape(self._prefix + start)
        (code,) = self._call(lambda raw: [raw.remove_by_regex(pattern, True)])
        self._raise_if_down("remove", [code])
        if code < 0:
            raise self._down(f"objects under {start!r} could not be removed ({code})")
        self._count(removed=code)
        return code

    def stats(self) -> dict[str, Any]:
        with self._lock:
            calls = sum(client.calls for client in self._clients)
            return {"state": self._state.value, "calls_under_way": calls, "last_error": self._error, **self._counts}

    def close(self, seconds: float) -> bool:
        if self._pid != os.getpid():
            return True
        deadline = time.monotonic() + seconds
        with self._lock:
            current, self._client, self._state = self._client, None, State.CLOSED
            clients = list(self._clients)
        if current is not None:
            current.retire()
        if not all(client.idle(deadline - time.monotonic()) for client in clients):
            return False
        if current is not None:
            current.done(deadline - time.monotonic())
        return True

    # ---- one call

    def _call(self, function: Callable[[Any], list[int]]) -> list[int]:
        """The codes that the library answers. Raises StoreDown if it cannot be asked."""
        self._check_process()
        with self._lock:
            client = self._client if self._state is State.OPEN else None
        if client is None:
            raise StoreDown(f"Mooncake at {self._config.master} is {self._state.value}, not open")
        try:
            with client.call() as raw:
                codes = function(raw)
        except RuntimeError as error:
            raise self._down(str(error)) from error
        if RPC_FAILED in codes:
            self._give_up(client)
        return codes

    def _exist(self, full: list[str]) -> list[int]:
        """1: there. Without a lease where the library can (0.3.14), since one keeps the object from being evicted for 10 s."""
        codes = self._call(lambda raw: getattr(raw, "batch_probe_key", raw.batch_is_exist)(full))
        self._raise_if_down("look-up", codes)
        return codes

    def _raise_if_down(self, what: str, codes: list[int]) -> None:
        if RPC_FAILED in codes:
            raise self._down(f"{what}: no connection to the master ({RPC_FAILED})")
        if RPC_TIMED_OUT in codes:
            raise self._down(f"{what}: no answer from the master in time ({RPC_TIMED_OUT})")
        if TRANSFER_FAILED in codes and all(code < 0 for code in codes):
            raise self._down(f"{what}: none of {len(codes)} objects could be transferred ({TRANSFER_FAILED})")

    def _give_up(self, client: Client) -> None:
        """The client stays: it finds a new master by itself."""
        with self._lock:
            if self._client is client and self._state is State.OPEN:
                self._state = State.BROKEN

    def _check(self, client: Client) -> None:
        """Raises StoreDown if it does not reach the master."""
        with client.call() as raw:
            (code,) = raw.batch_is_exist([self._prefix + "vcache1/"])
        if code < 0:
            raise StoreDown(f"no answer from the master ({code})")

    def _note_doubts(self, full: list[str], codes: list[int]) -> list[str]:
        """Which of those that are said to be stored may be none, because an earlier put of them was cut short."""
        now = time.monotonic()
        with self._lock:
            doubted = [name for name, code in zip(full, codes, strict=True) if code == 0 and self._doubts.get(name, 0.0) > now]
            for name, code in zip(full, codes, strict=True):
                if code < 0 and code != NO_ROOM:
                    self._doubts[name] = now + DOUBT_SECONDS
                    self._doubts.move_to_end(name)
            while self._doubts and (len(self._doubts) > MAX_DOUBTS or next(iter(self._doubts.values())) <= now):
                self._doubts.popitem(last=False)
        return doubted

    # ---- what is said to the library and to people

    def _settings(self) -> dict[str, str]:
        """For `setup`, which ignores what it does not know."""
        config = self._config
        hostname = config.hostname or _way_out(config.master)
        self._environment = mooncake_environment(msgspec.structs.replace(config, hostname=hostname))
        return {
            "local_hostname": hostname,
            "metadata_server": config.metadata,
            "global_segment_size": str(int(config.segment_bytes)),
            "local_buffer_size": str(int(config.local_buffer_bytes)),
            "protocol": config.protocol,
            "rdma_devices": config.devices,
            "master_server_addr": config.master,
            "tenant_id": config.tenant or "default",
        }

    def _full(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _register(self, memory: Span) -> None:
        if self._config.protocol == "rdma" and any(self._call(lambda raw: [raw.register_buffer(memory.address, memory.nbytes)])):
            raise self._down(f"{memory.nbytes} B of memory could not be registered")

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _down(self, why: str) -> StoreDown:
        with self._lock:
            self._error = why
            self._counts["down"] += 1
        return StoreDown(f"Mooncake at {self._config.master}: {why}")

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreDown("this process was forked from the one that uses Mooncake")


def _way_out(master: str) -> str:
    """The address of this host that packets to `master` leave from. Raises OSError."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
