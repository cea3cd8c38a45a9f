"""Our settings inside LMCache's: sections under one key, strict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vcache_backend.config import Config, from_dict
from vcache_backend.errors import ConfigError
from vcache_backend.integration.lmcache.boundary import settings_of


def read(extra: dict[Any, Any], chunk_size: int) -> Config:
    return settings_of(SimpleNamespace(extra_config=extra, chunk_size=chunk_size))


def test_sections_are_read_as_those_of_our_connector(tmp_path: Path) -> None:
    path = tmp_path / "vcache.yaml"
    path.write_text("connector: {min_hit_tokens: 512, model: other}")
    sections = {"pool": {"segment_bytes": "8 GiB"}, "connector": {"model": "llama@mine"}}
    sections |= {"offload": {"mooncake": {"master": "node:1", "rpc_seconds": 0.2}}}
    found = read({"vcache": {"config": str(path), **sections}}, 256)
    expected = {**sections, "connector": {"model": "llama@mine", "min_hit_tokens": 512}}
    assert found == from_dict(expected)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"vcache": {"pool": {"segment_byte": 1}}},
            r"extra_config: .*unknown field `segment_byte` - at `\$.pool`; "
            r"did you mean `segment_bytes`\?",
        ),
        (
            {"vcache": {"connector": {"share": "in_place"}}},
            r"share is in_place: LMCache has a pool",
        ),
        ({"vcache.pool.segment_bytes": 1}, r"vcache.pool.segment_bytes: write `vcache:`"),
        ({1: 2, "vcache": None}, r"vcache is None: write `vcache:`"),
    ],
)
def test_a_mistake_is_named_as_it_is_written(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(extra, 256)


def test_the_chunk_size_is_that_of_lmcache(tmp_path: Path) -> None:
    assert read({"vcacheX": 1}, 128) == from_dict({"engine": {"chunk_size": 128}})
    path = tmp_path / "vcache.yaml"
    path.write_text("engine: {chunk_size: 512}\n")
    assert read({"vcache": {"config": str(path), "engine": {"chunk_size": 64}}}, 64)
    different = r"engine.chunk_size is {} but LMCache's chunk_size is 128, which is used"
    with pytest.raises(ConfigError, match=different.format(512)):
        read({"vcache": {"config": str(path)}}, 128)
    with pytest.raises(ConfigError, match=f"LMCache's extra_config: {different.format(256)}"):
        read({"vcache": {"engine": {"chunk_size": 256}}}, 128)
