"""The offload process, `python -m vcache_backend.offload.process FD PARENT MEMORY SETTINGS`, the
only process that loads Mooncake, and `OffloadProcess`, with which its parent starts it, sends it
calls with a deadline, and kills it if it hangs.

Mooncake's library holds the GIL while it connects (4.4 s without a master, measured), may take half
a minute for one call, and crashes if used before its set-up or after its end, but not in the
process that computes tokens. Each of the parent's threads has a connection, and the process a
thread for each, so look-ups do not wait for transfers. A message is MessagePack in a frame of
multiprocessing's: `[verb, arguments]` from the parent, `[error, answer]` back. Calls read and write
the parent's memory. The process ends with its parent.

The library's return codes:
- -900, the master did not answer: StoreLost, since each further call would take 4 s to fail.
- -901, the master was late: StoreDown.
- -800, a transfer failed, as after a provider's death, which the master notices 10 s later: the
  object counts as absent; StoreDown if no object of the batch could be read.
- -200, no room: FULL, also for an object larger than Mooncake's largest segment.
- Other negative codes: the object is absent, or was not stored."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig, mooncake_environment, split_address
from vcache_backend.errors import ConfigError, VCacheError

log = logging.getLogger(__name__)

OPEN_SECONDS = 15.0
"""The deadline of loading the library and opening the store (4.6 s at most, without a master)."""
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


ERRORS: dict[str, type[VCacheError]] = {"ConfigError": ConfigError, "StoreLost": StoreLost}
"""Errors after which the process is of no more use. All others are a StoreDown in the parent."""


# ---- in the parent


class OffloadProcess:
    """An offload process. Any thread of the parent; each has a connection of its own.

    A call that takes too long kills the process. So once a call has returned or raised, nothing
    writes into the call's memory."""

    def __init__(self, config: MooncakeConfig, memory: int = -1) -> None:
        """Start the process, which loads the library. memory: a memfd with all buffers that calls
        name. ConfigError if the library does not load, StoreDown."""
        self._control, theirs = socket.socketpair()
        with theirs:
            settings = msgspec.json.encode(config).decode()
            command = [sys.executable, "-P", "-m", "vcache_backend.offload.process"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(memory), settings],
                pass_fds=[theirs.fileno(), *([memory] if memory >= 0 else [])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        self._here, self._leaving = threading.local(), False
        self._last_words: deque[str] = deque(maxlen=5)
        self._logger = threading.Thread(target=self._log, daemon=True)
        self._logger.start()
        try:
            self.call("load", seconds=OPEN_SECONDS)
        except VCacheError:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return not self._leaving and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, verb: str, *arguments: Any, seconds: float, kill: bool = True) -> Any:
        """Make a call, and return its answer. Raises StoreDown; kill: after `seconds` the process
        is killed, and all its calls fail."""
        try:
            connection = self._connection()
            connection.send_bytes(msgspec.msgpack.encode([verb, arguments]))
            if not connection.poll(seconds):
                late = f"no answer in {seconds:g} s"
                if kill:
                    self.kill()
                    late = f"{verb}: {late}; the offload process was killed"
                raise StoreDown(late)
            error, answer = msgspec.msgpack.decode(connection.recv_bytes())
        except (OSError, EOFError, msgspec.DecodeError):
            # Half a message may be sent.
            raise StoreDown(self.end()) from None
        self._here.connection = connection
        if error is None:
            return answer
        if error[0] in ERRORS:
            self.kill()
        raise ERRORS.get(error[0], StoreDown)(error[1])

    def kill(self) -> None:
        """Kill the process and wait for its end. Running calls fail. Idempotent."""
        self._leaving = True
        self._process.kill()
        self._process.wait()
        self._control.close()

    def end(self) -> str:
        """Kill the process, and say how it ended. Logs an end that nobody wanted."""
        wanted = self._leaving
        self.kill()
        # No longer: a child of the process may keep the output open.
        self._logger.join(1.0)
        said = " | ".join(self._last_words) or "it said nothing"
        last = f"the offload process ended ({self._process.returncode}): {said}"
        if not wanted:
            log.warning("%s; it is started again", last)
        return last

    def _connection(self) -> Connection:
        """This thread's connection, or a new one: a thread keeps its connection only if no answer
        is to come. OSError if the process has ended."""
        if (kept := self._here.__dict__.pop("connection", None)) is not None:
            return kept  # type: ignore[no-any-return]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # It reads at once. One that leaves a call unread for 50 ms is killed; so is one that
            # stops in the middle of an answer.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            return Connection(ours.detach())

    def _log(self) -> None:
        """Log the library's output, for debugging. A thread."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last_words.append(line.rstrip())
                log.debug("the offload process: %s", line.rstrip())


def remove_under(config: MooncakeConfig, start: str) -> int:
    """Remove all objects whose names begin with `start`. Returns how many. VCacheError."""
    process = OffloadProcess(config)
    try:
        process.call("open", seconds=OPEN_SECONDS)
        return int(process.call("remove_under", start, seconds=OPEN_SECONDS))
    finally:
        process.kill()


# ---- in the offload process


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
        self._base = 0
        self._raw: Any = None
        self._is_open = False

    def load(self) -> None:
        """Load the library, before `open`. ConfigError says what to install."""
        mooncake_environment(self._config)
        try:
            from mooncake import store
        except ImportError as error:
            needed = (advice for library, advice in NEEDED.items() if library in str(error))
            advice = next(needed, INSTALL)
            raise ConfigError(f"Mooncake's client does not load: {error}; {advice}") from error
        self._library = store

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
        """The addresses of places in this process. Maps the memory once it has a size."""
        with self._lock:
            size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
            if self._memory is None and size:
                # Populate all pages before a transfer.
                memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                self._memory = memory
                rdma = self._config.protocol == "rdma"
                if rdma and self._raw.register_buffer(self._base, size):
                    raise StoreLost(f"{size:,} B of memory could not be registered")
        return [self._base + start for start, _ in places]


def _checked(what: str, codes: list[int]) -> list[int]:
    if RPC_FAILED in codes:
        raise StoreLost(f"{what}: no connection to the master ({RPC_FAILED})")
    if RPC_TIMED_OUT in codes:
        raise StoreDown(f"{what}: no answer from the master in time ({RPC_TIMED_OUT})")
    if TRANSFER_FAILED in codes and all(code < 0 for code in codes):
        none = f"none of {len(codes)} objects could be transferred ({TRANSFER_FAILED})"
        raise StoreDown(f"{what}: {none}")
    return codes


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


def serve(connection: Connection, store: Mooncake) -> None:
    """Make the calls of one of the parent's threads."""
    with connection, suppress(OSError, EOFError):
        while True:
            verb, arguments = msgspec.msgpack.decode(connection.recv_bytes())
            if verb in ("get", "put"):
                # The library moves bytes in its own threads, and the calling thread spins meanwhile
                # (0.3.13): with few cores it would take their time. On two cores 512 MiB came 15 %
                # faster. With niceness 19, a load waited 0.3 s beside computing threads. Linux
                # changes the niceness of a thread only.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            error, answer = None, None
            try:
                answer = getattr(store, verb)(*arguments)
            except Exception as raised:  # noqa: BLE001
                # The parent must not wait for an answer that never comes. The error may contain a
                # file name that is not text.
                kind, ours = type(raised).__name__, isinstance(raised, VCacheError)
                said = f"{raised}" if ours else f"{verb}: {kind}: {raised}"
                error = kind, said.encode(errors="replace").decode()
            connection.send_bytes(msgspec.msgpack.encode([error, answer]))


def _end_with(parent: int) -> None:
    """End this process once the parent has ended: a process that the parent forked may keep the
    socket open. A thread."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    # Ctrl-C is for the parent, and this process ends after the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd, parent, memory = (int(argument) for argument in sys.argv[1:4])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = msgspec.json.decode(sys.argv[4], type=MooncakeConfig)
    store = Mooncake(settings, memory)
    with socket.socket(fileno=fd) as control, suppress(OSError):
        while fds := socket.recv_fds(control, 1, 1)[1]:
            given = Connection(fds[0]), store
            threading.Thread(target=serve, args=given, daemon=True).start()
    # Skip the library's own clean-up: calls may be running.
    os._exit(0)


if __name__ == "__main__":
    main()
