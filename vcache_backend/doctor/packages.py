"""Which packages are installed, and whether their versions are ones that work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import Literal

import msgspec

from vcache_backend.config import Config
from vcache_backend.doctor import gpus
from vcache_backend.doctor.finding import Finding

Version = tuple[int, ...]


def numbers(text: str) -> Version:
    """The leading numbers: (2, 13, 0) of "2.13.0+cpu", (6, 18, 44) of "6.18.44-generic"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


class _Package(msgspec.Struct, frozen=True):
    """A distribution and the versions of it that work: at least `low`, below `high`. `role`: who needs it. `builds`: other
    distributions with the same modules."""

    name: str
    low: Version
    high: Version
    role: Literal["required", "gpu", "optional"]
    builds: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        return f">={'.'.join(map(str, self.low))},<{'.'.join(map(str, self.high))}"


MOONCAKE = _Package(
    "mooncake-transfer-engine",
    (0, 3, 9),
    (1,),
    "optional",
    ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
)
XXHASH = _Package("xxhash", (3, 5), (5,), "optional")
PACKAGES = (
    _Package("msgspec", (0, 19), (1,), "required"),
    _Package("PyYAML", (6,), (7,), "required"),
    _Package("torch", (2, 11), (3,), "required"),
    _Package("triton", (3, 6), (4,), "required"),
    _Package("cuda-bindings", (13,), (14,), "gpu"),
    _Package("lmcache", (0, 5, 3), (0, 6), "optional"),
    _Package("vllm", (0, 26), (0, 34), "optional"),
    MOONCAKE,
    XXHASH,
)


def check_packages(config: Config) -> Iterator[Finding]:
    """Versions as installed for this interpreter, read from their metadata and not imported."""
    for package in PACKAGES:
        found = find(package)
        if found is None:
            yield _missing(package, needed=package in needed_by_the_tier(config))
            continue
        name, version = found
        if package.low <= numbers(version) < package.high:
            yield Finding(package.name, "ok", version if name == package.name else f"{version} ({name})")
        else:
            status: Literal["warn", "fail"] = "warn" if package.role == "optional" else "fail"
            advice = f"pip install '{name}{package.wanted}'"
            yield Finding(package.name, status, f"{version} is not one of the supported versions, {package.wanted}", advice)


def find(package: _Package) -> tuple[str, str] | None:
    """(distribution, version) of what is installed; the first of its builds."""
    for name in (package.name, *package.builds):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def needed_by_the_tier(config: Config) -> tuple[_Package, ...]:
    """What the offload tier cannot do without, as it is set."""
    if config.offload.policy == "off":
        return ()
    return MOONCAKE, XXHASH


def _missing(package: _Package, needed: bool) -> Finding:
    install = f"pip install '{package.name}{package.wanted}'"
    if needed:
        also = f"; without CUDA: {package.builds[0]}" if package.builds else ""
        return Finding(package.name, "fail", "not installed, and offload.policy is not off", f"{install}{also}")
    if package.role == "required":
        return Finding(package.name, "fail", "not installed", install)
    if package.role == "gpu" and gpus.has_nvidia():
        return Finding(package.name, "fail", "not installed, and this machine has an NVIDIA GPU", install)
    return Finding(package.name, "ok", "not installed (only needed where it is used)")


def installed(name: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False
