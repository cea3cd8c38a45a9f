"""The errors that vcache raises.

A call of the engine or of an integration counts and logs an error, and answers with a miss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MAX_SHOWN_CHARS = 64
"""The most characters shown of a name or value."""
MAX_LINE_CHARS = 1200
"""The most characters of a line that may contain foreign text."""


class VCacheError(Exception):
    """Base of every error of this package.

    cause: how look-ups and loads that fail by it are counted."""

    cause = "server"


class ConfigError(VCacheError):
    """A configuration or an option cannot be read, is unknown, or has an impossible value."""


class LayoutError(VCacheError):
    """KV tensors or a copy do not fit the layout: axes, device, or missing blocks."""


class SegmentError(VCacheError):
    """A segment could not be created, mapped, exported or registered."""


class ProtocolError(VCacheError):
    """The peer sent a message against the protocol, or speaks another version."""


class Refused(VCacheError):
    """The metadata server cannot grant a request. Raised by the server, and by the client with the
    server's text. The connection stays."""


class ServerUnavailable(VCacheError):
    """There is no connection to the metadata server."""


class ServerTimeout(ServerUnavailable):
    """The metadata server did not answer within the deadline of the call."""

    cause = "late"


def printable(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Cut `text` to `most` characters, and escape every character that a terminal would act on."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in short
    )


@contextmanager
def raising_as(target: type[VCacheError], what: str, *sources: type[Exception]) -> Iterator[None]:
    """Turn these exceptions of the block into a `target` with the message `what: cause`."""
    try:
        yield
    except sources as cause:
        raise target(f"{what}: {str(cause) or type(cause).__name__}") from cause
