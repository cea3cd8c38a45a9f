"""`deploy/`: what can be said of it without systemd, containers or a cluster running here."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import msgspec
import pytest
import yaml
from packaging.requirements import Requirement
from processes import IN_A_CONTAINER, PATIENT, ROOT, Child, Stage, containers, ran
from vllm_models import CONNECTOR

from vcache_backend import config
from vcache_backend.config import ClientConfig, split_address
from vcache_backend.protocol.client import Client

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


CLEAN_ROOT = r"""
mount --make-rprivate / && mount -t tmpfs none "$1" && cd "$1" || exit 9
bind() { mkdir -p ".$2" && mount --rbind "$1" ".$2" && mount -o remount,bind,ro ".$2"; }
for folder in /usr "$2"; do bind "$folder" "$folder" || exit 9; done
for name in bin lib lib64; do if [ -e "/$name" ]; then ln -s "usr/$name" "$name" || exit 9; fi; done
mkdir -p proc dev run/vcache && touch dev/null && mount --bind /dev/null dev/null && mount -t proc proc proc || exit 9
bind "$3" /packages && mount --bind "$4" run/vcache && mount -o remount,ro . || exit 9
exec chroot --userspec=65534:65534 . /usr/bin/env -i VCACHE_SOCKET=/run/vcache/node/vcache.sock PYTHONPATH=/packages \
    "$5" -S -m vcache_backend serve
"""
"""In a container: ROOT PREFIX PACKAGES SHARED PYTHON."""


def bring(found: Distribution, into: Path, done: set[str]) -> None:
    """Copy what pip would install for this one without extras."""
    for wanted in map(Requirement, found.requires or []):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if (one := distribution(wanted.name)).name in done:
            continue
        done.add(one.name)
        for file in one.files or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                (into / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), into / file)
        bring(one, into, done)


@pytest.mark.skipif(
    os.getuid() != 0 or bool(containers()),
    reason=f"needs root and namespaces of its own: {containers()}",
)
def test_the_server_s_image_needs_only_its_wheel_a_read_only_root_and_no_rights() -> None:
    """No container program runs here, so it is made of a checkout as deploy/Containerfile does it,
    in a root with nothing else but the C library and Python. Who is outside shares the socket's
    folder alone."""
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Containerfile").read_text(), re.M)
    with TemporaryDirectory() as open_to_all:
        folder = Path(open_to_all)
        for path in (folder, *(folder / name for name in ("src", "packages", "root", "shared"))):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        compiled, packages = shutil.ignore_patterns("__pycache__"), folder / "packages"
        for name in (name for line in copied for name in line.split()):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / "src" / name, ignore=compiled)
            else:
                shutil.copy(ROOT / name, folder / "src" / name)
        wheel = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
        ran(sys.executable, "-m", "pip", "wheel", *wheel, folder / "src", check=True)
        with ZipFile(next(folder.glob("*.whl"))) as made:
            made.extractall(packages)
        bring(next(iter(distributions(path=[str(packages)]))), packages, set())
        assert not any((packages / name).exists() for name in ("torch", "numpy"))
        # What `vcache config init` writes.
        assert (packages / "vcache_backend" / "configs" / "vcache.yaml").exists()
        os.chown(folder / "shared", 65534, 65534)
        its_user = msgspec.structs.replace(PATIENT, server_uid=65534)
        python, prefix = Path(sys.executable).resolve(), sys.base_prefix
        places = [folder / "root", prefix, packages, folder / "shared", python]
        command = [*IN_A_CONTAINER, "--mount", "sh", "-c", CLEAN_ROOT, "sh", *map(str, places)]
        with Child(command) as server:
            server.expect("serving /run/vcache/node/vcache.sock")
            path = folder / "shared" / "node" / "vcache.sock"
            with Client(path, its_user, reconnect=False) as client:
                assert client.stats().segments == []
            (made,) = (folder / "shared").iterdir()
            assert (made.name, made.stat().st_uid) == ("node", 65534)


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

    file.write_text("client: {control_seconds: 1}")
    here = os.environ | {"VCACHE_SOCKET": str(alone.path), "VCACHE_CONFIG": str(file)}

    def well() -> bool:
        return ran(*command, env=here).returncode == 0

    assert not well()
    server = alone.server()
    assert well()
    with server.stopped():
        assert not well()
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
