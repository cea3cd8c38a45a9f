"""Sends messages without waiting: ended leases, returned reservations, touched chunks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from vcache_backend import threads
from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey, InstanceId

log = logging.getLogger(__name__)

MAX_MESSAGES = 4096
"""How many messages to keep until the server is back. Leases and reservations of dropped messages
expire by themselves."""
MANY_MESSAGES = 32
"""With this many messages the thread starts at once."""
RETRY_SECONDS = 1.0
LATER_SECONDS = 0.02
"""How long the thread delays work that is not urgent."""
LOOK_SECONDS = 0.2
"""How often the thread looks for messages by itself."""


class Outbox:
    """A thread that sends messages to the server while a connection exists. All methods may be
    called from any thread; only `flush` and `close` wait."""

    def __init__(self, client: Client, failed: threads.Count | None = None) -> None:
        """failed: counts an exception of the thread, see `threads.survives`."""
        self._client = client
        self._messages: deque[tuple[Callable[[], object], bool]] = deque(maxlen=MAX_MESSAGES)
        """Calls of the client, and whether to repeat each until the server has answered."""
        self._changed = threading.Condition()
        self._busy = self._stopping = self._urgent = False
        self._thread = threads.start(self._turn, "vcache-outbox", failed)

    def release(self, lease: int) -> None:
        """End a lease that no copy uses any more, within some `LOOK_SECONDS`.

        The thread finds the message by itself: waking it would cost the caller some 50 us just
        before a token."""
        self._post(partial(self._client.release, lease), urgent=False)

    def give_back(self, reservation: int) -> None:
        """Abort a reservation. No copy may be writing into its slots."""
        self._post(partial(self._client.abort, reservation))

    def touch(self, keys: list[ChunkKey]) -> None:
        self._post(partial(self._client.touch, keys), again=False)

    def retract(self, instance: InstanceId, sequence: int) -> None:
        """Withdraw all publications of `instance` with a lower sequence number."""
        self._post(partial(self._client.retract, instance, sequence))

    def flush(self, timeout: float) -> bool:
        """Wait until all work is done or given up; False after `timeout` seconds. Messages that
        wait for a connection do not count."""
        with self._changed:
            if self._stopping:
                return not self._has_work()
            self._urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._has_work() or self._busy), timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Send the queued messages, for at most `timeout` seconds, and end the thread after its
        current call. Idempotent."""
        try:
            self.flush(timeout)
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join(timeout)

    # ---- inside

    def _post(self, call: Callable[[], object], urgent: bool = True, again: bool = True) -> None:
        with self._changed:
            self._messages.append((call, again))
            self._urgent |= urgent
            if urgent or len(self._messages) >= MANY_MESSAGES:
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Wait for work, and do it. Returns whether to end. Whatever raises is off its queue."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping or self._has_work(), LOOK_SECONDS)
            self._changed.wait_for(lambda: self._stopping or self._hurries(), LATER_SECONDS)
            if self._stopping:
                return True
            self._busy = self._has_work()
            self._urgent = False
        self._work()
        return False

    def _has_work(self) -> bool:
        return bool(self._messages) and self._client.connected

    def _hurries(self) -> bool:
        """Whether any work is urgent. The caller holds the lock."""
        return self._urgent or len(self._messages) >= MANY_MESSAGES

    def _work(self) -> None:
        """Send the messages queued so far. Later messages wait: more important work may be due."""
        for _ in range(len(self._messages)):
            if self._stopping or not self._client.connected:
                return
            call, repeats = self._messages.popleft()
            try:
                call()
            except VCacheError as error:
                log.debug("the server was not told something: %s", error)
                if repeats and isinstance(error, ServerUnavailable):
                    self._messages.appendleft((call, repeats))
                    return
