"""Whether this worker's segment fits on its device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor import gpus
from vcache_backend.doctor.finding import Finding
from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import devices, memory_budget
from vcache_backend.vram_pool.devices import Gpu


def check_memory(config: Config) -> Iterator[Finding]:
    """`pool.segment_bytes` against what the pool's device has free."""
    wanted = config.pool.segment_bytes
    if wanted == 0:
        yield Finding("memory", "ok", "pool.segment_bytes is 0: this worker lends nothing")
        return
    gpu = _pool_gpu(config.pool.device) if not config.pool.device.startswith("host") else None
    if gpu is not None:
        yield _gpu_budget(gpu, wanted)
        return
    if config.pool.device not in ("auto", "host") and not config.pool.device.startswith("host:"):
        yield Finding("memory", "fail", f"pool.device: {config.pool.device} is not here", "set pool.device: auto or host")
        return
    available = host_available()
    detail = f"pool.segment_bytes {wanted}, {ByteSize(available).about} of host memory available"
    if wanted <= available:
        yield Finding("memory", "ok", detail)
    else:
        yield Finding("memory", "fail", detail, f"set pool.segment_bytes to {ByteSize(available // 2).about} or less")


def _pool_gpu(spec: str) -> Gpu | None:
    """The GPU that `pool.device` means, without torch: `auto` and `cuda` are the first."""
    if not gpus.has_nvidia():
        return None
    try:
        here = devices.gpus()
    except SegmentError:
        return None
    wanted = "cuda:0" if spec in ("auto", "cuda") else spec
    return next((gpu for gpu in here if wanted.lower() in (f"cuda:{gpu.ordinal}", gpu.uuid.lower())), None)


def _gpu_budget(gpu: Gpu, wanted: ByteSize) -> Finding:
    most = memory_budget.most_utilization(gpu.total_bytes, wanted)
    check = f"memory of gpu {gpu.ordinal}"
    detail = f"pool.segment_bytes {wanted}, {ByteSize(gpu.free_bytes).about} of {ByteSize(gpu.total_bytes).about} free"
    if not most:
        half = memory_budget.most_segment(gpu.total_bytes, memory_budget.MAX_SHARE / 2).about
        return Finding(check, "fail", f"{detail}: nothing is left for vLLM", f"set pool.segment_bytes to {half} or less")
    vllm = f"start vLLM with gpu_memory_utilization <= {most:.2f}"
    if wanted > gpu.free_bytes:
        advice = f"set pool.segment_bytes lower, unless the pool's segment is there already (`vcache segment list`); {vllm}"
        return Finding(check, "warn", f"{detail}: not enough for a new segment", advice)
    return Finding(check, "ok", f"{detail}; {vllm}")


def host_available() -> int:
    """Bytes that this process can still take: of the machine, and of its cgroup where that has a limit."""
    meminfo = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(found[1]) * 1024 if found else 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))
