"""Configuration files are read strictly, and each mistake names its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcache_backend import config
from vcache_backend.errors import MAX_LINE_CHARS, ConfigError

SOCKET = "socket must be the absolute path of a file, 107 printable bytes at most, got "
MISTAKES = {
    # names
    "pool:\n  device: host\n  nonsense: 1": "line 3: Object contains unknown field `nonsense` - at "
    "`$.pool`; there are device, ",
    "pool: {}\nserver: {}\npool: {}": "line 3: not valid YAML: `pool` is there again, after line 1",
    "mooncake: {}": "line 1: Object contains unknown field `mooncake`; there are server, ",
    '"po\\nol": 1': "unknown field `po\\nol`; did you mean `pool`?",
    # values
    "server: {metrics: 9419}": "line 1: Expected `str`, got `int` - at `$.server.metrics`; quote it",
    "client: {request_seconds: 250 ms}": "line 1: Expected `float`, got `str` - at "
    "`$.client.request_seconds`; write a number alone, without a unit",
    "client: {request_seconds: .nan}": "line 1: Expected `float` > 0.0 - at "
    "`$.client.request_seconds`",
    "pool: {max_ctas: 4e6}": "line 1: Expected `int`, got `str` - at `$.pool.max_ctas`",
    "server: {allow_uids: [-1]}": "line 1: Expected `int` >= 0 - at `$.server.allow_uids[0]`",
    "connector: {store: answers}": "Invalid enum value 'answers' - at `$.connector.store`; "
    "expected all or prompt",
    "offload:\n  policy: on": "line 2: Expected `str`, got `bool` - at `$.offload.policy`; "
    "expected off or write_through",
    "offload:\n  mooncake:\n    devices: two\n    master: a": "line 4: master must be HOST:PORT",
    "# of mine\npool: {device: gpu0}": "line 2: device must be auto, host, ",
    f"# of mine\nserver: {{socket: /{'x' * 108}}}": "line 2: socket must be the absolute path ",
    "server: {socket: ~/v.sock}": f"line 1: {SOCKET}'~/v.sock'",
    "server: {metrics: '::1:9419'}": "line 1: metrics must be HOST:PORT",
    "server: {socket: v.sock}": f"line 1: {SOCKET}'v.sock'",
    "pool:\n  segment_bytes: 8": "line 2: 8 without a unit is 8 B: write the unit, such as 8GiB",
    f"pool: {{device: {100_000 * 'x'}}}": "line 1: device must be auto, host, ",
    "engine:\n  chunk_size: 9\npool:\n": "got `null` - at `$.pool`; remove the empty section",
    # what is no YAML of ours
    100_000 * "[": "not valid YAML: it is nested too deeply",
    100_000 * "{a: ": "not valid YAML: it is nested too deeply",
    "pool: {}\n---\npool: {}": "line 2: not valid YAML: expected a single document in the stream",
    "server:\n  1: 2": "line 2: not valid YAML: a key must be a name, got '1'",
    "pool: &a {max_ctas: *a}": "Expected `int`, got `object` - at `$.pool.max_ctas`",
    "pool: {max_ctas: " + 5000 * "9" + "}": "not valid YAML: Exceeds the limit (4300 digits)",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_names_the_file_and_the_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "vcache.yaml"
    path.write_text(text)
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
