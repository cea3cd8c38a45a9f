"""Checks the offload tier: the Mooncake store's library, master and providers.

Asks the store through an offload process, as workers do, since the library may hang or crash."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack

from vcache_backend.config import Config
from vcache_backend.doctor.finding import Finding, fail, ok
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

NBYTES = 1 << 20
SECONDS = 8.0
"""The deadline of each call, which usually takes a fraction of a second."""
LIBRARY, MASTER, PROVIDER = "mooncake library", "mooncake master", "mooncake provider"
START = "`vcache mooncake` starts a master and a provider"


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
    with ExitStack() as undo:
        fd = os.memfd_create("vcache-doctor", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        os.ftruncate(fd, 2 * NBYTES)
        try:
            process = OffloadProcess(config.offload.mooncake, fd)
        except ConfigError as error:
            detail, _, advice = str(error).rpartition("; ")
            yield fail(LIBRARY, detail, advice)
            return
        except StoreDown as error:
            yield fail(LIBRARY, str(error), f"install it anew: {INSTALL}")
            return
        undo.callback(process.kill)
        yield ok(LIBRARY, "loads")
        yield from _master(process, config.offload.mooncake.master, fd)


def _master(process: OffloadProcess, master: str, fd: int) -> Iterator[Finding]:
    try:
        process.call("open", seconds=SECONDS)
    except StoreDown as error:
        advice = f"start mooncake_master there, or set offload.mooncake.master; {START} here"
        if isinstance(error, StoreLost) or not process.alive or "timed out" in str(error):
            advice = "check that this is its rpc_port, that it does not hang, and your firewalls"
        yield fail(MASTER, f"{master}: {error}", advice)
        return
    yield ok(MASTER, f"{master} answers")
    try:
        yield _provider(process, fd)
    except StoreDown as error:
        advice = "check that all providers run; dead ones are forgotten after client_ttl, 10 s"
        yield fail(PROVIDER, f"1 MiB: {error}", advice)


def _provider(process: OffloadProcess, fd: int) -> Finding:
    """Check that an object comes back unchanged. StoreDown. fd: memory of 2 * `NBYTES` bytes."""
    names = [f"vcache1/doctor-{secrets.token_hex(8)}"]
    content = secrets.token_bytes(NBYTES)
    with mmap.mmap(fd, 2 * NBYTES) as memory:
        memory[:NBYTES] = content
        started = time.monotonic()
        (outcome,) = process.call("put", names, [(0, NBYTES)], seconds=SECONDS)
        written = time.monotonic()
        if outcome == FULL:
            advice = f"start a provider ({START}), or a larger one"
            lacks = "no room for 1 MiB: no provider lends memory, or all of it is in use"
            return fail(PROVIDER, lacks, advice)
        if outcome != STORED:
            raise StoreDown(f"put: {outcome}")
        (nbytes,) = process.call("get", names, [(NBYTES, NBYTES)], seconds=SECONDS)
        read = time.monotonic()
        process.call("remove", names, seconds=SECONDS)
        if memory[NBYTES:] != content:
            raise StoreDown(f"get: {nbytes:,} bytes came back, and other ones than were put")
    put_ms, get_ms = 1e3 * (written - started), 1e3 * (read - written)
    return ok(PROVIDER, f"1 MiB put in {put_ms:.3g} ms, read in {get_ms:.3g} ms")
