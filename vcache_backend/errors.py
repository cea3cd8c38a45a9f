"""Everything vcache raises, in one tree.

Inside the package these are raised; in the engine and the integrations they are counted, logged once and turned into a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class VCacheError(Exception):
    """Base of every error of this package."""


class ConfigError(VCacheError):
    """A configuration value is unknown, of the wrong type or impossible; the message holds its path."""


class LayoutError(VCacheError):
    """KV tensors whose arrangement is unknown, ambiguous or not what the namespace says."""


class SegmentError(VCacheError):
    """A segment could not be created, mapped, exported or registered."""


class ProtocolError(VCacheError):
    """The peer sent what the protocol does not allow, or speaks another version of it."""


class Refused(VCacheError):
    """The metadata server understood the request and said no; the message is the server's."""


class ServerUnavailable(VCacheError):
    """No connection to the metadata server: absent, gone, or the breaker is open."""


class ServerTimeout(ServerUnavailable):
    """The metadata server did not answer within the deadline of the call."""


class ChecksumError(VCacheError):
    """Chunks whose bytes changed after their commit. Counted, logged and on their way out of the pool already."""


@contextmanager
def raising_as(mapping: Mapping[type[BaseException], type[VCacheError]], what: str) -> Iterator[None]:
    """Re-raise the first matching exception as ours, as `what: cause`, with the cause chained.

    >>> with raising_as({TimeoutError: ServerTimeout, OSError: ServerUnavailable}, "hello to /run/vcache.sock"):
    ...     raise ConnectionRefusedError("refused")
    Traceback (most recent call last):
    vcache_backend.errors.ServerUnavailable: hello to /run/vcache.sock: refused
    """
    try:
        yield
    except tuple(mapping) as cause:
        for source, target in mapping.items():
            if isinstance(cause, source):
                raise target(f"{what}: {str(cause) or type(cause).__name__}") from cause
        raise
