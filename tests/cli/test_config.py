"""The configuration: strict, with units, and the files of `configs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vcache_backend import config
from vcache_backend.config import ByteSize, Config
from vcache_backend.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if "lmcache" not in path.name)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "vcache.yaml"
        path.write_text(text)
        return path

    return write


def test_the_commented_file_holds_every_key_with_its_default() -> None:
    path = FOLDER / "vcache.yaml"
    assert config.load(path) == config.load()
    written = msgspec.yaml.decode(path.read_bytes())
    assert _keys(written) == _keys(msgspec.to_builtins(Config(), enc_hook=str))


def _keys(values: dict[str, Any]) -> list[Any]:
    return [(key, _keys(one)) if isinstance(one, dict) else key for key, one in values.items()]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8 GiB", 8 << 30), ("1.5 kib", 1536), ("8Gi", 8 << 30), ("0", 0), ("1048576", 1 << 20)],
)
def test_a_size_is_a_number_with_or_without_a_unit(write: Any, text: str, nbytes: int) -> None:
    assert config.load(write(f"pool: {{segment_bytes: {text}}}")).pool.segment_bytes == nbytes
    assert ByteSize.parse(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1 GiB", "8 GiB of memory"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Expected bytes"):
        ByteSize.parse(text)


def test_the_environment_wins_over_the_file(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("server: {socket: /file.sock, reservation_seconds: 3}")
    assert config.load(path).server.path == Path("/file.sock")
    monkeypatch.setenv("VCACHE_SOCKET", "/environment.sock")
    assert config.load(path).server.path == Path("/environment.sock")
    assert config.load(path).server.reservation_seconds == 3
    assert config.load().server.path == Path("/environment.sock")


def test_the_environment_may_name_the_file(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCACHE_CONFIG", str(write("engine: {chunk_size: 64}")))
    assert config.load().engine.chunk_size == 64
    assert config.load(FOLDER / "vcache.yaml").engine.chunk_size == 256
    monkeypatch.setenv("VCACHE_CONFIG", "")
    assert config.load() == config.from_dict({})
    monkeypatch.setenv("VCACHE_CONFIG", "/nowhere")
    with pytest.raises(ConfigError, match="^VCACHE_CONFIG: /nowhere: No such file"):
        config.load()


@pytest.mark.parametrize(
    ("text", "socket", "starts"),
    [
        ("{}", "", True),
        ("server: {socket: /run/vcache.sock}", "", False),
        ("{}", "/run/vcache.sock", False),
        ("connector: {start_server: true}", "/run/vcache.sock", True),
        ("connector: {start_server: false}", "", False),
    ],
)
def test_an_instance_starts_a_server_only_at_the_default_socket_unless_it_is_told_to(
    write: Any, monkeypatch: pytest.MonkeyPatch, text: str, socket: str, starts: bool
) -> None:
    monkeypatch.setenv("VCACHE_SOCKET", socket)
    assert config.load(write(text)).connector.start_server is starts


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_what_is_dumped_loads_as_the_same_configuration(write: Any, path: Path) -> None:
    shown = config.dump(config.load(path))
    assert config.dump(config.load(write(msgspec.yaml.encode(shown).decode()))) == shown
    assert " " in shown["offload"]["staging_bytes"], "sizes as people write them"
