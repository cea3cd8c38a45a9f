"""The configuration: strict, with units, and the files of `configs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from vcache_backend import config
from vcache_backend.config import ByteSize, Config
from vcache_backend.errors import MAX_LINE_CHARS, ConfigError

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
    assert config.load(path) == Config()
    written = msgspec.yaml.decode(path.read_bytes())
    assert _keys(written) == _keys(msgspec.to_builtins(Config(), enc_hook=str))


def _keys(values: dict[str, Any]) -> list[Any]:
    return [(key, _keys(one)) if isinstance(one, dict) else key for key, one in values.items()]


MISTAKES = {
    # names
    "pool:\n  device: host\n  nonsense: 1": "line 3: Object contains unknown field `nonsense` - at "
    "`$.pool`; there are device, ",
    "pool: {}\nserver: {}\npool: {}": "line 3: not valid YAML: `pool` is there again, after line 1",
    "mooncake: {}": "line 1: Object contains unknown field `mooncake`; there are server, ",
    '"po\\nol": 1': "unknown field `po\\nol`; did you mean `pool`?",
    # values
    "client: {request_seconds: .nan}": "line 1: Expected `float` > 0.0 - at "
    "`$.client.request_seconds`",
    "server: {max_chunks: 4e6}": "line 1: Expected `int`, got `str` - at `$.server.max_chunks`",
    "server: {allow_uids: [-1]}": "line 1: Expected `int` >= 0 - at `$.server.allow_uids[0]`",
    "connector: {store: answers}": "Invalid enum value 'answers' - at `$.connector.store`; "
    "expected all or prompt",
    "offload:\n  policy: on": "line 2: Expected `str`, got `bool` - at `$.offload.policy`; "
    "expected off or write_through",
    "offload:\n  mooncake:\n    devices: two\n    master: a": "line 4: master must be HOST:PORT",
    "# of mine\npool: {device: gpu0}": "line 2: device must be auto, host, ",
    f"# of mine\nserver: {{socket: /{'x' * 108}}}": "line 2: socket must be a path of at most 107 ",
    "server: {socket: ~/v.sock}": "line 1: socket must be a path without ~, got '~/v.sock'",
    "server: {socket: v.sock}": "line 1: socket must be an absolute path, got 'v.sock'",
    "pool:\n  segment_bytes: 8": "line 2: 8 without a unit is 8 B: write the unit, such as 8GiB",
    f"pool: {{device: {100_000 * 'x'}}}": "line 1: device must be auto, host, ",
    "server:\n  max_clients: 9\npool:\n": "line 3: Expected `object`, got `null` - at `$.pool`",
    # what is no YAML of ours
    100_000 * "[": "line 1: not valid YAML: the sections are nested too deeply",
    "pool: {}\n---\npool: {}": "line 2: not valid YAML: expected a single document in the stream",
    "server:\n  1: 2": "line 2: not valid YAML: a key must be a name, got '1'",
    "server: &a {max_clients: 9}\nclient: *a": "line 2: not valid YAML: *a is an alias: write the ",
    "server: {max_chunks: " + 5000 * "9" + "}": "not valid YAML: Exceeds the limit (4300 digits)",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_names_the_file_and_the_place(write: Any, text: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert MISTAKES[text] in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < MAX_LINE_CHARS + 200


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere", "No such file or directory"),
        ("/dev/zero", "more than 1 MiB, too large for a configuration"),
        ("nul\0", "embedded null byte"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{path}: {why}$"):
        config.load(path)


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
    path = write("server: {socket: /file.sock, lease_seconds: 3}")
    assert config.load(path).server.path == Path("/file.sock")
    monkeypatch.setenv("VCACHE_SOCKET", "/environment.sock")
    assert config.load(path).server.path == Path("/environment.sock")
    assert config.load(path).server.lease_seconds == 3
    assert config.load().server.path == Path("/environment.sock")


def test_the_environment_may_name_the_file(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCACHE_CONFIG", str(write("engine: {chunk_size: 64}")))
    assert config.load().engine.chunk_size == 64
    assert config.load(FOLDER / "vcache.yaml").engine.chunk_size == 256
    monkeypatch.setenv("VCACHE_CONFIG", "")
    assert config.load() == Config()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_what_is_dumped_loads_as_the_same_configuration(write: Any, path: Path) -> None:
    shown = config.dump(config.load(path))
    assert config.dump(config.load(write(msgspec.yaml.encode(shown).decode()))) == shown
    assert " " in shown["offload"]["staging_bytes"], "sizes as people write them"
