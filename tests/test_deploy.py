"""`deploy/`: what can be said of it without systemd, containers or a cluster running here."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from packaging.requirements import Requirement
from processes import ROOT, SECONDS, Stage, ran
from vllm_models import CONNECTOR

from vcache_backend import config
from vcache_backend.config import ClientConfig, split_address

DEPLOY = ROOT / "deploy"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of Debian's systemd"
)
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """Every line of it: systemd-analyze complains of words that it does not know. The program it
    starts must be there.
    """
    text = (DEPLOY / "vcache.service").read_text()
    program = str(Path(sys.executable).with_name("vcache"))
    here = text.replace("/opt/vcache/bin/vcache", program).replace("/etc/vcache.yaml", "x")
    for unit, well in ((here, True), (here.replace("PrivateTmp=", "PrivateTemp="), False)):
        (tmp_path / "vcache.service").write_text(unit)
        done = ran("systemd-analyze", "verify", "--man=no", tmp_path / "vcache.service")
        complaints = [line for line in done.stderr.splitlines() if "vcache.service" in line]
        assert (not complaints) == well, done.stderr
    assert re.search("^Restart=always$", text, re.M)
    # else it ends after five failures in a row
    assert re.search("^StartLimitIntervalSec=0$", text, re.M)


def test_the_images_are_made_of_what_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)).split()
    assert [name for name in copied if not (ROOT / name).exists()] == []
    folders = project["tool"]["setuptools"]["package-dir"].values()
    assert {Path(folder).parts[0] for folder in folders} | {"pyproject.toml"} <= {*copied}
    extras = project["project"]["optional-dependencies"].keys()
    assert set(re.findall(r"/src\[(\w+)\]", text)) <= extras
    built = set(re.findall(r"--target (\w+) -t vcache-\1 ", text))
    assert built == set(re.findall(r"AS (\w+)$", text, re.M)) - {"source"}


def test_every_dependency_has_an_upper_bound_and_setup_installs_what_lies_within() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"].values()
    texts = declared["build-system"]["requires"] + declared["project"]["dependencies"]
    texts += [text for extra in extras for text in extra]
    wanted = {one.name: one for one in map(Requirement, texts)}
    del wanted[declared["project"]["name"]]
    for one in wanted.values():
        assert any(part.operator == "<" for part in one.specifier), one
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    pins = re.findall(r"^CPU_(TORCH|TRITON)=(\S+)$", setup, re.M)
    within = [name for name, pin in pins if pin in wanted[name.lower()].specifier]
    assert within == ["TORCH", "TRITON"]


def of_kind(kind: str) -> dict[str, Any]:
    parts = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (found,) = [one for one in parts if one["kind"] == kind]
    assert isinstance(found, dict)
    return found


def test_the_server_is_restarted_if_it_does_not_answer_and_for_nothing_else(
    alone: Stage, tmp_path: Path
) -> None:
    """No metrics are served here: whoever keeps their port busy restarts no server."""
    (container,) = of_kind("DaemonSet")["spec"]["template"]["spec"]["containers"]
    probe = container["livenessProbe"]
    program, *arguments = probe["exec"]["command"]
    file = tmp_path / "vcache.yaml"
    command = [str(Path(sys.executable).with_name(program)), *arguments]

    here = os.environ | {"VCACHE_SOCKET": str(alone.path), "VCACHE_CONFIG": str(file)}

    def well(seconds: float = SECONDS) -> bool:
        file.write_text(f"client: {{control_seconds: {seconds}}}")
        return ran(*command, env=here).returncode == 0

    assert not well()
    server = alone.server()
    assert well()
    with server.stopped():
        assert not well(seconds=1.0)
    # or the answer "no" comes too late to be heard
    assert probe["timeoutSeconds"] > ClientConfig().control_seconds


def test_the_settings_are_ours() -> None:
    values = yaml.safe_load(of_kind("ConfigMap")["data"]["vcache.yaml"])
    server = config.from_dict(values).server
    (container,) = of_kind("DaemonSet")["spec"]["template"]["spec"]["containers"]
    host, port = split_address(server.metrics, "metrics")
    assert (host, port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    (pod,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    (given,) = [arg for arg in pod["args"] if arg.startswith("--kv-transfer-config=")]
    transfer = msgspec.json.decode(given.partition("=")[2])
    config.from_dict(transfer.pop("kv_connector_extra_config"))
    assert transfer == CONNECTOR | {"kv_role": "kv_both"}
