"""The connector's settings, a request's wishes and the names of chunks: what is understood, and
what is refused. No vLLM is needed.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.config import over_file
from vcache_backend.errors import MAX_LINE_CHARS, ConfigError
from vcache_backend.integration import plugin
from vcache_backend.integration.vllm import requests
from vcache_backend.protocol.messages import KEY_BYTES, RANK_BYTES, chunk_keys
from vcache_backend.transfer.keys import HASH_BYTES, block_hashes
from vcache_backend.transfer.layout import Namespace

# ---- settings


def yaml(folder: Path, text: str) -> str:
    file = folder / "vcache.yaml"
    file.write_text(text)
    return str(file)


def test_sections_in_place_go_over_the_files_key_by_key(tmp_path: Path) -> None:
    text = "server: {socket: /of/the/file}\nconnector: {min_hit_tokens: 512, model: theirs}\n"
    file = yaml(tmp_path, text + "pool: {segment_bytes: 4 GiB}")
    given = {"connector": {"model": "ours"}, "engine": {"chunk_size": 128}}
    found = over_file({"config": file, **given})
    assert found.server.path == Path("/of/the/file")
    assert (found.connector.min_hit_tokens, found.connector.model) == (512, "ours")
    assert (found.engine.chunk_size, found.pool.segment_bytes) == (128, 4 << 30)


EXTRA = "kv_connector_extra_config: "
MIN_HIT = f"{EXTRA}Object contains unknown field `min_hit` - at `$.connector`"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"connector": {"min_hit": 1}}, MIN_HIT),
        ({"connector": 3}, f"{EXTRA}connector: Expected a section of settings, got 3"),
        ({"config": False}, "config: Expected the path of a YAML file, got False"),
        (
            {"server": {"socket": "run/vcache.sock"}},
            "socket must be the absolute path of a file, 107 printable bytes at most, got "
            "'run/vcache.sock'",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_exist_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        over_file(given)
    assert said in str(raised.value)


# ---- read by our plugin, before vLLM starts anything

OURS = {"kv_connector": "VCacheConnector"}
LONG = OURS | {"kv_connector_module_path": plugin.CONNECTOR}


def connector(name: str, extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra}


def test_the_plugin_reads_the_settings_of_our_connectors_and_leaves_the_rest_to_vllm() -> None:
    """Given as a mapping, or as an object."""
    theirs = connector("ExampleConnector", {"pool": {"device": "gpu9"}})
    wrong = connector("VCacheConnector", {"connector": {"min_hit": 1}}) | OURS
    several = connector("MultiConnector", {"connectors": [theirs, wrong]})
    odd = connector("MultiConnector", {"connectors": 3}), connector("VCacheConnector", 3) | OURS
    for told in (OURS, LONG, theirs, several, *odd):
        said = f"connectors[1]: {MIN_HIT}; did you mean" if told is several else ""
        for found in (plugin.mistake(told), plugin.mistake(SimpleNamespace(**told))):
            assert (found.startswith(said), bool(found)) == (True, bool(said)), told
    assert plugin.mistake(None) == ""


THEIRS = {"kv_connector": "LMCacheMPConnector"}


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ([OURS, THEIRS], ""),
        ([LONG, THEIRS, THEIRS], ""),
        (None, "must name VCacheConnector and another connector: not set"),
        ([OURS], "must name VCacheConnector and another connector: `['VCacheConnector']`"),
        ([THEIRS, OURS], "must begin with VCacheConnector, not `LMCacheMPConnector`"),
        ([OURS, THEIRS, OURS], "has `VCacheConnector`, too: once is enough"),
        ([connector("VCacheConnector", {"connector": {"min_hit": 1}}), THEIRS], MIN_HIT),
    ],
)
def test_what_stands_beside_our_connector_is_checked(inside: Any, said: str) -> None:
    told = connector("VCacheMultiConnector", {"connectors": inside} if inside else {})
    found = plugin.mistake(told)
    assert (said in found, bool(found)) == (True, bool(said))


# ---- wishes


def test_wishes_are_read() -> None:
    for nothing in (None, {}, {"vcache": None}, {"do_remote_decode": True}):
        assert requests.read_params(nothing) == requests.RequestParams()
    given: dict[str, Any] = {"announced": True, "wait_seconds": 5, "store": False}
    found = requests.read_params({"vcache": given, "other": 1})
    assert found == requests.RequestParams(**given, load=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"anounced": True}, "Object contains unknown field `anounced`"),
        ({"wait_seconds": 601}, "Expected `float` <= 600.0 - at `$.wait_seconds`"),
        ({"wait_seconds": math.nan}, "Expected `float` >= 0.0 - at `$.wait_seconds`"),
        ({"wait_seconds": 10**400}, "Number out of range - at `$.wait_seconds`"),
        ([[[]]] * 1000, "Expected `object`, got `array`"),
        ({"a\nERROR forged": 1}, "unknown field `a\\nERROR forged`"),
        ({"x" * 100_000: 1}, "unknown field `xxxx"),
        ({"\ud800": 1}, "can't encode character"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_wishes_that_are_not_understood_are_named_in_one_short_line(given: Any, said: str) -> None:
    """Clients write them."""
    with pytest.raises(ValueError, match="^kv_transfer_params: vcache: ") as raised:
        requests.read_params({"vcache": given})
    line = str(raised.value)
    assert said in line
    assert line.isprintable()
    assert len(line) < MAX_LINE_CHARS + 100


@pytest.mark.parametrize("given", ["vcache", [1], 5, True], ids=str)
def test_parameters_that_are_no_object_are_named(given: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected an object, got {type(given).__name__}"):
        requests.read_params(given)


# ---- keys

NAMESPACE = Namespace(bytes(range(32)))
hashes = st.lists(st.binary(min_size=32, max_size=32), max_size=40, unique=True)
in_turn = pytest.mark.parametrize("each", [1, 2, 8], ids="{} blocks a chunk".format)


@in_turn
@given(blocks=hashes)
def test_a_chunk_is_named_after_its_last_block(each: int, blocks: list[bytes]) -> None:
    keys = chunk_keys(NAMESPACE.prefix, block_hashes(blocks), each)
    assert len(keys) == len(blocks) // each
    for number, key in enumerate(keys):
        last = blocks[(number + 1) * each - 1]
        assert key == NAMESPACE.prefix + last[:HASH_BYTES] + bytes(RANK_BYTES)
        assert len(key) == KEY_BYTES
