"""What `vcache doctor` says of the offload tier: a real store that works, lacks something, or is
none."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from mooncake_cases import hung_depot, needs_mooncake
from mooncake_store import Depot
from processes import SECONDS
from test_doctor import by_check, only
from typer.testing import CliRunner

from benchmarks.processes import free_ports
from vcache_backend import doctor
from vcache_backend.cli import app
from vcache_backend.config import Config, from_dict
from vcache_backend.doctor import LIBRARY, MASTER, PROVIDER, Finding, check_offload

__all__ = ["hung_depot"]


def config(master: str = "", policy: str = "write_through", **mooncake: Any) -> Config:
    given = {"master": master, "hostname": "127.0.0.1"} if master else {}
    return from_dict({"offload": {"policy": policy, "mooncake": given | mooncake}})


def findings(of: Config) -> dict[str, Finding]:
    return by_check(check_offload(of))


def test_a_tier_that_is_off_is_one_line_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(doctor, "check_store")
    finding = only(check_offload(config(policy="off")))
    assert (finding.check, finding.status, finding.detail[:5]) == ("offload", "ok", "off: ")


@needs_mooncake
def test_a_store_is_left_as_it_was_and_what_is_wrong_with_it_is_named(hung_depot: Depot) -> None:
    """It works; this client cannot be set up; a provider has died before the master knows."""
    master = hung_depot.master.address
    found = findings(config(master))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert list(found)[-3:] == [LIBRARY, MASTER, PROVIDER]
    assert found[PROVIDER].detail.startswith("1 MiB put in ")
    assert sum(hung_depot.master.segments().values()) == 0
    detail = findings(config(master, protocol="rdma", devices="nope"))[MASTER].detail
    assert "with hostname 127.0.0.1, protocol rdma, devices nope" in detail
    hung_depot.providers[0].kill()
    found = findings(config(master))
    assert (found[MASTER].status, found[PROVIDER].status) == ("ok", "fail")
    assert ": put: " in found[PROVIDER].detail
    assert "client_ttl" in found[PROVIDER].advice


@needs_mooncake
def test_without_a_master_the_command_fails_and_says_how_to_start_one(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "vcache.yaml"
    file.write_text(f"offload: {{policy: write_through, mooncake: {{master: '127.0.0.1:{port}'}}}}")
    result = CliRunner().invoke(app, ["doctor", "--json", "--config", str(file)])
    found = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert (result.exit_code, found[LIBRARY]["status"]) == (1, "ok")
    assert (found[MASTER]["status"], PROVIDER in found) == ("fail", False)
    assert "Connection refused" in found[MASTER]["detail"]
    assert "vcache mooncake" in found[MASTER]["advice"]


@needs_mooncake
def test_a_master_without_a_provider_has_no_room(tmp_path: Path) -> None:
    with Depot(tmp_path / "mooncake", ()) as depot:
        found = findings(config(depot.master.address))
    said = "no room for 1 MiB: no provider lends memory, or all of it is in use"
    assert (found[MASTER].status, found[PROVIDER].detail) == ("ok", said)
    assert "start a provider" in found[PROVIDER].advice


@needs_mooncake
def test_a_library_that_cannot_load_crashes_or_hangs_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        (tmp_path / "libibverbs.so.1").write_bytes(b"")
        changed.setenv("LD_LIBRARY_PATH", str(tmp_path))
        found = findings(config(f"127.0.0.1:{free_ports(1)[0]}"))
    assert found[LIBRARY].status == "fail"
    assert found[LIBRARY].detail.endswith("; apt-get install libibverbs1")
    assert found.keys() & {MASTER, PROVIDER} == set()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for text, seconds, said in (
        ("ctypes.string_at(0)", SECONDS, f"ended (-{signal.SIGSEGV:d})"),
        ("time.sleep(60)", 0.5, "no answer in 0.5 s; the offload process was killed"),
    ):
        monkeypatch.setattr("vcache_backend.offload.process.OPEN_SECONDS", seconds)
        (tmp_path / "mooncake.py").write_text(f"import ctypes, time\n{text}")
        finding = only(doctor.check_store(config()))
        assert (finding.check, finding.status) == (LIBRARY, "fail")
        assert said in finding.detail
