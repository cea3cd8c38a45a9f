"""`vcache doctor`: finds the faults of this machine for vcache, and says what to do about each.

For a moment, the doctor makes a CUDA context on each GPU, and puts a small object into the offload
tier. Imports neither torch nor LMCache nor vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from vcache_backend.config import Config
from vcache_backend.doctor.finding import Finding, fail
from vcache_backend.doctor.gpus import check_gpus
from vcache_backend.doctor.model import check_model
from vcache_backend.doctor.offload import check_offload
from vcache_backend.doctor.server import check_server
from vcache_backend.doctor.system import check_kernel, check_packages


def diagnose(config: Config, model: str = "") -> list[Finding]:
    """All findings, or only findings about `model`. Never raises. Takes seconds; with `model` some
    20 s, and up to a minute if an offload tier hangs."""
    if model:
        return _made(partial(check_model, model), "model", config)
    checks: list[Callable[[Config], Iterator[Finding]]] = [
        check_kernel,
        check_packages,
        check_gpus,
        check_server,
        check_offload,
    ]
    return [
        finding
        for check in checks
        for finding in _made(check, check.__name__.removeprefix("check_"), config)
    ]


def _made(check: Callable[[Config], Iterator[Finding]], name: str, config: Config) -> list[Finding]:
    try:
        return list(check(config))
    except Exception as error:  # noqa: BLE001 - the outermost loop: the other checks go on
        return [fail(name, f"the check itself failed: {error!r}", "report this as a bug of vcache")]
