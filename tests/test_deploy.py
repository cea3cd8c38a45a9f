"""`deploy/`: what can be said of it without systemd, containers or a cluster running here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from processes import ROOT

from vcache_backend import config
from vcache_backend.config import split_address

DEPLOY = ROOT / "deploy"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of Debian's systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """Every line of it: systemd-analyze complains of words that it does not know. The program it starts must be there."""
    text = (DEPLOY / "vcache.service").read_text()
    here = text.replace("/opt/vcache/bin/vcache", str(Path(sys.executable).with_name("vcache"))).replace("/etc/vcache.yaml", "x")
    for unit, well in ((here, True), (here.replace("PrivateTmp=", "PrivateTemp="), False)):
        (tmp_path / "vcache.service").write_text(unit)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "vcache.service")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        complaints = [line for line in ran.stderr.splitlines() if "vcache.service" in line]
        assert (not complaints) == well, ran.stderr
    assert re.search("^Restart=always$", text, re.M)
    assert re.search("^StartLimitIntervalSec=0$", text, re.M)  # else it ends after five failures in a row


def test_the_images_are_made_of_what_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for name in line.split()]
    assert copied
    assert not [name for name in copied if not (ROOT / name).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    used = {ROOT / folder for folder in project["tool"]["setuptools"]["package-dir"].values()}
    assert {folder.relative_to(ROOT).parts[0] for folder in used} | {project["project"]["readme"]} <= {*copied, "vcache_backend"}
    assert set(re.findall(r"/src\[(\w+)\]", text)) <= project["project"]["optional-dependencies"].keys()
    built = set(re.findall(r"--target (\w+) -t vcache-\1 ", text))
    assert built == set(re.findall(r"AS (\w+)$", text, re.M)) - {"source"}


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one["kind"] == kind]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kind", ["DaemonSet", "Deployment"])
def test_pods_are_whole(kind: str) -> None:
    """What a schema would say of their fields is not checked here."""
    spec = of_kind(kind)["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    ports = {port["name"] for port in container["ports"]}
    assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} <= ports
    assert container["image"] in re.findall(r"-t (vcache-\w+)", (DEPLOY / "Containerfile").read_text())
    assert "hostPID" not in pod
    assert "hostIPC" not in pod


def test_both_pods_look_at_one_socket_in_a_folder_that_the_server_makes() -> None:
    """In the folder that is mounted, which the server has not made and whose modes nobody here knows."""
    images = set(re.findall(r"VCACHE_SOCKET=(\S+)", (DEPLOY / "Containerfile").read_text()))
    (socket,) = map(Path, images)
    folders = set()
    for kind in ("DaemonSet", "Deployment"):
        pod = of_kind(kind)["spec"]["template"]["spec"]
        (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "socket"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "socket"]
        folders.add((mount["mountPath"], volume["hostPath"]["path"]))
    ((inside, _),) = folders
    assert socket.parent.parent == Path(inside)


def test_the_settings_are_ours() -> None:
    values = yaml.safe_load(of_kind("ConfigMap")["data"]["vcache.yaml"])
    server = config.from_dict(values).server
    (container,) = of_kind("DaemonSet")["spec"]["template"]["spec"]["containers"]
    host, port = split_address(server.metrics, "metrics")
    assert (host, port, server.log_format) == ("0.0.0.0", container["ports"][0]["containerPort"], "json")
    (pod,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    (given,) = [arg.partition("=")[2] for arg in pod["args"] if arg.startswith("--kv-transfer-config=")]
    transfer = msgspec.json.decode(given)
    config.from_dict(transfer.pop("kv_connector_extra_config"))
    assert transfer == {
        "kv_connector": "VCacheConnector",
        "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
        "kv_role": "kv_both",
    }
