"""The driver, each GPU, and how they reach each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor.finding import Finding
from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.cuda_driver import DriverError
from vcache_backend.vram_pool.devices import Gpu


def check_gpus(config: Config) -> Iterator[Finding]:
    """Driver, each GPU, and each pair of them."""
    if not has_nvidia():
        yield Finding("gpus", "ok", "no NVIDIA GPU: segments will be host memory")
        return
    try:
        gpus, version = devices.gpus(), cuda_driver.load().version()
    except SegmentError as error:
        if isinstance(error, DriverError) and error.code == "CUDA_ERROR_NO_DEVICE":
            yield from _sees_none()
            return
        yield Finding("gpus", "fail", f"an NVIDIA driver, but its GPUs cannot be used: {error}", "see nvidia-smi")
        return
    yield Finding("driver", "ok", f"NVIDIA {_kernel_module()}, CUDA {'.'.join(map(str, version))}")
    if not gpus:
        yield from _sees_none()
    yield from map(_one_gpu, gpus)
    yield from _torch_build(gpus)
    yield from _pairs(gpus)


def _sees_none() -> Iterator[Finding]:
    advice = "check CUDA_VISIBLE_DEVICES and the container's GPU access, or set pool.device: host"
    yield Finding("gpus", "warn", "an NVIDIA driver, but this process sees no GPU", advice)


def _one_gpu(gpu: Gpu) -> Finding:
    free, total = ByteSize(gpu.free_bytes).about, ByteSize(gpu.total_bytes).about
    detail = f"{gpu.name}, {gpu.uuid}, {free} of {total} free"
    if gpu.shares_memory:
        return Finding(f"gpu {gpu.ordinal}", "ok", detail)
    what = f"{detail}; no virtual memory management with POSIX fds"
    return Finding(f"gpu {gpu.ordinal}", "fail", what, "it cannot hold segments: set pool.device: host")


def _torch_build(gpus: list[Gpu]) -> Iterator[Finding]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    if gpus and version.endswith("+cpu"):
        yield Finding("torch build", "fail", f"torch {version} has no CUDA", "install torch from the CUDA index")


def _pairs(gpus: list[Gpu]) -> Iterator[Finding]:
    names = {gpu.uuid: gpu.ordinal for gpu in gpus}
    for gpu in gpus:
        for peer, link in gpu.links.items():
            check = f"peer {gpu.ordinal} reads {names[peer]}"
            if link == "nvlink":
                yield Finding(check, "ok", "NVLink")
            elif link == "pcie":
                yield Finding(check, "warn", "PCIe, no NVLink", "hits on this peer will be several times slower")
            else:
                advice = "they cannot share hits; see `nvidia-smi topo -p2p r`, and IOMMU and ACS settings"
                yield Finding(check, "fail", f"no peer access from {gpu.uuid} to {peer}", advice)


def has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _kernel_module() -> str:
    try:
        found = re.search(r"\b(\d{3}\.[\d.]+)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else "driver of unknown version"
