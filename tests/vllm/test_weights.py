"""Which weights vLLM has loaded: by their commit, or by their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm_objects import vllm_config

from vcache_backend.integration.vllm.model import weights
from vcache_backend.integration.vllm.model.spec import read_model


def test_the_weights_go_by_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has begun before they were written may have loaded others."""

    def known(named: str = "", **model: str) -> tuple[str, str]:
        changes = {f"model_config__{name}": value for name, value in model.items()}
        found = read_model(vllm_config(**changes), named)
        return found.model, found.revision

    hub = "/root/.cache/huggingface/hub/models--org--model/snapshots"
    assert known(model=f"{hub}/abc123f") == ("org/model", "abc123f")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    link = tmp_path.parent / "link"
    link.symlink_to(tmp_path)
    assert known(model=str(tmp_path)) == (str(tmp_path.resolve()), "")
    assert known(model="/" + "x" * 300) == ("/" + "x" * 300, "")
    (tmp_path / "old").symlink_to(os.__file__)
    assert [known(model=str(path))[1] != "" for path in (os.__file__, tmp_path / "old")] == [1, 0]
    # After the clock was set forward, too.
    monkeypatch.setattr(weights, "booted", lambda: weights.BOOTED + 86400)
    assert known(model=str(tmp_path / "old"))[1] == ""
    monkeypatch.setattr(weights, "_changed_lately", lambda path: False)
    before = known(model=str(tmp_path))
    (tmp_path / ".lock").touch()
    assert known(model=str(link)) == before
    assert before[0] == str(tmp_path.resolve())
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    after = known(model=str(tmp_path))
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert known(model=str(tmp_path / "model.safetensors"))[1].startswith("files-")
    assert known(model_weights="s3://bucket/model", model=str(tmp_path))[0] == "s3://bucket/model"
    assert known("llama@3", model=str(tmp_path)) == ("llama@3", "")
