"""LoRA adapters are known by their files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vcache_backend.integration.vllm import adapters
from vcache_backend.protocol.messages import ChunkKey, chunk_keys
from vcache_backend.transfer.keys import adapter_digest, block_hashes
from vcache_backend.transfer.layout import Namespace

NAMESPACE = Namespace(bytes(range(32)))


def test_adapters_of_one_name_and_two_paths_or_contents_share_nothing() -> None:
    hashes = [bytes([i]) * 32 for i in range(8)]

    def made(*computed_with: bytes) -> list[ChunkKey]:
        return chunk_keys(NAMESPACE.prefix, block_hashes(hashes, *computed_with), 2)

    def keys(path: str, content: str) -> list[ChunkKey]:
        adapter = SimpleNamespace(lora_name="poet", lora_path=path)
        return made(adapter_digest(adapter, content))

    kept = [made(), keys("/one", "a"), keys("/two", "a"), keys("/one", "b")]
    assert [len(one) for one in kept] == [4, 4, 4, 4]
    assert len({key for one in kept for key in one}) == 16
    assert kept[1] == keys("/one", "a")


def poet(folder: Path, id_: int = 1, name: str = "poet", inplace: bool = False) -> Any:
    """What a request brings along of an adapter."""
    given = {"lora_name": name, "lora_path": str(folder), "lora_int_id": id_}
    return SimpleNamespace(**given, load_inplace=inplace)


def test_a_retrained_adapter_is_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    serving, weights = adapters.Adapters(), tmp_path / "adapter_model.safetensors"
    weights.write_text("ode")
    old, others = serving.content(poet(tmp_path)), adapters.Adapters().content(poet(tmp_path))
    assert old == others == serving.content(poet(tmp_path)) != ""
    weights.write_text("elegy")
    new = adapters.Adapters().content(poet(tmp_path))
    assert new not in ("", old)
    again = [serving.content(poet(tmp_path)) for _ in range(2)]
    assert again == ["", ""], "it may compute with either"
    assert len(caplog.records) == 1
    second = serving.content(poet(tmp_path, 2))
    assert second == "", "vLLM's own prefix cache does not tell them apart"


def test_an_adapter_loaded_in_place_of_another_takes_its_name(tmp_path: Path) -> None:
    """Requests of the first one may still run. What vLLM makes of adapters that share a name or a
    number, test_integrations shows.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(folder.name)
    serving = adapters.Adapters()
    assert serving.content(poet(one, inplace=True))
    assert serving.content(poet(two, name="writer", inplace=True))
    assert serving.content(poet(one)) == ""


def test_an_adapter_in_use_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM still has its earlier weights."""
    monkeypatch.setattr(adapters, "MOST", 4)
    serving, weights = adapters.Adapters(), tmp_path / "adapter_model.safetensors"
    weights.write_text("ode")
    for number in range(2, 6):
        assert serving.content(poet(tmp_path))
        assert serving.content(poet(tmp_path, number, f"writer {number}"))
    weights.write_text("elegy")
    assert serving.content(poet(tmp_path)) == ""


def test_an_adapter_whose_files_cannot_be_seen_has_no_content() -> None:
    for path in ("/nowhere", "~nobody-here/x", "a\0b", "no repository at all", "x" * 5000):
        assert adapters.Adapters().content(poet(Path(path))) == ""
