"""AMX, the matrix unit of newer x86 CPUs: a process has to ask Linux for it before it may use it."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("vllm.vcache")


def permit() -> None:
    """Ask for this process, its threads and those forked from it, if the CPU has AMX. Never raises.

    vLLM's attention on CPUs counts on a large matrix product to have asked. Where the first model run of a process is small, as that
    of a hit is, none has, and the process dies of an illegal instruction.
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    ask = getattr(torch.cpu, "_init_amx", None)
    if supported is None or ask is None:
        return
    try:
        if supported() and not ask():
            log.warning("vcache: Linux does not permit AMX to this process; vLLM may die of an illegal instruction")
    except Exception:  # whatever torch does, vLLM may still work
        log.warning("vcache: could not ask for AMX", exc_info=True)
