"""`vcache doctor`: finds the faults of this machine for vcache, and says what to do about each.

For a moment, the doctor makes a CUDA context on each GPU, and puts a small object into the offload
tier. Imports neither torch nor LMCache nor vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from vcache_backend.config import Config
from vcache_backend.doctor.machine import (
    Finding,
    check_gpus,
    check_kernel,
    check_packages,
    check_server,
    fail,
)
from vcache_backend.doctor.model import check_model
from vcache_backend.doctor.offload import check_offload


def diagnose(config: Config, model: str = "") -> list[Finding]:
    """All findings, or only findings about `model`. Never raises. Takes seconds; with `model` some
    20 s, and up to a minute if an offload tier hangs."""
    checks: dict[str, Callable[[Config], Iterator[Finding]]] = {
        "kernel": check_kernel,
        "packages": check_packages,
        "gpus": check_gpus,
        "server": check_server,
        "offload": check_offload,
    }
    found = list[Finding]()
    for name, check in ({"model": partial(check_model, model)} if model else checks).items():
        try:
            found += check(config)
        except Exception as error:  # noqa: BLE001 - the outermost loop: the other checks go on
            said = f"the check itself failed: {error!r}"
            found.append(fail(name, said, "report this as a bug of vcache"))
    return found
