"""What processes of vLLM find around them: environment variables, GPUs, namespaces of their own;
and whose child one is.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from vcache_backend.prove import instance as prove

from ..processes import ROOT

ENVIRONMENT = {
    **prove.ENVIRONMENT,
    "PYTHONUNBUFFERED": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
_STARTED = itertools.count()


def environment(cpu: bool, cache: Path, **more: str) -> dict[str, str]:
    """Of an instance or a server. cache: for vLLM's compiled code. more: of its own."""
    given = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_CACHE_ROOT": str(cache),
        # The ports that vLLM's processes take among themselves are looked for from here on, apart
        # from those of other instances of this process, and of other processes.
        "VLLM_PORT": str(34_000 + 800 * (os.getpid() % 32) + 50 * (next(_STARTED) % 16)),
        **(prove.CPU_ENVIRONMENT if cpu else {}),
    }
    return given | more


def descends(pid: int, ancestor: int) -> bool:
    """Whether process `pid` is `ancestor`, or was started by it, or by one that it started."""
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor


def visible(gpu: int) -> str:
    """CUDA_VISIBLE_DEVICES for an instance on a GPU of this run, the first being 0: that one, then
    the other of its pair.

    The run's are those in its own CUDA_VISIBLE_DEVICES, so that a host of four may do two runs at a
    time. Past the last one they begin again, the other way round: ranks of an instance then read
    from the other GPU. Of a single one all instances are on it, and what they read of each other
    crosses no link.
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    if gpu >= len(own) > 1:
        gpu = (gpu ^ 1) % len(own)
    return ",".join((own[gpu], own[gpu ^ 1])) if len(own) > 1 else own[0]
