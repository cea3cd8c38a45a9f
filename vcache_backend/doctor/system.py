"""Checks Linux, and the versions of installed packages."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator

from vcache_backend.config import Config
from vcache_backend.doctor import gpus
from vcache_backend.doctor.finding import Finding, fail, ok, warn
from vcache_backend.supported import PACKAGES, numbers


def check_kernel(config: Config) -> Iterator[Finding]:
    """Check Linux's version, memfd_create for segments, and pidfd_open to notice dead clients."""
    release = platform.release()
    if sys.platform != "linux" or numbers(release) < (5, 4):
        yield fail("kernel", f"{platform.system()} {release}", "vcache needs Linux 5.4 or later")
        return
    calls: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("vcache-doctor", os.MFD_CLOEXEC),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    }
    missing = []
    for name, attempt in calls.items():
        try:
            os.close(attempt())
        except (OSError, AttributeError) as error:
            missing.append(f"{name} ({error})")
    if missing:
        advice = "let the container's seccomp profile allow these calls (Docker 20.10 and later do)"
        yield fail("kernel", f"Linux {release} without {', '.join(missing)}", advice)
    else:
        yield ok("kernel", f"Linux {release}, memfd and pidfd work")


def check_packages(config: Config) -> Iterator[Finding]:
    """Compare installed versions, read from metadata without an import, with supported ones."""
    here = {
        "engine": True,
        "gpu": gpus.has_nvidia(),
        "tier": config.offload.policy != "off",
        "optional": False,
    }
    for package in PACKAGES:
        name, version = package.installed()
        advice = f"pip install '{name}{package.wanted}'"
        if not version and package.role == "engine":
            without = "the server does without it; what moves KV needs the extra `engine`"
            yield ok(name, f"not installed: {without}")
        elif not version and not here[package.role]:
            yield ok(name, "not installed (optional)")
        elif not version:
            other = f"; without CUDA: {package.builds[0]}" if package.builds else ""
            lacks = "not installed, and needed with this machine and configuration"
            yield fail(name, lacks, advice + other)
        elif package.supports(version):
            yield ok(package.name, version if name == package.name else f"{version} ({name})")
        else:
            detail = f"{version} is not one of the supported versions, {package.wanted}"
            yield (fail if here[package.role] else warn)(package.name, detail, advice)
