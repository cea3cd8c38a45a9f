"""The integrations: LMCache's storage plugin and vLLM's connector. Installed as
`vcache_backend.integration`."""

from __future__ import annotations

import time


def booted() -> float:
    """When this machine started, by its present clock: seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


BOOTED = booted()
"""`booted()` at the time when vLLM loaded our plugin, before it loads weights."""
