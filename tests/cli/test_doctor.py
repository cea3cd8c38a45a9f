"""`diagnose` says what is wrong and what to do, within a second or so, and never raises. Sockets
and files are real."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from fake_cuda import UUIDS, FakeCuda
from fake_cuda import cuda as cuda
from processes import SECONDS, stage

from vcache_backend import doctor, proofs
from vcache_backend.config import Config, from_dict
from vcache_backend.doctor import Finding, diagnose
from vcache_backend.proofs import Combination, Proof
from vcache_backend.protocol.messages import PROTOCOL_VERSION


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tmp_path.chmod(0o700)
    server, pool = {"socket": str(tmp_path / "s")}, {"segment_bytes": "1 MiB"}
    return from_dict({"server": server, "pool": pool})


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Each says what it is about, and, if it is not ok, what to do."""
    found = list(findings)
    for finding in found:
        what_to_do = finding.status == "ok" or finding.advice
        assert all((finding.check, finding.detail, what_to_do)), finding
    return {finding.check: finding for finding in found}


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_without_a_gpu_host_memory_is_used_and_a_check_that_breaks_is_a_finding(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_nvidia", lambda: False)
    findings = by_check(diagnose(config))
    assert len(findings) > 8
    assert findings["gpus"] == Finding("gpus", "ok", "no NVIDIA GPU: segments will be host memory")
    assert findings["cuda-bindings"].status == "ok"
    assert [name for name, finding in findings.items() if finding.status == "fail"] == []

    def check_kernel(config: Config) -> Iterator[Finding]:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(doctor, "check_kernel", check_kernel)
    broken = by_check(diagnose(config))
    assert "ZeroDivisionError('surprise')" in broken["kernel"].detail
    assert (broken["kernel"].status, broken.keys()) == ("fail", findings.keys())


# ---- packages and system

VERSIONS = {("lmcache", "0.5.12.post1"): "ok", ("lmcache", "0.6.0"): "warn"}
VERSIONS |= {("vllm", "0.9.2"): "warn", ("torch", "1.13.1"): "fail"}


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_versions_are_compared_as_numbers(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    real, status = metadata.version, VERSIONS[name, version]
    monkeypatch.setattr(metadata, "version", lambda one: version if one == name else real(one))
    finding = by_check(doctor.check_packages(config))[name]
    assert (finding.status, version in finding.detail) == (status, True)
    assert status == "ok" or f"pip install '{name}>=" in finding.advice


def test_a_newer_vllm_was_proved_here_or_is_to_be(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda one: "0.99.0" if one == "vllm" else real(one))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = by_check(doctor.check_packages(config))["vllm"]
    assert (found.status, "run `vcache prove`" in found.advice) == ("warn", True)
    made = Combination(vllm="0.99.0", torch="2.13.0", device="NVIDIA H200", share="in_place")
    proofs.write(Proof(combination=made, date="2026-12-01", model=""))
    said = "0.99.0, proved 2026-12-01: in_place on NVIDIA H200, torch 2.13.0"
    assert by_check(doctor.check_packages(config))["vllm"] == Finding("vllm", "ok", said)


@pytest.mark.parametrize("policy", ["off", "write_through"])
@pytest.mark.parametrize("nvidia", [False, True])
def test_a_missing_package_is_a_failure_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, nvidia: bool, policy: str
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(doctor, "has_nvidia", lambda: nvidia)
    config = from_dict({"offload": {"policy": policy}})
    found = by_check(doctor.check_packages(config))
    needed = {"cuda-bindings"} if nvidia else set()
    if policy != "off":
        needed |= {"mooncake-transfer-engine", "xxhash"}
        assert "transfer-engine-non-cuda" in found["mooncake-transfer-engine"].advice
    assert {name for name, one in found.items() if one.status == "fail"} == needed
    assert doctor.LIBRARY not in by_check(doctor.check_offload(config))


def test_a_plugin_that_vllm_was_told_not_to_load_is_a_failure(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    finding = by_check(doctor.check_packages(config))["plugin"]
    said = "set VLLM_PLUGINS=lora_filesystem_resolver,vcache, or unset it"
    assert (finding.status, said in finding.advice) == ("fail", True)
    monkeypatch.setenv("VLLM_PLUGINS", "vcache,lora_filesystem_resolver")
    assert "plugin" not in by_check(doctor.check_packages(config))


def test_what_the_kernel_lacks_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/nonexistent", os.O_RDONLY))
    assert "without memfd_create or pidfd_open" in only(doctor.check_kernel(config)).detail
    monkeypatch.setattr(platform, "release", lambda: "4.18.0-553.el8_10.x86_64")
    said = "Linux 4.18.0-553.el8_10.x86_64", "vcache needs Linux 5.4 or later"
    assert only(doctor.check_kernel(config)) == Finding("kernel", "fail", *said)


# ---- GPUs


def test_gpus_and_their_links_are_reported(
    config: Config, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    """Of a machine with two fake GPUs."""
    monkeypatch.setattr(doctor, "has_nvidia", lambda: True)
    findings = by_check(doctor.check_gpus(config))
    assert findings["gpu 1"].detail == f"Fake H200, {UUIDS[1]}, 5 MiB of 64 MiB free"
    assert findings["peer 0 reads 1"] == Finding("peer 0 reads 1", "ok", "NVLink")
    assert findings["driver"].detail.endswith("CUDA 13.0")


@pytest.mark.gpu
def test_a_real_gpu_machine_is_described_without_a_failed_check(config: Config) -> None:
    findings = by_check(diagnose(config))
    assert findings["gpu 0"].status == "ok", findings["gpu 0"]
    assert findings["driver"].status == "ok"
    assert not any("check itself failed" in finding.detail for finding in findings.values())


# ---- the server. What else a client says of a socket: tests/protocol and test_endpoint


def test_a_server_that_answers_is_fine_and_who_cannot_share_is_named(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", SECONDS)
    with stage(config.server.path.parent) as here:
        here.path = config.server.path
        here.server()
        finding = only(doctor.check_server(config))
        said = f"{here.path} answers, protocol {PROTOCOL_VERSION}"
        assert (finding.status, finding.detail) == ("ok", said)
        for dtype in ("bfloat16", "float16"):
            here.client(layout={"model": "m", "namespace": dtype, "dtype": dtype})
        mismatch = only(one for one in doctor.check_server(config) if one.check == "sharing")
    assert (mismatch.status, mismatch.advice) == ("warn", "see `vcache status`")
    assert mismatch.detail.endswith("lends memory; and 2 more")


def test_no_server_is_a_warning_that_says_how_to_start_one_and_others_are_failures(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config.server.path
    finding = only(doctor.check_server(config))
    start = f"start one with `vcache serve --socket {path}`"
    assert (finding.status, finding.advice) == ("warn", start)
    assert str(path) in finding.detail
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_over:
        left_over.bind(str(path))
    assert only(doctor.check_server(config)).status == "warn"
    path.unlink()
    default = from_dict({})
    starts = msgspec.structs.replace(config, connector=default.connector)
    assert only(doctor.check_server(starts)).advice == start, "nobody starts one at this socket"
    monkeypatch.setattr(doctor, "default_socket", lambda: path)
    assert only(doctor.check_server(starts)).advice.startswith("the first instance starts one")
    path.write_text("no socket")
    finding = only(doctor.check_server(config))
    assert (finding.status, "is not a socket" in finding.detail) == ("fail", True)
    path.unlink()
    path.symlink_to(path)
    finding = only(doctor.check_server(config))
    assert (finding.status, finding.advice) == ("fail", "look at that path, and at server.socket")


@pytest.mark.parametrize(
    ("answer", "said", "advice"),
    [
        (None, "did not answer in 1 s", "`kill -CONT {pid}`, or see its log"),
        (b"", "the server closed it", "see its log"),
        (b"HTTP/1.1 400", "is not a metadata server of", "set server.socket to that of a metadata"),
    ],
)
def test_a_hung_server_and_somebody_else_who_listens_there_are_failures(
    config: Config,
    answer: bytes | None,
    said: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if answer is not None:
        monkeypatch.setattr(doctor, "ANSWER_SECONDS", SECONDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(config.server.path))
        listener.listen(1)

        def serve() -> None:
            channel, _ = listener.accept()
            with channel:
                channel.recv(1 << 16)
                # Who is not answered hangs up.
                channel.sendall(answer) if answer is not None else channel.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        finding = only(doctor.check_server(config))
        thread.join(SECONDS)
    assert (finding.check, finding.status) == ("server", "fail")
    assert finding.advice.startswith(advice.format(pid=os.getpid()))
    assert said in finding.detail
