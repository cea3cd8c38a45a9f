"""Our settings inside LMCache's: flat keys, strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vcache_backend.config import Config, from_dict
from vcache_backend.errors import ConfigError
from vcache_backend.integration.lmcache.settings import Settings, read


def test_others_keys_are_others_and_the_defaults_are_ours() -> None:
    extra = {
        "storage_plugin.vcache.module_path": "vcache_backend.integration.lmcache",
        "save_only_first_rank": False,
        "vcacheX": 1,
    }
    assert read(extra, 256) == Settings(config=Config())


def test_single_values_are_set_at_any_depth() -> None:
    extra = {
        "vcache.server.socket": "/tmp/x.sock",
        "vcache.pool.segment_bytes": "8 GiB",
        "vcache.offload.mooncake.master": "node:1",
        "vcache.offload.mooncake.rpc_seconds": 0.2,
        "vcache.block_size": 16,
        "vcache.model": "llama@mine",
    }
    expected = from_dict(
        {
            "server": {"socket": "/tmp/x.sock"},
            "offload": {"mooncake": {"master": "node:1", "rpc_seconds": 0.2}},
            "pool": {"segment_bytes": 8 << 30},
        }
    )
    assert read(extra, 256) == Settings(config=expected, block_size=16, model="llama@mine")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"vcache.pool.segment_byte": 1},
            r"unknown field `segment_byte` - at `\$.pool`; did you mean `segment_bytes`\?",
        ),
        ({"vcache.connector.share": "in_place"}, r"vcache.connector.share is no setting"),
        (
            {"vcache.pool.segment_bytes": 1, "vcache.pool.segment_bytes.x": 1},
            r"vcache.pool.segment_bytes.x is no setting",
        ),
        ({"vcache": {"server": {"socket": "x"}}}, r"write flat keys"),
    ],
)
def test_a_mistake_is_named_as_it_is_written(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(extra, 256)


def test_what_our_connector_in_vllm_is_told_changes_nothing(tmp_path: Path) -> None:
    """One file for all of a node."""
    path = tmp_path / "vcache.yaml"
    path.write_text("connector: {share: in_place}")
    assert read({"vcache.config": str(path)}, 256).config.pool.lent == 8 << 30


def test_the_chunk_size_is_that_of_lmcache() -> None:
    assert read({}, 128).config.engine.chunk_size == 128
    assert read({"vcache.engine.chunk_size": 128}, 128).config.engine.chunk_size == 128


def test_another_chunk_size_of_ours_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"engine.chunk_size is 256 but LMCache's chunk_size is 128"
    ):
        read({"vcache.engine.chunk_size": 256}, 128)
    path = tmp_path / "vcache.yaml"
    path.write_text("engine: {chunk_size: 512}\n")
    with pytest.raises(
        ConfigError, match=r"vcache.yaml: engine.chunk_size is 512 but LMCache's chunk_size is 128"
    ):
        read({"vcache.config": str(path)}, 128)
