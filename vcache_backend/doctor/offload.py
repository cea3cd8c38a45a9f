"""Checks the offload tier: the Mooncake store's library, master and providers.

Asks the store through an offload process, as workers do, since the library may hang or crash."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from vcache_backend.config import Config
from vcache_backend.doctor.machine import Finding, fail, ok
from vcache_backend.errors import ConfigError
from vcache_backend.offload.process import (
    FULL,
    INSTALL,
    STORED,
    OffloadProcess,
    StoreDown,
    StoreLost,
)
from vcache_backend.supported import MOONCAKE

LIBRARY, MASTER, PROVIDER = "mooncake library", "mooncake master", "mooncake provider"
_START = "`vcache mooncake` starts a master and a provider"


def check_offload(config: Config) -> Iterator[Finding]:
    """Check the store; one finding if the tier is off."""
    tier = config.offload
    if tier.policy == "off":
        yield ok("offload", "off: what leaves the pool is computed again (offload.policy)")
        return
    where = f"Mooncake at {tier.mooncake.master}, {tier.mooncake.protocol}"
    yield ok("offload", f"{tier.policy} to {where}")
    if MOONCAKE.installed()[1]:  # else check_packages says so
        yield from check_store(config)


def check_store(config: Config) -> Iterator[Finding]:
    """Put a small object into the store, read it and remove it."""
    mooncake, check = config.offload.mooncake, LIBRARY
    with ExitStack() as undo:
        fd = os.memfd_create("vcache-doctor", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        os.ftruncate(fd, 2 << 20)
        try:
            process = OffloadProcess(mooncake, fd)
            undo.callback(process.kill)
            yield ok(LIBRARY, "loads")
            # A call usually takes a fraction of a second.
            call, check = partial(process.call, seconds=8.0), MASTER
            call("open")
            yield ok(MASTER, f"{mooncake.master} answers")
            check = PROVIDER
            yield _provider(call, fd)
        except ConfigError as error:
            detail, _, advice = str(error).rpartition("; ")
            yield fail(check, detail, advice)
        except StoreDown as error:
            yield _down(check, mooncake.master, error)


def _down(check: str, master: str, error: StoreDown) -> Finding:
    if check == LIBRARY:
        return fail(check, str(error), f"install it anew: {INSTALL}")
    if check == PROVIDER:
        advice = "check that all providers run; dead ones are forgotten after client_ttl, 10 s"
        return fail(check, f"1 MiB: {error}", advice)
    advice = f"start mooncake_master there, or set offload.mooncake.master; {_START} here"
    if isinstance(error, StoreLost) or re.search("timed out|was killed", str(error)):
        advice = "check that this is its rpc_port, that it does not hang, and your firewalls"
    return fail(check, f"{master}: {error}", advice)


def _provider(call: partial[Any], fd: int) -> Finding:
    """Check that an object comes back unchanged. StoreDown. fd: memory of 2 MiB."""
    names, content = [f"vcache1/doctor-{secrets.token_hex(8)}"], secrets.token_bytes(1 << 20)
    with mmap.mmap(fd, 2 << 20) as memory:
        memory[: 1 << 20] = content
        started = time.monotonic()
        (outcome,) = call("put", names, [(0, 1 << 20)])
        written = time.monotonic()
        if outcome == FULL:
            lacks = "no room for 1 MiB: no provider lends memory, or all of it is in use"
            return fail(PROVIDER, lacks, f"start a provider ({_START}), or a larger one")
        if outcome != STORED:
            raise StoreDown(f"put: {outcome}")
        (nbytes,) = call("get", names, [(1 << 20, 1 << 20)])
        read = time.monotonic()
        call("remove", names)
        if memory[1 << 20 :] != content:
            raise StoreDown(f"get: {nbytes:,} bytes came back, and other ones than were put")
    put_ms, get_ms = 1e3 * (written - started), 1e3 * (read - written)
    return ok(PROVIDER, f"1 MiB put in {put_ms:.3g} ms, read in {get_ms:.3g} ms")
