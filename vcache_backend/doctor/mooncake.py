"""Whether the Mooncake store of the settings works: its library, its master, and a provider with room.

The library is only ever called in a child process with a deadline: it may hang for half a minute, or crash.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from vcache_backend.config import Config, dump
from vcache_backend.doctor import packages
from vcache_backend.doctor.finding import Finding
from vcache_backend.offload.store import Put

MASTER_SECONDS = 1.0
PROBE_SECONDS = 8.0
"""Import, connect, one small object: a fraction of a second where all is well."""
PROBE = "vcache_backend.doctor.mooncake_probe"
LIBRARY, MASTER, PROVIDER = "mooncake library", "mooncake master", "mooncake provider"
START = "examples/mooncake_tier.sh starts a master and a provider"


class _Outcome(msgspec.Struct, frozen=True):
    """What the child did. `step`: the last one it began; `error`: why it did not end well, empty if it did."""

    step: str
    error: str
    put_seconds: float = 0.0
    get_seconds: float = 0.0


def check(config: Config) -> Iterator[Finding]:
    """Ends within about `MASTER_SECONDS + PROBE_SECONDS`."""
    if packages.find(packages.MOONCAKE) is None:
        return  # check_packages says so
    trouble = _unreachable(config.offload.mooncake.master)
    outcome = _probe(config, reachable=trouble is None)
    if outcome.step in ("", "import") and outcome.error:
        yield Finding(LIBRARY, "fail", outcome.error, _library_advice(outcome.error))
        return
    yield Finding(LIBRARY, "ok", "loads")
    if trouble:
        yield trouble
        return
    yield from _judge(outcome, config)


def _unreachable(master: str) -> Finding | None:
    """What is wrong with the way to the master; None if somebody listens there."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), MASTER_SECONDS).close()
    except TimeoutError:
        return Finding(
            MASTER, "fail", f"{master} did not answer in {MASTER_SECONDS:g} s", "check offload.mooncake.master and the firewall"
        )
    except (OSError, OverflowError) as error:
        advice = f"start mooncake_master there, or set offload.mooncake.master; {START} on this machine"
        return Finding(MASTER, "fail", f"{master}: {error}", advice)
    return None


def _probe(config: Config, reachable: bool) -> _Outcome:
    """Run the child: the whole way, or no further than the library where the master is not `reachable`."""
    given = json.dumps({"config": dump(config), "reachable": reachable})
    command = [sys.executable, "-m", PROBE]
    try:
        child = subprocess.run(command, input=given, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
        return _read(out, f"did not end within {PROBE_SECONDS:g} s")
    said = child.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    return _read(child.stdout, f"ended with status {child.returncode}: {said[0]}")


def _read(out: str, ended: str) -> _Outcome:
    step = ""
    for line in out.splitlines():
        word, *rest = line.split("\t")
        if word == "error":
            return _Outcome(step, "\t".join(rest))
        if word == "done":
            return _Outcome(step, "", *map(float, rest))
        step = word
    return _Outcome(step, ended)


def _library_advice(error: str) -> str:
    if "libibverbs" in error:
        return "apt-get install libibverbs1"
    if "libmlx5" in error:
        return "apt-get install ibverbs-providers"
    if "libcuda" in error:
        return "this build needs CUDA; without a GPU: pip install mooncake-transfer-engine-non-cuda"
    return "pip install 'vcache-backend[mooncake]'; without CUDA: mooncake-transfer-engine-non-cuda"


def _judge(outcome: _Outcome, config: Config) -> Iterator[Finding]:
    """Somebody listens at the master's address: is it a master, and does an object come back?"""
    master = config.offload.mooncake.master
    if outcome.step == "open" and outcome.error:
        advice = "see whether that is the rpc_port of a mooncake_master, and not its metrics_port, and whether it hangs"
        yield Finding(MASTER, "fail", f"{master} listens, but connecting to it failed: {outcome.error}", advice)
        return
    yield Finding(MASTER, "ok", f"{master} answers")
    if not outcome.error:
        detail = f"1 MiB put in {1e3 * outcome.put_seconds:.3g} ms, read in {1e3 * outcome.get_seconds:.3g} ms"
        yield Finding(PROVIDER, "ok", detail)
    elif outcome.error == Put.FULL.value and config.offload.mooncake.segment_bytes:
        detail = "no provider has room for 1 MiB; workers lend offload.mooncake.segment_bytes each while they run"
        yield Finding(PROVIDER, "warn", detail, f"with a provider objects outlive the workers: {START}")
    elif outcome.error == Put.FULL.value:
        advice = f"start a provider ({START}), or a larger one; what was read in the last seconds is not evicted"
        yield Finding(PROVIDER, "fail", "no room for 1 MiB: no provider lends memory, or all of it is in use", advice)
    else:
        advice = (
            "see whether every provider lives and is reached from here; the master forgets a dead one after its client_ttl, 10 s"
        )
        yield Finding(PROVIDER, "fail", f"{outcome.step} of 1 MiB: {outcome.error}", advice)
