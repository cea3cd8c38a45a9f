"""`vcache doctor`: finds the faults of this machine for vcache, and says what to do about each:
Linux, installed packages, GPUs, the metadata server, the offload tier; or says whether a model is
cached.

For a moment, the doctor makes a CUDA context on each GPU, and puts a small object into the offload
tier. Imports neither torch nor LMCache nor vLLM."""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from vcache_backend import proofs
from vcache_backend.config import ByteSize, ClientConfig, Config, default_socket, dump, left_out
from vcache_backend.errors import MAX_LINE_CHARS, SegmentError, VCacheError, printable
from vcache_backend.metadata_server.start import ANSWER_SECONDS
from vcache_backend.offload.process import (
    FULL,
    INSTALL,
    STORED,
    OffloadProcess,
    StoreDown,
)
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import PROTOCOL_VERSION
from vcache_backend.status import verdict
from vcache_backend.supported import MOONCAKE, PACKAGES, VLLM, numbers
from vcache_backend.vram_pool import cuda_driver, devices

LIBRARY, MASTER, PROVIDER = "mooncake library", "mooncake master", "mooncake provider"
_ADVICE = {
    LIBRARY: f"install what it names, or the library anew: {INSTALL}",
    MASTER: (
        "start mooncake_master there (here `vcache mooncake`), or set offload.mooncake.master; if "
        "it runs, check that this is its rpc_port, that it does not hang, and your firewalls"
    ),
    PROVIDER: "check that all providers run; dead ones are forgotten after client_ttl, 10 s",
}


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


def diagnose(config: Config, model: str = "") -> list[Finding]:
    """All findings, or only findings about `model`. Never raises. Takes seconds; with `model` some
    20 s, and up to a minute if an offload tier hangs."""
    checks: dict[str, Callable[[Config], Iterator[Finding]]] = {
        "kernel": check_kernel,
        "packages": check_packages,
        "gpus": check_gpus,
        "server": check_server,
        "offload": check_offload,
    }
    found = list[Finding]()
    for name, check in ({"model": partial(check_model, model=model)} if model else checks).items():
        try:
            found += check(config)
        except Exception as error:  # noqa: BLE001 - the outermost loop: the other checks go on
            said = f"the check itself failed: {error!r}"
            found.append(fail(name, said, "report this as a bug of vcache"))
    return found


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
        elif package is VLLM and numbers(version) >= VLLM.low and not VLLM.supports(version):
            yield _unlisted(version)
        elif package.supports(version):
            said = proofs.standing(version, None) if package is VLLM else version
            yield ok(package.name, said if name == package.name else f"{said} ({name})")
        else:
            detail = f"{version} is not one of the supported versions, {package.wanted}"
            yield (fail if here[package.role] else warn)(package.name, detail, advice)
    if wrong := left_out():
        yield fail("plugin", "vLLM will not find VCacheConnector", wrong)


def _unlisted(version: str) -> Finding:
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
    return warn(VLLM.name, f"{version}: vcache was not tested with it", advice)


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
    seconds = ANSWER_SECONDS
    within = ClientConfig(connect_seconds=seconds, request_seconds=seconds, server_uid=uid)
    with Client(config.server.path, within, reconnect=False) as client:
        try:
            stats = client.stats()
        except VCacheError as error:
            said = str(error)
            detail, _, advice = said.rpartition("; ")
            absent = said.startswith("no metadata server at")  # it may only have to be started
            default = config.server.path == default_socket()
            if absent and default and config.connector.start_server:
                advice = f"the first instance starts one, and its log says so; or {advice}"
            if not detail:
                detail = said
                advice = "see its log, or restart it with this version"
            yield (warn if absent else fail)("server", detail, advice)
            return
    yield ok("server", f"{config.server.path} answers, protocol {PROTOCOL_VERSION}")
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


# ---- the offload tier: the Mooncake store's library, master and providers, asked through an
# offload process, as workers do, since the library may hang or crash


def check_offload(config: Config) -> Iterator[Finding]:
    """Check the store; one finding if the tier is off."""
    tier = config.offload
    if tier.policy == "off":
        yield ok("offload", "off: what leaves the pool is computed again (offload.policy)")
        return
    where = f"Mooncake at {tier.mooncake.master}, {tier.mooncake.protocol}"
    yield ok("offload", f"{tier.policy} to {where}")
    if MOONCAKE.installed()[1]:  # else check_packages says so
        yield from check_store(config)


def check_store(config: Config) -> Iterator[Finding]:
    """Put a small object into the store, read it and remove it."""
    mooncake, check = config.offload.mooncake, LIBRARY
    where = f"Mooncake at {mooncake.master}"
    with ExitStack() as undo:
        fd = os.memfd_create("vcache-doctor", os.MFD_CLOEXEC)
        undo.callback(os.close, fd)
        os.ftruncate(fd, 2 << 20)
        try:
            process = OffloadProcess(mooncake, fd)
            undo.callback(process.kill)
            yield ok(LIBRARY, "loads")
            # A call usually takes a fraction of a second.
            call, check = partial(process.call, seconds=8.0), MASTER
            call("open")
            yield ok(MASTER, f"{mooncake.master} answers")
            check = PROVIDER
            yield _provider(call, fd)
        except VCacheError as error:
            yield fail(check, f"{where}: {error}", _ADVICE[check])


def _provider(call: partial[Any], fd: int) -> Finding:
    """Check that an object comes back unchanged. StoreDown. fd: memory of 2 MiB."""
    names, content = [f"vcache1/doctor-{secrets.token_hex(8)}"], secrets.token_bytes(1 << 20)
    with mmap.mmap(fd, 2 << 20) as memory:
        memory[: 1 << 20] = content
        started = time.monotonic()
        (outcome,) = call("put", names, [(0, 1 << 20)])
        written = time.monotonic()
        if outcome == FULL:
            lacks = "no room for 1 MiB: no provider lends memory, or all of it is in use"
            return fail(PROVIDER, lacks, "start a provider (`vcache mooncake`), or a larger one")
        if outcome != STORED:
            raise StoreDown(f"put: {outcome}")
        (nbytes,) = call("get", names, [(1 << 20, 1 << 20)])
        read = time.monotonic()
        call("remove", names)
        if memory[1 << 20 :] != content:
            raise StoreDown(f"get: {nbytes:,} bytes came back, and other ones than were put")
    put_ms, get_ms = 1e3 * (written - started), 1e3 * (read - written)
    return ok(PROVIDER, f"1 MiB put in {put_ms:.3g} ms, read in {get_ms:.3g} ms")


# ---- a model

CONFIGS = {"config.json", "params.json"}
"""The file that makes a folder a model for vLLM: Hugging Face's, or Mistral's."""
THERE = "name a folder that is there, or a model of Hugging Face"


def missing(model: str) -> str:
    """Say that no model is at a path, which vLLM would then take for a name of Hugging Face. Empty
    if there is one, and for names."""
    if not model.startswith(("/", "./", "../", "~")):
        return ""
    try:
        if not stat.S_ISDIR(os.stat(model).st_mode) or CONFIGS.intersection(os.listdir(model)):
            return ""
        why = "the folder has no config.json"
    except OSError as error:
        why = str(error.strerror)
    with suppress(OSError):  # the working directory is gone
        model = os.path.abspath(model)
    return printable(f"no model at {model}: {why}", MAX_LINE_CHARS)


def check_model(config: Config, model: str, seconds: float = 300.0) -> Iterator[Finding]:
    """Ask the installed vLLM, in a child process, whether our connector caches a model (as `vllm
    serve` takes it), and how many tokens a pool holds: see `integration.vllm.model.report`."""
    name = printable(model)
    if said := missing(model):
        yield fail("model", said, THERE)
        return
    if find_spec("vllm") is None:
        lacks = "vLLM is not installed here, and only vLLM knows its models"
        yield fail("model", f"{name}: {lacks}", "run this in vLLM's environment")
        return
    # A missing `PYTHONHASHSEED` is a separate finding.
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    quiet |= {"PYTHONHASHSEED": "0"}
    program = [sys.executable, "-P", "-m", "vcache_backend.integration.vllm.model.report", model]
    try:
        asked = subprocess.run(
            program,
            input=msgspec.json.encode(dump(config)),
            capture_output=True,
            timeout=seconds,
            env={**os.environ, **quiet},  # noqa: TID251 - handed on, not read
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"vLLM could not be asked: {error}"
    else:
        with suppress(msgspec.DecodeError):
            yield from msgspec.json.decode(asked.stdout, type=list[Finding])
            return
        last = asked.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = f"vLLM ended with code {asked.returncode}: {last or 'it printed nothing'}"
    why = printable(why, MAX_LINE_CHARS)
    yield fail("model", f"{name}: {why}", "start vLLM with it and see its log")
