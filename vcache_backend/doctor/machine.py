"""What a check finds; and checks of Linux, installed packages, GPUs, and the metadata server."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from vcache_backend import proofs
from vcache_backend.config import ByteSize, ClientConfig, Config, left_out, whole
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import PROTOCOL_VERSION
from vcache_backend.status import verdict
from vcache_backend.supported import PACKAGES, VLLM, numbers
from vcache_backend.vram_pool import cuda_driver, devices


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. advice: what to do, or empty."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warn(check: str, detail: str, advice: str) -> Finding:
    return Finding(check, "warn", detail, advice)


def fail(check: str, detail: str, advice: str = "") -> Finding:
    return Finding(check, "fail", detail, advice)


# ---- the system and packages


def check_kernel(config: Config) -> Iterator[Finding]:
    """Check Linux's version, memfd_create for segments, and pidfd_open to notice dead clients."""
    release = platform.release()
    if sys.platform != "linux" or numbers(release) < (5, 4):
        yield fail("kernel", f"{platform.system()} {release}", "vcache needs Linux 5.4 or later")
        return
    try:
        os.close(os.memfd_create("vcache-doctor", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "let the container's seccomp profile allow these calls (Docker 20.10 and later do)"
        yield fail("kernel", f"Linux {release} without memfd_create or pidfd_open: {error}", advice)
    else:
        yield ok("kernel", f"Linux {release}, memfd and pidfd work")


def check_packages(config: Config) -> Iterator[Finding]:
    """Compare installed versions, read from metadata without an import, with supported ones."""
    tier = config.offload.policy != "off"
    here = {"engine": True, "gpu": has_nvidia(), "tier": tier, "optional": False}
    for package in PACKAGES:
        name, version = package.installed()
        advice = f"pip install '{name}{package.wanted}'"
        if not version and package.role == "engine":
            without = "the server does without it; what moves KV needs the extra `engine`"
            yield ok(name, f"not installed: {without}")
        elif not version and not here[package.role]:
            yield ok(name, "not installed (optional)")
        elif not version:
            other = f"; without CUDA: {package.builds[0]}" if package.builds else ""
            lacks = "not installed, and needed with this machine and configuration"
            yield fail(name, lacks, advice + other)
        elif package is VLLM and numbers(version) >= VLLM.high:
            yield _newer(version)
        elif package.supports(version):
            yield ok(package.name, version if name == package.name else f"{version} ({name})")
        else:
            detail = f"{version} is not one of the supported versions, {package.wanted}"
            yield (fail if here[package.role] else warn)(package.name, detail, advice)
    if wrong := left_out():
        yield fail("plugin", "vLLM will not find VCacheConnector", wrong)


def _newer(version: str) -> Finding:
    """Say whether a vLLM that vcache was not tested with was proved here."""
    ours = {"vllm": version, "vcache": proofs.installed()}
    for proof in proofs.believed():
        what = msgspec.structs.asdict(proof.combination)
        if ours.items() <= what.items():
            said = proofs.standing(version, proof)
            return ok(
                VLLM.name, f"{said}: {what['share']} on {what['device']}, torch {what['torch']}"
            )
    advice = "run `vcache prove`: behind a proof instances share"
    return warn(VLLM.name, f"{version} is newer than what vcache was tested with", advice)


# ---- GPUs


def has_nvidia() -> bool:
    """Whether the NVIDIA kernel driver is loaded, as far as this container shows it."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def check_gpus(config: Config) -> Iterator[Finding]:
    """Check the driver, each GPU, and each pair of GPUs."""
    if not has_nvidia():
        yield ok("gpus", "no NVIDIA GPU: segments will be host memory")
        return
    try:
        gpus, version = devices.gpus(), cuda_driver.load().version()
    except SegmentError as error:
        detail = f"there is an NVIDIA driver, but its GPUs cannot be used: {error}"
        advice = "see nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPU access"
        sees_none = getattr(error, "code", "") == "CUDA_ERROR_NO_DEVICE"
        found = warn if sees_none else fail
        yield found("gpus", detail, f"{advice}, or set pool.device: host")
        return
    yield ok("driver", f"NVIDIA, CUDA {'.'.join(map(str, version))}")
    for gpu in gpus:
        free, total = ByteSize(gpu.free_bytes).about, ByteSize(gpu.total_bytes).about
        name, detail = f"gpu {gpu.ordinal}", f"{gpu.name}, {gpu.uuid}, {free} of {total} free"
        if gpu.shares_memory:
            yield ok(name, detail)
        else:
            detail += "; no virtual memory management with POSIX fds"
            yield fail(name, detail, "it cannot hold segments: set pool.device: host")
    names = {gpu.uuid: gpu.ordinal for gpu in gpus}
    for gpu in gpus:
        for peer, link in gpu.links.items():
            yield _link(f"peer {gpu.ordinal} reads {names[peer]}", link)


def _link(check: str, link: str) -> Finding:
    if link == "nvlink":
        return ok(check, "NVLink")
    if link == "pcie":
        return warn(check, "PCIe, no NVLink", "hits on this peer will be several times slower")
    advice = "they cannot share; see `nvidia-smi topo -p2p r`, IOMMU and ACS settings"
    return fail(check, "no peer access", advice)


# ---- the server


def check_server(config: Config) -> Iterator[Finding]:
    """Check that the server answers and that instances share, and look for its clients' reports of
    the last hour."""
    uid = config.client.server_uid
    within = ClientConfig(connect_seconds=1.0, request_seconds=1.0, server_uid=uid)
    with Client(config.server.path, within, reconnect=False) as client:
        if not client.connected:
            # An absent server may only have to be started.
            absent = client.trouble.startswith("no metadata server at")
            detail, _, advice = client.trouble.rpartition("; ")
            if not detail:
                detail = client.trouble
                advice = "see its log; `kill -CONT` it, or restart it with this version"
            elif absent and config.connector.start_server:
                advice = f"the first instance starts one, and its log says so; or {advice}"
            yield (warn if absent else fail)("server", detail, advice)
            return
        try:
            stats = client.stats()
        except VCacheError as error:
            detail = f"it accepts connections, but did not answer `stats`: {error}"
            yield fail("server", detail, "see its log")
            return
    detail = f"answers, protocol {PROTOCOL_VERSION}, epoch {stats.epoch}"
    yield ok("server", f"{whole(config.server.path)} {detail}")
    good, said = verdict(stats)
    if not good:
        yield warn("sharing", said, "see `vcache status`")
    for report in reversed(stats.reports):
        if report.level != "info" and report.time >= time.time() - 3600:
            check = f"report of pid {report.pid}" if report.pid else "report"
            detail = f"{time.strftime('%H:%M:%S', time.localtime(report.time))}, {report.text}"
            advice = "correct that and restart the instance, unless that was done since"
            found = fail if report.level == "error" else warn
            yield found(check, detail, f"{advice}; its log says more")
