"""Checks the driver, the GPUs, and how they reach each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor.finding import Finding, fail, ok, warn
from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.cuda_driver import DriverError
from vcache_backend.vram_pool.devices import Gpu

SEES_NONE = warn(
    "gpus",
    "there is an NVIDIA driver, but this process sees no GPU",
    "check CUDA_VISIBLE_DEVICES and the container's GPU access, or set pool.device: host",
)


def check_gpus(config: Config) -> Iterator[Finding]:
    """Check the driver, each GPU, and each pair of GPUs."""
    if not has_nvidia():
        yield ok("gpus", "no NVIDIA GPU: segments will be host memory")
        return
    try:
        gpus, version = devices.gpus(), cuda_driver.load().version()
    except SegmentError as error:
        if isinstance(error, DriverError) and error.code == "CUDA_ERROR_NO_DEVICE":
            yield SEES_NONE
        else:
            detail = f"there is an NVIDIA driver, but its GPUs cannot be used: {error}"
            yield fail("gpus", detail, "see nvidia-smi")
        return
    yield ok("driver", f"NVIDIA, CUDA {'.'.join(map(str, version))}")
    if not gpus:
        yield SEES_NONE
    yield from map(_one_gpu, gpus)
    yield from _pairs(gpus)


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
