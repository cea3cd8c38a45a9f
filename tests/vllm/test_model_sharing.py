"""How an instance shares: the decision as a table of cases, and what vLLM's configuration says
against sharing."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_objects import vllm_config

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

import vllm
from soak.scheduling import Tables, full, state, window

from vcache_backend import proofs
from vcache_backend.config import ConnectorConfig, from_dict
from vcache_backend.integration.vllm.model import compat, sharing
from vcache_backend.integration.vllm.model.sharing import POOL, Facts, plan
from vcache_backend.integration.vllm.model.spec import ModelSpec, read_model
from vcache_backend.proofs import Combination, Proof

MODEL = ModelSpec(
    model="m", kv_cache_dtype="", kv_heads=1, head_dim=8, tp_size=1, use_mla=False, block_size=16
)
IN_PLACE, THROUGH_POOL = {"connector": {"share": "in_place"}}, {"connector": {"share": "pool"}}
GIB = 1 << 30


def tables(*windows: int) -> Any:
    """vLLM's block tables of a model, one for each window; 0: of full attention."""
    return Tables([window(one) if one else full() for one in windows], None).config(400)


HINDERED: dict[str, Any] = {"hindered": "of an order"}
BESIDE = (
    "a pool beside a KV cache shared in place takes models with one block table: leave out "
    f"pool.segment_bytes, pool.device and offload.policy; or set {POOL}"
)


@pytest.mark.parametrize(
    ("given", "facts", "share", "lent", "refused"),
    [
        ({}, {}, "in_place", 0, ""),
        ({}, HINDERED, "pool", 8 * GIB, ""),
        ({"pool": {"segment_bytes": 0}}, {}, "in_place", 0, ""),
        ({"pool": {"segment_bytes": "1 GiB"}}, {}, "pool", GIB, ""),
        ({"pool": {"device": "host"}}, {}, "pool", 8 * GIB, ""),
        ({"offload": {"policy": "write_through"}}, {}, "pool", 8 * GIB, ""),
        (IN_PLACE, {}, "in_place", 0, ""),
        (IN_PLACE | {"pool": {"segment_bytes": "8 GiB"}}, {}, "in_place", 8 * GIB, ""),
        (IN_PLACE, HINDERED, "in_place", 0, f"of an order; or set {POOL}"),
        (IN_PLACE, {"several": True, "unpooled": "no"}, "in_place", 0, ""),
        (
            IN_PLACE | {"pool": {"segment_bytes": "1 GiB"}},
            {"several": True},
            "in_place",
            GIB,
            BESIDE,
        ),
        (IN_PLACE, {"unshared": "of a kind"}, "in_place", 0, "of a kind"),
        (THROUGH_POOL, {"unpooled": "of a size"}, "pool", 8 * GIB, "of a size"),
        (IN_PLACE, HINDERED | {"refused": "no"}, "in_place", 0, "no"),
        (THROUGH_POOL, HINDERED, "pool", 8 * GIB, ""),
        ({}, {"refused": "no"}, "in_place", 0, "no"),
    ],
)
def test_an_instance_shares_as_its_settings_and_vllms_allow(
    given: dict[str, Any], facts: dict[str, Any], share: str, lent: int, refused: str
) -> None:
    made = sharing.sharing(from_dict(given), Facts(MODEL, **facts))
    settings = made.settings
    assert (settings.connector.share, settings.pool.lent, made.refused) == (share, lent, refused)


# ---- what vLLM's configuration says


def planned(*windows: int, share: str = "auto", size: int = 64, **changes: Any) -> tuple[str, str]:
    """How an instance shares that has tables with these windows, and why it does not. changes: of
    vLLM's configuration."""
    given = {"engine": {"chunk_size": size}, "connector": {"model": "named", "share": share}}
    changes = {"cache_config__block_size": 16, "device_config__device_type": "cpu"} | changes
    made = plan(vllm_config(**changes), tables(*windows or (0,)), from_dict(given))
    return made.settings.connector.share, made.refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache_config__enable_prefix_caching": False}, "leave out --no-enable-prefix-caching"),
        ({"model_config__enable_sleep_mode": True}, "leave out --enable-sleep-mode"),
        ({"model_config__enable_cumem_allocator": True}, "leave out --enable-sleep-mode"),
        ({"device_config__device_type": "cuda"}, "expandable_segments"),
        ({"parallel_config__tensor_parallel_size": 2}, ""),
    ],
)
def test_a_kv_cache_that_others_cannot_map_goes_through_a_pool(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(compat, "tells_of_sleep", lambda: True)
    assert planned(**changes) == ("pool" if said else "in_place", "")
    refused = planned(share="in_place", **changes)[1]
    assert said in refused
    assert refused.endswith(f"; or set {POOL}") == bool(said)


def test_another_machine_goes_through_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processors do not make writes visible in order."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert planned() == ("pool", "")
    assert "this machine is aarch64" in planned(share="in_place")[1]


@pytest.mark.parametrize("windows", [(33, 0), (33,), (0,)])
def test_in_place_takes_any_block_tables_and_any_chunk_size(windows: tuple[int, ...]) -> None:
    assert planned(*windows) == ("in_place", "")
    assert planned(*windows, size=72) == ("in_place", "")
    assert planned(*windows, size=72, share="pool")[1].endswith("chunk_size) to 80")
    assert planned(*windows, model_config__max_model_len=63) == ("in_place", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_transfer_config": object()}, ""),
        ({"cache_config__cache_dtype": "int8_per_token_head"}, "set --kv-cache-dtype fp8 or auto"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "--prefix-caching-hash-algo sha256"),
        ({"model_config__is_prefix_caching_supported": False}, "pooling needs every token"),
        ({"model_config__enable_prompt_embeds": True}, "leave out --enable-prompt-embeds"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__enable_fault_tolerance": True}, "without --enable-fault-tolerance"),
        ({"model_config__max_model_len": 63}, "engine.chunk_size is 64, and no request has more"),
        ({"model_config__max_model_len": 64}, ""),
    ],
)
def test_what_must_not_be_cached_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    refused = planned(share="pool", **changes)[1]
    assert said in refused
    assert bool(refused) == bool(said)
    assert "\n" not in refused


def test_new_weights_and_weights_without_a_revision_want_a_name() -> None:
    bucket = {"model_config__model": "s3://bucket/model", "model_config__revision": ""}
    for changes, name in (
        ({"weight_transfer_config": object()}, "weights to"),
        (bucket, "model to"),
    ):
        made = plan(vllm_config(cache_config__block_size=16, **changes), tables(0), from_dict({}))
        assert f"set connector.{name}" in made.refused


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_hashes_without_a_seed_are_refused(
    monkeypatch: pytest.MonkeyPatch, seed: str | None
) -> None:
    monkeypatch.setattr(compat, "hash_seed", lambda _: seed)
    assert "set PYTHONHASHSEED=0" in planned()[1]


def test_earlier_releases_of_vllm_are_refused_and_later_ones_want_a_proof(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for version in ("0.30.2", "dev", "0.3", ""):
        monkeypatch.setattr(vllm, "__version__", version)
        assert planned()[1] == f"vLLM {version} is not supported: install vllm>=0.31,<0.34"
    for version in ("0.34.0", "1.31.0", "0.320.0", "0.34.0.dev1+g0", "0.33.1rc1.dev412+g0"):
        monkeypatch.setattr(vllm, "__version__", version)
        why = f"vcache was not tested with vLLM {version}, and nobody has proved it here: run"
        assert planned()[1].startswith(f"{why} `vcache prove`")
        assert planned(share="pool")[1].startswith(f"{why} `vcache prove --share pool`")
        for share in ("in_place", "pool"):
            proofs.write(Proof(combination=Combination.here(share), date="2026-12-01", model=""))
            assert planned(share=share)[1] == ""
    for version in ("0.31.0", "0.32.0+cpu", "0.33.1rc1", "0.33"):
        monkeypatch.setattr(vllm, "__version__", version)
        assert planned()[1] == ""


@pytest.mark.parametrize("knows", [False, True])
def test_what_vllm_knows_from_0_33_on_is_refused_before(
    monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """A worker of an earlier one looks for the experts of loaded tokens, and raises; or it takes the
    KV cache away while copies run."""
    monkeypatch.setattr(compat, "caps_hits_of_experts", lambda: knows)
    monkeypatch.setattr(compat, "tells_of_sleep", lambda: knows)
    for changes, said in (
        ({"aux_output_config__enabled": True}, "without --enable-return-routed-experts"),
        ({"model_config__enable_sleep_mode": True}, "without --enable-sleep-mode"),
    ):
        assert (said in planned(**changes)[1]) == (not knows)
    assert planned()[1] == ""
    other = {"model_config__enable_sleep_mode": True, "model_config__sleep_mode_backend": "x"}
    assert ("set --sleep-mode-backend cumem" in planned(**other)[1]) == knows


def test_a_load_begins_at_once_if_no_step_can_touch_its_blocks() -> None:
    """A draft's last kernels come after its step's tokens. With states a step clears the blocks
    that it hands out, those of its loads included. Stores: test_stores."""
    drafts = vllm_config(speculative_config=SimpleNamespace(method="ngram"))
    assert compat.loads_at_once(vllm_config(), tables(0))
    assert not compat.loads_at_once(drafts, tables(0))
    states = Tables([full(), state()], None).config(400)
    assert states.needs_kv_cache_zeroing
    # A step under way may read blocks that its window has passed.
    for several in (tables(33), tables(33, 0), states):
        assert not compat.loads_at_once(vllm_config(), several)


# ---- the model, with its tables


@pytest.mark.parametrize("alike", [True, False])
def test_mlas_ranks_hold_the_same_only_if_their_draft_is_mla_too(alike: bool) -> None:
    nothing = dict.fromkeys(("revision", "hf_config", "quantization"))
    draft = SimpleNamespace(model="head", use_mla=alike, **nothing)
    guesses = SimpleNamespace(method="eagle3", num_speculative_tokens=3, draft_model_config=draft)
    config = vllm_config(model_config__use_mla=True, speculative_config=guesses)
    model = sharing.read_model(config, tables(0), ConnectorConfig(model="named"))
    assert model.use_mla == alike


def test_a_plain_table_adds_nothing_to_the_namespace_and_others_their_text() -> None:
    config = vllm_config()
    alone = sharing.read_model(config, tables(0), ConnectorConfig())
    assert alone.extra.pop("groups") == ""
    assert alone == read_model(config)
    for windows, text in (((33, 0), "full/16 window33/16"), ((33,), "window33/16")):
        found = sharing.read_model(config, tables(*windows), ConnectorConfig())
        assert found.extra == alone.extra | {"groups": text}
