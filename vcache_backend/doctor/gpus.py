"""Checks the driver, the GPUs, how they reach each other, and whether a segment fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor.finding import Finding, fail, ok, warn
from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import cuda_driver, devices, memory_budget
from vcache_backend.vram_pool.cuda_driver import DriverError
from vcache_backend.vram_pool.devices import Gpu


def check_gpus(config: Config) -> Iterator[Finding]:
    """Check the driver, each GPU, torch's build, and each pair of GPUs."""
    if not has_nvidia():
        yield ok("gpus", "no NVIDIA GPU: segments will be host memory")
        return
    try:
        gpus, version = devices.gpus(), cuda_driver.load().version()
    except SegmentError as error:
        if isinstance(error, DriverError) and error.code == "CUDA_ERROR_NO_DEVICE":
            yield from _sees_none()
            return
        detail = f"there is an NVIDIA driver, but its GPUs cannot be used: {error}"
        yield fail("gpus", detail, "see nvidia-smi")
        return
    yield ok("driver", f"NVIDIA {_kernel_module()}, CUDA {'.'.join(map(str, version))}")
    if not gpus:
        yield from _sees_none()
    yield from map(_one_gpu, gpus)
    yield from _pairs(gpus)


def _sees_none() -> Iterator[Finding]:
    advice = "check CUDA_VISIBLE_DEVICES and the container's GPU access, or set pool.device: host"
    yield warn("gpus", "there is an NVIDIA driver, but this process sees no GPU", advice)


def _one_gpu(gpu: Gpu) -> Finding:
    free, total = ByteSize(gpu.free_bytes).about, ByteSize(gpu.total_bytes).about
    check, detail = f"gpu {gpu.ordinal}", f"{gpu.name}, {gpu.uuid}, {free} of {total} free"
    if gpu.shares_memory:
        return ok(check, detail)
    detail += "; no virtual memory management with POSIX fds"
    return fail(check, detail, "it cannot hold segments: set pool.device: host")


def _pairs(gpus: list[Gpu]) -> Iterator[Finding]:
    names = {gpu.uuid: gpu.ordinal for gpu in gpus}
    for gpu in gpus:
        for peer, link in gpu.links.items():
            check = f"peer {gpu.ordinal} reads {names[peer]}"
            if link == "nvlink":
                yield ok(check, "NVLink")
            elif link == "pcie":
                advice = "hits on this peer will be several times slower"
                yield warn(check, "PCIe, no NVLink", advice)
            else:
                advice = "they cannot share; see `nvidia-smi topo -p2p r`, IOMMU and ACS settings"
                yield fail(check, f"no peer access from {gpu.uuid} to {peer}", advice)


def has_nvidia() -> bool:
    """Whether the NVIDIA kernel driver is loaded, as far as this container shows it."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _kernel_module() -> str:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if version := re.search(r"\b(\d{3}\.[\d.]+)\b", text):
            return version[1]
    return "driver of unknown version"


# ---- memory


def check_memory(config: Config) -> Iterator[Finding]:
    """Compare `pool.segment_bytes` with the free memory of the pool's device."""
    wanted = config.pool.lent
    if config.connector.share == "auto" and config.pool.segment_bytes is None:
        detail = (
            "pool.segment_bytes is not set: a worker lends nothing if it shares in "
            f"place, {wanted} if it uses a pool"
        )
        yield ok("memory", detail)
        return
    if wanted == 0:
        yield ok("memory", "pool.segment_bytes is 0: this worker lends nothing")
        return
    device = config.pool.device
    gpu = _pool_gpu(device) if not device.startswith("host") else None
    if gpu is not None:
        yield _gpu_budget(gpu, wanted)
        return
    if device != "auto" and not device.startswith("host"):
        yield fail("memory", f"pool.device: {device} is not here", "set pool.device: auto or host")
        return
    available = devices.host_available()
    detail = f"pool.segment_bytes {wanted}, {ByteSize(available).about} of host memory available"
    if wanted <= available:
        yield ok("memory", detail)
    else:
        less = ByteSize(available // 2).about
        yield fail("memory", detail, f"set pool.segment_bytes to {less} or less")


def _pool_gpu(spec: str) -> Gpu | None:
    """The GPU that `pool.device` names; None if not here. `auto` and `cuda`: the first."""
    if not has_nvidia():
        return None
    try:
        here = devices.gpus()
    except SegmentError:
        return None
    wanted = "cuda:0" if spec in ("auto", "cuda") else spec
    return next(
        (gpu for gpu in here if wanted.lower() in (f"cuda:{gpu.ordinal}", gpu.uuid.lower())), None
    )


def _gpu_budget(gpu: Gpu, wanted: ByteSize) -> Finding:
    """Whether a segment of `wanted` bytes fits on this GPU beside vLLM."""
    check = f"memory of gpu {gpu.ordinal}"
    free, total = ByteSize(gpu.free_bytes).about, ByteSize(gpu.total_bytes).about
    detail = f"pool.segment_bytes {wanted}, {free} of {total} free"
    # A segment may be there already, so lacking free memory is no failure.
    if fault := memory_budget.shortfall(gpu.total_bytes, gpu.free_bytes, wanted, 0, None):
        return fail(check, f"{detail}: nothing is left for vLLM", fault)
    most = memory_budget.most_utilization(gpu.total_bytes, wanted)
    vllm = f"start vLLM with gpu_memory_utilization <= {most:.2f}"
    if wanted > gpu.free_bytes:
        advice = f"lower pool.segment_bytes, unless `vcache segment list` has the segment; {vllm}"
        return warn(check, f"{detail}: not enough for a new segment", advice)
    return ok(check, f"{detail}; {vllm}")
