"""The configuration: strict, with units, and the files of `configs/`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vcache_backend import config
from vcache_backend.config import ByteSize, Config
from vcache_backend.errors import ConfigError

CONFIGS = sorted(
    path
    for path in (Path(__file__).parent.parent / "configs").glob("*.yaml")
    if "lmcache" not in path.name
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "vcache.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_of_configs_loads(path: Path) -> None:
    assert isinstance(config.load(path), Config)


def test_the_commented_file_holds_every_key_with_its_default() -> None:
    path = CONFIGS[0].parent / "vcache.yaml"
    assert config.load(path) == Config()
    written = msgspec.yaml.decode(path.read_bytes())
    assert _keys(written) == _keys(msgspec.to_builtins(Config(), enc_hook=str))


def _keys(values: dict[str, Any]) -> list[Any]:
    return [
        (key, _keys(value)) if isinstance(value, dict) else key for key, value in values.items()
    ]


def test_an_empty_file_means_the_defaults(write: Any) -> None:
    assert config.load(write("# nothing\n")) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {evction: {}}", "Object contains unknown field `evction` - at `$.server`"),
        ("client: {request_seconds: 0}", "at `$.client.request_seconds`"),
        (
            "pool: {segment_bytes: 8 GiBs}",
            "'8 GiB' or '512MiB', got '8 GiBs' - at `$.pool.segment_bytes`",
        ),
        ("pool: {segment_bytes: true}", "got True - at `$.pool.segment_bytes`"),
        ("connector: {start_server: 1}", "at `$.connector.start_server`"),
        ("server: {spin_seconds: -1}", "at `$.server.spin_seconds`"),
        ("connector: {min_hit_tokens: 0}", "at `$.connector.min_hit_tokens`"),
        (
            "connector: {store: answers}",
            "Invalid enum value 'answers' - at `$.connector.store`; expected all or prompt",
        ),
        (
            "pool:\n  device: host\n  nonsense: 1",
            "line 3: Object contains unknown field `nonsense` - at `$.pool`; there are device, ",
        ),
        (
            "pool:\n  device: host\n  device: cuda",
            "line 3: `pool.device` is there again, after line 2",
        ),
        ("pool: {}\nserver: {}\npool: {}", "line 3: `pool` is there again, after line 1"),
        (
            "pool:\n  segment_bytes: -5",
            "line 2: Expected at least 0 bytes - at `$.pool.segment_bytes`",
        ),
        (
            "client: {connect_seconds: .inf}",
            "Expected `float` <= 1000000.0 - at `$.client.connect_seconds`",
        ),
        ("server: {spin_seconds: .inf}", "at `$.server.spin_seconds`"),
        ("server: {max_clients: 99999999999999999999}", "at `$.server.max_clients`"),
        ("server: {allow_uids: [4294967295]}", "at `$.server.allow_uids[0]`"),
        ("engine: {chunk_size: 100000000000}", "at `$.engine.chunk_size`"),
        (
            "engine: {kv_axes: block head}",
            (
                "kv_axes must be different words of part, block, token, head, dim, with block and "
                "token"
            ),
        ),
        (
            "client: {request_seconds: .nan}",
            "Expected `float` > 0.0 - at `$.client.request_seconds`, which is nan",
        ),
        (
            "client: {request_seconds: 1e-3}",
            (
                "got `str` - at `$.client.request_seconds`, which is '1e-3'; write digits, 0.001 "
                "for 1e-3"
            ),
        ),
        (
            "connector: {start_server: 'true'}",
            "got `str` - at `$.connector.start_server`, which is 'true'; write true or false",
        ),
        (
            "server: {max_chunks: 4e6}",
            "got `str` - at `$.server.max_chunks`, which is '4e6'; write digits, without quotes",
        ),
        (
            "server: {allow_uids: [1, ann]}",
            "Expected `int`, got `str` - at `$.server.allow_uids[1]`, which is 'ann'; write digits",
        ),
        (
            "request_seconds: 1",
            (
                "line 1: Object contains unknown field `request_seconds`; did you mean "
                "`client.request_seconds`?"
            ),
        ),
        ("mooncake: {}", "unknown field `mooncake`; did you mean `offload.mooncake`?"),
        (
            "server: {server_uid: 0}",
            "unknown field `server_uid` - at `$.server`; did you mean `client.server_uid`?",
        ),
        ("client: " + 3000 * "{a: " + "1" + 3000 * "}", "the sections are nested too deeply"),
        ("offload: {staging_bytes: 0}", "staging_bytes must be more than 0 - at `$.offload`"),
        (
            "server: {metrics: '300.1.1.1:9419'}",
            "metrics must be HOST:PORT, and 300.1.1.1 is no host, got '300.1.1.1:9419'",
        ),
        (
            "server: {metrics: '[1::2::3]:9419'}",
            "metrics must be HOST:PORT, and 1::2::3 is no host",
        ),
        (
            "offload: {mooncake: {master: 'node-1:0'}}",
            "master must be HOST:PORT, got 'node-1:0' - at `$.offload.mooncake`",
        ),
        (
            "offload:\n  policy: on",
            (
                "line 2: Expected `str`, got `bool` - at `$.offload.policy`, which is True; "
                "expected off or write_through"
            ),
        ),
        (
            "server:\n  max_clients: 9\n  1: 2",
            "line 3: a key is a name, and this is none to YAML: '1'",
        ),
        ("server:\n  socket: /tmp/\0", "line 2: not YAML: control characters are not allowed"),
        (
            'server: {socket: "/tmp/a\\0b/c"}',
            "socket must be a path of printable characters in UTF-8, got '/tmp/a\\x00b/c'",
        ),
        (
            "server: {socket: /run/}",
            "socket must be the path of a file, got '/run/' - at `$.server`",
        ),
        ("server: {socket: /}", "socket must be the path of a file, got '/' - at `$.server`"),
        ("server: {metrics: ':65536'}", "a port is 65535 at most, got ':65536' - at `$.server`"),
        ("&a {pool: *a}", "at `$.pool"),
        ("offload: {policy: always}", "Invalid enum value 'always' - at `$.offload.policy`"),
        ("offload: {staging_bytes: much}", "got 'much' - at `$.offload.staging_bytes`"),
        (
            "offload: {mooncake: {master: 'node-1:rpc'}}",
            "master must be HOST:PORT, got 'node-1:rpc' - at `$.offload.mooncake`",
        ),
        (
            "offload: {mooncake: {devices: mlx5_0}}",
            "devices ('mlx5_0') are for protocol: rdma - at `$.offload.mooncake`",
        ),
        ("cache: {}", "Object contains unknown field `cache`"),
        (
            "[1, 2]",
            "Expected sections (server, client, pool, engine, connector, offload), got list",
        ),
        (
            "server:\n  max_clients: 9\npool:\n",
            "line 3: Expected `object`, got `null` - at `$.pool`; nothing stands under it",
        ),
        ("server: [", "line 1: not YAML: "),
        (
            "server: {socket: 2024-13-45}",
            "not YAML: month must be in 1..12; put it in quotes if it is text",
        ),
        ("server: {max_chunks: " + 5000 * "9" + "}", "not YAML: Exceeds the limit (4300 digits)"),
        ("server: {socket: !!bool maybe}", "not YAML: 'maybe'; put it"),
        ("server: {metrics: !!timestamp now}", "not YAML: 'NoneType' object has no"),
        ("pool:\n\tdevice: host", "line 2: not YAML: "),
        (
            "server:\n  max_clients: 9\n  metrics: '9419'",
            "line 3: metrics must be HOST:PORT, got '9419'; write \":9419\"",
        ),
        (
            "server: {metrics: 9419}",
            'which is 9419; write ":9419" for this machine alone, or "HOST:PORT"',
        ),
        (
            "offload:\n  mooncake:\n    tenant: two\n    master: node-1",
            "line 4: master must be HOST:PORT",
        ),
    ],
)
def test_a_mistake_is_an_error_that_names_the_file_and_the_place(
    write: Any, text: str, message: str
) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: No such file or directory$"):
        config.load("nowhere.yaml")


def test_what_never_ends_is_no_configuration() -> None:
    with pytest.raises(
        ConfigError, match=r"^/dev/zero: more than 1,048,576 B, which is no configuration$"
    ):
        config.load("/dev/zero")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8 GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5 kib", 1536),
        ("4GB", 4 * 10**9),
        ("2 TiB", 2 << 40),
        ("4096", 4096),
        ("8Gi", 8 << 30),
        ("8G", 8 * 10**9),
        ("8 ki", 8192),
    ],
)
def test_a_size_is_a_number_with_or_without_a_unit(write: Any, text: str, nbytes: int) -> None:
    assert config.load(write(f"pool: {{segment_bytes: {text}}}")).pool.segment_bytes == nbytes
    assert ByteSize.parse(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "1e9", "8 GiB of memory", "٤x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Expected bytes"):
        ByteSize.parse(text)


def test_the_socket_of_the_environment_wins_over_the_file(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("server: {socket: /file.sock, lease_seconds: 3}")
    assert config.load(path).server.path == Path("/file.sock")
    monkeypatch.setenv("VCACHE_SOCKET", "/environment.sock")
    assert config.load(path).server.path == Path("/environment.sock")
    assert config.load(path).server.lease_seconds == 3
    assert config.load().server.path == Path("/environment.sock")


def test_a_socket_of_the_environment_that_is_no_utf_8_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VCACHE_SOCKET", os.fsdecode(b"/tmp/\xff.sock"))
    with pytest.raises(
        ConfigError,
        match=r"^VCACHE_SOCKET: socket must be a path of printable characters in UTF-8, got '/tmp/.udcff",
    ):
        config.load()


def test_the_environment_names_the_file_when_the_caller_does_not(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VCACHE_CONFIG", str(write("engine: {chunk_size: 64}")))
    assert config.load().engine.chunk_size == 64
    assert config.load(CONFIGS[0].parent / "vcache.yaml").engine.chunk_size == 256
    monkeypatch.setenv("VCACHE_CONFIG", "")
    assert config.load() == Config()


def test_the_default_socket_lies_in_a_folder_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Config().server.path == Path("/run/user/7/vcache/vcache.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert Config().server.path.parent.name.startswith("vcache-")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_what_is_dumped_loads_as_the_same_configuration(write: Any, path: Path) -> None:
    shown = config.dump(config.load(path))
    assert config.dump(config.load(write(msgspec.yaml.encode(shown).decode()))) == shown
    assert " " in shown["offload"]["staging_bytes"], "sizes as people write them"


def test_rdma_has_devices(write: Any) -> None:
    read = config.load(
        write(
            "offload: {policy: write_through, mooncake: {master: '[fd00::1]:50051', protocol: "
            "rdma, devices: mlx5_0}}"
        )
    )
    assert (read.offload.mooncake.devices, read.offload.mooncake.master) == (
        "mlx5_0",
        "[fd00::1]:50051",
    )
