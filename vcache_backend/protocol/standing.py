"""Facts that the server must know of a client for the whole connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.channel import Channel

log = logging.getLogger(__name__)


class Standing:
    """Tells the server a fact until `close`: at once, in the caller's thread; after every
    reconnection, and with every heartbeat while the server refuses it, in the client's thread.

    trouble: why the server does not know the fact now, or empty. Each new refusal is logged."""

    def __init__(self, client: Channel, tell: Callable[[], object], refused: str) -> None:
        """tell: sends one or several requests. refused: the meaning of a refusal, for the log."""
        self._client, self._tell, self._refused = client, tell, refused
        self._lock = threading.Lock()
        self._closed = False
        self.trouble = ""
        client.on_return.append(self._now)
        client.on_beat.append(self._mend)
        self._now()

    def close(self) -> None:
        """Stop telling. The server forgets the fact when the connection closes. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._client.on_return.remove(self._now)
                self._client.on_beat.remove(self._mend)

    def _mend(self) -> None:
        if self.trouble:
            self._now()

    def _now(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._tell()
                self.trouble = ""
            except VCacheError as error:
                if str(error) != self.trouble and not isinstance(error, ServerUnavailable):
                    log.warning("%s: %s", self._refused, error)
                self.trouble = str(error)
