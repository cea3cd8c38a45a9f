"""The wheel: what is in it, and that an installation of it has the commands and vLLM's plugin."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from processes import ROOT, ran

FOLDERS = {"vcache_backend": "vcache_backend", "integration": "vcache_backend/integration"}
FOLDERS |= {"configs": "vcache_backend/configs"}
BUILD = (
    "from setuptools import build_meta; print(build_meta.build_wheel(__import__('sys').argv[1]))"
)
PLUGIN = """
from importlib.metadata import entry_points
(found,) = entry_points(group="vllm.general_plugins", name="vcache")
register = found.load()
register()
print(register.__code__.co_filename)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the build backend, as `python -m build` does, from a copy of the checkout."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        skipped = shutil.ignore_patterns("integration", "__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=skipped if name != "integration" else None)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done = ran(sys.executable, "-c", BUILD, str(made), cwd=copy)
    assert done.returncode == 0, done.stderr
    return made / done.stdout.splitlines()[-1]


def test_the_wheel_is_small_and_has_every_module_and_file_of_settings(wheel: Path) -> None:
    assert wheel.stat().st_size <= 1_000_000
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (text,) = (file.read(name) for name in file.namelist() if name.endswith("/METADATA"))
    wanted = {
        str(Path(inside) / path.relative_to(ROOT / folder))
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".html", ".sh") or path.name == "py.typed"
    }
    assert names == wanted
    metadata = Metadata.from_email(text)
    checked = ran(sys.executable, "-m", "twine", "check", "--strict", str(wheel))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {"gpu", "lmcache", "mooncake"} <= {*(metadata.provides_extra or ())}


def test_an_installed_wheel_has_the_commands_and_the_plugin_for_vllm(
    wheel: Path, tmp_path: Path
) -> None:
    """In an environment of its own, which sees the packages of this one behind its own."""
    done = ran(sys.executable, "-m", "venv", "--without-pip", str(tmp_path))
    assert done.returncode == 0, done.stderr
    python, base = tmp_path / "bin" / "python", {"base": str(tmp_path), "platbase": str(tmp_path)}
    site = Path(sysconfig.get_path("purelib", "venv", base))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    done = ran(*pip, "install", "--no-deps", "--no-index", str(wheel))
    assert done.returncode == 0, done.stderr
    (site / "behind.pth").write_text(sysconfig.get_path("purelib"))
    done = ran(str(tmp_path / "bin" / "vcache"), "--help", cwd=tmp_path)
    assert (done.returncode, "vllm" in done.stdout) == (0, True), done.stderr
    done = ran(str(python), "-c", PLUGIN, cwd=tmp_path)
    assert (done.stdout.strip(), done.stderr) == (
        str(site / "vcache_backend" / "integration" / "plugin.py"),
        "",
    )
