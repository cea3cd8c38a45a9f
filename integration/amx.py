"""AMX, the matrix unit of newer x86 CPUs: a process must ask Linux for permission to use AMX."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("vllm.vcache")


def permit() -> None:
    """Ask for this process, its threads and later child processes, if the CPU has AMX. Never
    raises.

    vLLM's attention on CPUs relies on an earlier large matrix product, which asks. If a process's
    first model run is small, for example after a hit, nothing has asked, and the process dies of an
    illegal instruction."""
    try:
        if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
            log.warning(
                "vcache: Linux does not allow this process to use AMX; vLLM may end with an "
                "illegal instruction"
            )
    except Exception:  # whatever torch does, vLLM may still work
        log.warning("vcache: could not ask for AMX", exc_info=True)
