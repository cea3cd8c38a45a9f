"""Sends messages that nobody waits for: ended leases, returned reservations, touched chunks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, InstanceId

log = logging.getLogger(__name__)

MOST_MESSAGES = 4096
"""How many messages to keep until the server is back. Leases and reservations of dropped messages
expire by themselves."""
MANY_MESSAGES = 32
"""With so many messages the thread starts at once."""
RETRY_SECONDS = 1.0
LATER_SECONDS = 0.02
"""How long messages that are not urgent wait."""


class _Message(NamedTuple):
    """A call of the client: `call(about)`. again: repeat it until the server has answered."""

    call: Callable[[Any], object]
    about: Any
    again: bool = False


class Outbox:
    """A thread that sends messages to the server while a connection exists. All methods may be
    called from any thread; only `flush` and `close` wait."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._messages: deque[_Message] = deque(maxlen=MOST_MESSAGES)
        self._changed = threading.Condition()
        self._busy = self._stopping = self._urgent = False
        self._thread = threading.Thread(target=self._run, name="vcache-outbox", daemon=True)
        self._thread.start()

    def release(self, lease: int) -> None:
        """End a lease that no copy uses any more, after `LATER_SECONDS`.

        The thread starts late because it would take the interpreter from the caller, who is about
        to produce a token."""
        self._post(_Message(self._client.release, lease, again=True), urgent=False)

    def give_back(self, reservation: int) -> None:
        """Abort a reservation. No copy may be writing into its slots."""
        self._post(_Message(self._client.abort, reservation, again=True))

    def touch(self, keys: list[ChunkKey]) -> None:
        self._post(_Message(self._client.touch, keys))

    def retract(self, instance: InstanceId, sequence: int) -> None:
        """Withdraw all publications of `instance` with a lower sequence number."""
        self._post(
            _Message(lambda before: self._client.retract(instance, before), sequence, again=True)
        )

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
        self.flush(timeout)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)

    # ---- inside

    def _post(self, message: _Message, urgent: bool = True) -> None:
        with self._changed:
            self._messages.append(message)
            self._urgent |= urgent
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._has_work(), RETRY_SECONDS)
                self._changed.wait_for(lambda: self._stopping or self._hurries(), LATER_SECONDS)
                if self._stopping:
                    return
                self._busy, self._urgent = self._has_work(), False
            try:
                self._work()
            except Exception:  # the thread's last line of defence
                log.exception("the server could not be told something")

    def _has_work(self) -> bool:
        return bool(self._messages) and self._client.connected

    def _hurries(self) -> bool:
        """Whether some of the work is urgent. The caller holds the lock."""
        return self._urgent or len(self._messages) >= MANY_MESSAGES

    def _work(self) -> None:
        """Send the messages queued so far. Later ones wait: more important work may be due."""
        for _ in range(len(self._messages)):
            if self._stopping or not self._client.connected:
                return
            message = self._messages.popleft()
            try:
                message.call(message.about)
            except VCacheError as error:
                log.debug("%s: %s", message.call.__name__, error)
                if message.again and isinstance(error, ServerUnavailable):
                    self._messages.appendleft(message)
                    return
