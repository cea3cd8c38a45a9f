"""The metadata server: its socket, its answer to a hello, and what instances told it."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vcache_backend.config import ClientConfig, Config
from vcache_backend.doctor.finding import Finding
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import folder_fault
from vcache_backend.metadata_server.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AnyReply,
    Error,
    Hello,
    Reported,
    Welcome,
)
from vcache_backend.metadata_server.processes import peer

SERVER_SECONDS = 1.0
REPORT_SECONDS = 3600.0
"""Older reports are not findings any more; `vcache status` still shows them."""
MAX_SOCKET_PATH = 107


def check_socket(config: Config) -> Iterator[Finding]:
    """The socket's folder: there, ours, closed to others."""
    path = config.server.path
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        detail = f"{path} is longer than the {MAX_SOCKET_PATH} bytes a socket's path may have"
        yield Finding("socket", "fail", detail, "set a shorter server.socket")
        return
    trusted = _trusted(config)
    try:
        fault, folder = folder_fault(path, trusted), path.parent.lstat()
    except FileNotFoundError:
        yield Finding("socket", "warn", f"{path.parent} does not exist yet", "`vcache serve` makes it")
        return
    except OSError as error:
        yield Finding("socket", "fail", f"{path.parent}: {error}", "set server.socket to a folder of this user")
        return
    mode = stat.S_IMODE(folder.st_mode)
    detail = f"{path} (folder of uid {folder.st_uid}, mode {mode:04o})"
    if fault:
        yield Finding("socket", "fail", f"{detail}: {fault}", "see docs/operations.md")
    elif mode & 0o077 and not config.server.allow_uids:
        yield Finding("socket", "warn", f"{detail}: other users can reach it", f"chmod 700 {path.parent}")
    else:
        yield Finding("socket", "ok", detail)


def _trusted(config: Config) -> set[int]:
    named = config.client.server_uid
    return {os.getuid(), 0} | ({named} if named is not None else set())


def check_server(config: Config) -> Iterator[Finding]:
    """Say hello to the metadata server as a tool would. Ends within about `SERVER_SECONDS`."""
    path = str(config.server.path)
    start = "start it: `vcache serve`"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        try:
            reply = _greet(channel, path, time.monotonic() + SERVER_SECONDS, _trusted(config))
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


def _greet(channel: socket.socket, path: str, deadline: float, trusted: set[int]) -> AnyReply:
    """The answer to our hello."""
    channel.settimeout(_remaining(deadline))
    channel.connect(path)
    _, uid = peer(channel)
    if uid not in trusted:
        raise PermissionError(f"a process of uid {uid} serves there; set client.server_uid: {uid} to trust it")
    body = msgspec.msgpack.encode(Hello(version=PROTOCOL_VERSION, device="host", medium="host"))
    channel.sendall(len(body).to_bytes(4, "little") + body)
    size = int.from_bytes(_receive(channel, 4, deadline), "little")
    if size > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {size:,} B: whoever listens there is not vcache")
    reply: AnyReply = msgspec.msgpack.decode(_receive(channel, size, deadline), type=AnyReply)
    return reply


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
