"""One object into a Mooncake store and out again, in a process of its own: the library may hang, or crash. See mooncake.py.

Reads one JSON object: the whole `config`, and whether the master is `reachable`; if not, it only loads the library. Writes a line when a
step begins, and `error`, a tab and the reason when one fails; the last line is `done`, and the seconds of put and get.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import sys
import time
from collections.abc import Callable

import msgspec

from vcache_backend.config import ByteSize, from_dict
from vcache_backend.errors import VCacheError
from vcache_backend.offload.mooncake import MooncakeStore
from vcache_backend.offload.store import Put, Span

NBYTES = 1 << 20


class _FailedError(Exception):
    """A step failed; the text says how."""


Say = Callable[[str], None]


def main() -> None:
    # What the library prints must not come between our lines.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: str) -> None:
        lines.write(" ".join(line.split("\n")) + "\n")

    given = json.loads(sys.stdin.read())
    try:
        say("import")
        # It must not lend memory itself: the object would always find room there.
        settings = msgspec.structs.replace(from_dict(given["config"]).offload.mooncake, segment_bytes=ByteSize(0))
        store = MooncakeStore(settings)
        put, get = _round_trip(store, say) if given["reachable"] else (0.0, 0.0)
        say(f"done\t{put:.6f}\t{get:.6f}")
    except (VCacheError, _FailedError) as error:
        say(f"error\t{error}")
    # The library takes a second or more to close, and nothing of it is left when the process is gone.
    os._exit(0)


def _round_trip(store: MooncakeStore, say: Say) -> tuple[float, float]:
    """Seconds of a put and of a get. Leaves nothing behind, but what a failed remove leaves to eviction."""
    content = secrets.token_bytes(NBYTES)
    source, target = ctypes.create_string_buffer(content, NBYTES), ctypes.create_string_buffer(NBYTES)
    spans = [Span(ctypes.addressof(memory), NBYTES) for memory in (source, target)]
    names = [f"vcache1/doctor-{secrets.token_hex(8)}"]
    for span in spans:
        store.register(span)
    say("open")
    store.open()
    say("put")
    start = time.monotonic()
    (put,) = store.put(names, spans[:1])
    written = time.monotonic()
    if put is not Put.STORED:
        raise _FailedError(put.value)
    say("get")
    (nbytes,) = store.get_into(names, spans[1:])
    read = time.monotonic()
    if nbytes != NBYTES or target.raw != content:
        raise _FailedError(f"{nbytes} of {NBYTES} bytes came back" if nbytes != NBYTES else "other bytes came back")
    say("remove")
    store.remove(names)
    return written - start, read - written


if __name__ == "__main__":
    main()
