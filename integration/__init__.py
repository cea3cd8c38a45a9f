"""The integrations: LMCache's storage plugin and vLLM's connector. Installed as
`vcache_backend.integration`."""

from __future__ import annotations

import time


def booted() -> float:
    """When this machine started, by its clock of now: seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


BOOTED = booted()
"""The same by the clock of the moment when vLLM loaded our plugin, before it loads weights."""
