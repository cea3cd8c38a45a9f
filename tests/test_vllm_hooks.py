"""The hooks into vLLM: who shares with whom (scope.py), and what the hook does to vLLM's and
LMCache's objects.
"""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_cases import missing

from vcache_backend.integration import plugin
from vcache_backend.integration.lmcache import patches
from vcache_backend.integration.lmcache.scope import (
    PLAIN,
    REFUSED,
    SKIP_SAVE,
    TAG,
    Scheduler,
    scope,
    tagged,
    uncached,
)

if not missing(()):
    pytest.importorskip("vllm.v1.request")  # it lets the warnings pass that come with the import
    import torch
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

NOT_CACHED = {SKIP_SAVE: True, REFUSED: True}
beside = pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here")
"""For tests with requests of vLLM's own."""

# ---- scopes


def test_every_difference_of_salt_or_adapter_is_a_scope_of_its_own() -> None:
    who: list[tuple[str | None, tuple[str, str] | None]] = [
        (None, None),
        ("", None),
        ("a", None),
        ("b", None),
        ("-", None),
        ("a\0b", None),
        ("é", None),
        ("\ud800", None),
        (None, ("a", "/x")),
        (None, ("b", "/x")),
        (None, ("a", "/y")),
        (None, ("a/x", "")),
        (None, ("", "")),
        ("a", ("", "")),
        ("a", ("a", "/x")),
        ("b", ("a", "/x")),
        ("aa", ("", "/x")),
    ]
    scopes = [scope(*one) for one in who]
    assert len(set(scopes)) == len(who)
    assert scopes == [scope(*one) for one in who]


def test_a_scope_is_the_same_in_every_version_of_this_package() -> None:
    """Instances of two versions share a pool; a change here must be meant."""
    assert scope("tenant", None) == "ebac9b5a8097dd7ebc6a3e18345b3cc1"
    assert scope("tenant", ("sql", "/adapters/sql")) == "d76006b8c18f95f5029f03826d95891e"


# ---- what is written into a request's parameters


def test_the_tag_comes_first_and_replaces_what_a_user_wrote_there() -> None:
    mine = {"kv_transfer_params": {"lmcache.tag.team": "red", TAG: "somebody else's"}, "other": 1}
    assert list(tagged(mine, "s")["kv_transfer_params"].items()) == [
        (TAG, "s"),
        ("lmcache.tag.team", "red"),
    ]
    assert tagged(mine, "s")["other"] == 1


@pytest.mark.parametrize(
    "rewrite", [lambda args: tagged(args, "s"), uncached], ids=["tagged", "uncached"]
)
def test_the_users_own_dictionaries_are_left_alone(
    rewrite: Callable[[Any], dict[str, Any]],
) -> None:
    mine = {"kv_transfer_params": {"lmcache.tag.team": "red", TAG: "x"}, "other": [1]}
    before = copy.deepcopy(mine)
    answer = rewrite(mine)
    answer["kv_transfer_params"]["added"] = 1
    assert mine == before


# ---- the scheduler, with requests of vLLM's own


def sampling(params: Any = None, **more: Any) -> SamplingParams:
    """params: the request's `kv_transfer_params`, if any."""
    return SamplingParams(
        extra_args=None if params is None else {"kv_transfer_params": params}, **more
    )


def request(name: str = "r", params: SamplingParams | None = None, **more: Any) -> Request:
    return Request(name, [1, 2, 3], params or sampling(), None, **more)


def adapter_of(name: str, path: str) -> LoRARequest:
    return LoRARequest(name, 1, path)


def tags(of: Any) -> dict[str, Any]:
    return dict((of.sampling_params.extra_args or {}).get("kv_transfer_params", {}))


@dataclass
class LoadSpec:
    """As LMCache's."""

    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool


class Adapter:
    """As much of LMCacheConnectorV1Impl as the hook touches. What it was asked is in `asked`."""

    def __init__(
        self, plugins: Any = ("vcache",), module: str = "vcache_backend.integration.lmcache"
    ) -> None:
        extra = {"storage_plugin.vcache.module_path": module}
        self.config = types.SimpleNamespace(storage_plugins=plugins, extra_config=extra)
        self.lookup_client: Any = object()
        self.load_specs: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.meta: Any = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        self.asked.append(tags(request) if request.sampling_params else {})
        return 256 - num_computed_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.meta


def ask(request: Any, adapter: Adapter | None = None, computed: int = 0) -> int | None:
    return Scheduler(adapter or Adapter()).get_num_new_matched_tokens(request, computed)


@beside
def test_requests_that_share_their_parameters_keep_their_own_scopes() -> None:
    mine = {"lmcache.tag.team": "red"}
    shared = sampling(dict(mine))
    one, two = request("1", shared, cache_salt="a"), request("2", shared, cache_salt="b")
    ask(one)
    ask(two)
    assert [tags(one)[TAG], tags(two)[TAG]] == [scope("a", None), scope("b", None)]
    assert shared.extra_args == {"kv_transfer_params": mine}


@beside
@pytest.mark.parametrize(
    "make",
    [
        lambda: request(lora_request=adapter_of("sql", "/sql")),
        lambda: request(
            params=sampling({TAG: "ours is no user's"}), lora_request=adapter_of("a", "/a")
        ),
        # LMCache hashes token ids, and those of embeddings are all zero
        lambda: request(prompt_embeds=torch.zeros(3, 8)),
    ],
    ids=["adapter", "our own tag", "embeddings"],
)
def test_requests_that_no_key_tells_apart_are_neither_looked_up_nor_stored(
    make: Callable[[], Any],
) -> None:
    adapter, refused = Adapter(), make()
    for _ in ("new", "preempted"):
        assert ask(refused, adapter, computed=32) == 0
        assert (adapter.asked, tags(refused)) == ([], NOT_CACHED)
    # LMCache asserts that there is one after a preemption
    assert adapter.load_specs == {"r": LoadSpec(32, 0, False)}


@beside
def test_an_adapter_with_a_users_tag_has_a_scope_of_its_own() -> None:
    found = []
    for lora, salt in (
        (("a", "/a"), None),
        (("b", "/a"), None),
        (("a", "/b"), None),
        (("a", "/a"), "s"),
    ):
        one = request(
            params=sampling({"lmcache.tag.v": 1}), lora_request=adapter_of(*lora), cache_salt=salt
        )
        assert ask(one) == 256
        assert tags(one)["lmcache.tag.v"] == 1
        found.append(tags(one)[TAG])
    assert len({*found, PLAIN, scope("s", None)}) == 6


@beside
def test_a_pooling_request_is_not_cached() -> None:
    adapter, pooling = Adapter(), Request("r", [1, 2, 3], None, PoolingParams())
    assert (ask(pooling, adapter), adapter.asked, pooling.sampling_params) == (0, [], None)


@beside
def test_a_request_that_must_be_computed_is_stored_but_not_looked_up() -> None:
    adapter, computed = Adapter(), request(params=sampling(skip_reading_prefix_cache=True))
    assert (ask(computed, adapter), adapter.asked, tags(computed)) == (0, [], {TAG: PLAIN})


def test_nothing_is_saved_of_a_request_without_a_tag() -> None:
    def meta(configs: Any) -> Any:
        return types.SimpleNamespace(
            request_configs=configs, save_spec=types.SimpleNamespace(can_save=True)
        )

    adapter = Adapter()
    adapter.meta = types.SimpleNamespace(
        requests=[meta({TAG: PLAIN}), meta(None), meta({"lmcache.tag.team": "red"})]
    )
    adapter.meta.requests.append(types.SimpleNamespace(request_configs=None, save_spec=None))
    answer = Scheduler(adapter).build_connector_meta("a scheduler's output")
    assert [one.save_spec and one.save_spec.can_save for one in answer.requests] == [
        True,
        False,
        False,
        None,
    ]


@beside
def test_a_request_we_do_not_understand_is_not_cached_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapter = Adapter()
    scheduler = Scheduler(adapter)
    for number, params in enumerate(({"lmcache.tag.team": []}, "text", {1: 2})):
        one = request(str(number), sampling(params))
        for _ in ("new", "preempted"):
            assert scheduler.get_num_new_matched_tokens(one, 0) == 0
            assert tags(one) == NOT_CACHED
    strange = types.SimpleNamespace(request_id="s", sampling_params=sampling())
    assert scheduler.get_num_new_matched_tokens(strange, 0) == 0
    assert adapter.asked == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "request 0 is not cached (ValueError: lmcache.tag.team" in caplog.text


# ---- the hook


class Connector:
    """As much of vLLM's LMCacheConnectorV1 as the hook touches."""

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any = None) -> None:
        self.role = types.SimpleNamespace(name=role)
        self._lmcache_engine = vllm_config.adapter


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> type[Connector]:
    """A class of its own, wrapped as vLLM's is; twice, which is once."""
    module = types.ModuleType("as vLLM's")
    module.LMCacheConnectorV1 = type("LMCacheConnectorV1", (Connector,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, patches.CONNECTOR_MODULE, module)
    patches.register()
    patches.register()
    return module.LMCacheConnectorV1  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(autouse=True)
def _no_lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the scheduler; LMCache's modules stay out of them."""
    monkeypatch.setattr(patches, "_supply_connector", lambda: None)


def config(adapter: Any, **extra: Any) -> Any:
    transfer = types.SimpleNamespace(
        get_from_extra_config=lambda name, default: extra.get(name, default)
    )
    return types.SimpleNamespace(adapter=adapter, kv_transfer_config=transfer)


def hooked(adapter: Any) -> bool:
    return isinstance(getattr(adapter.get_num_new_matched_tokens, "__self__", None), Scheduler)


@beside
def test_the_schedulers_connector_is_hooked_once(connector: type[Connector]) -> None:
    adapter = Adapter()
    connector(config(adapter), "SCHEDULER")
    adapter.get_num_new_matched_tokens(request(), 0)
    assert adapter.asked == [{TAG: PLAIN}]
    assert connector.__init__.__wrapped__ is Connector.__init__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(plugins=None),
        Adapter(plugins=[]),
        Adapter(plugins=["other"]),
        Adapter(module="somebody.elses"),
    ],
    ids=["no plugins", "empty", "another plugin", "another module"],
)
def test_without_our_plugin_nothing_is_touched(
    connector: type[Connector], adapter: Adapter
) -> None:
    connector(config(adapter), "SCHEDULER")
    assert not hooked(adapter)


def test_a_worker_is_not_hooked(connector: type[Connector]) -> None:
    adapter = Adapter()
    connector(config(adapter), "WORKER")
    assert not hooked(adapter)


def test_vllms_own_adapter_is_left_alone(
    connector: type[Connector], caplog: pytest.LogCaptureFixture
) -> None:
    adapter = Adapter()
    with caplog.at_level(logging.INFO):
        connector(config(adapter, use_native=True), "SCHEDULER")
    assert not hooked(adapter)
    assert "`use_native: true`" in caplog.text


def test_a_connector_we_do_not_understand_is_made_all_the_same(
    connector: type[Connector], caplog: pytest.LogCaptureFixture
) -> None:
    made = connector(config(types.SimpleNamespace()), "SCHEDULER")
    assert made._lmcache_engine is not None
    assert (
        "vcache's hook failed and nothing will be cached (_patch_scheduler: AttributeError"
        in caplog.text
    )


def test_an_error_of_lmcaches_own_is_not_hidden(connector: type[Connector]) -> None:
    with pytest.raises(AttributeError, match="adapter"):
        connector(
            types.SimpleNamespace(kv_transfer_config=config(None).kv_transfer_config), "SCHEDULER"
        )


# ---- the entry point


def test_vllm_finds_the_hook_under_the_name_vcache() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vcache")
    assert entry.load() is plugin.register


def test_the_connector_is_hooked_when_it_is_imported(tmp_path: Path) -> None:
    """In a fresh process, with a package of vLLM's shape: before, after, and without losing what an
    import gives a module.
    """
    file = tmp_path.joinpath(*patches.CONNECTOR_MODULE.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    for folder in file.relative_to(tmp_path).parents[:-1]:
        (tmp_path / folder / "__init__.py").touch()
    file.write_text("class LMCacheConnectorV1:\n    def __init__(self): pass\n")
    code = (
        f"import inspect, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vcache_backend.integration.lmcache import patches\n"
        "patches.register()\n"
        f"assert not [name for name in sys.modules if name.startswith('vllm')]\n"
        f"from {patches.CONNECTOR_MODULE} import LMCacheConnectorV1 as cls\n"
        "print(hasattr(cls.__init__, '__wrapped__'), inspect.getsource(cls).startswith('class'))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (child.stdout, child.stderr) == ("True True\n", "")


def test_registering_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        sys.modules, patches.CONNECTOR_MODULE, types.ModuleType("a vLLM without that class")
    )
    patches.register()
    assert "vcache's hook could not be set; nothing will be cached" in caplog.text


def test_the_hook_is_cheap() -> None:
    """What vLLM's processes get: neither torch nor LMCache nor vLLM is imported for it."""
    heavy = ("torch", "triton", "numpy", "vllm", "lmcache", "msgspec")
    code = (
        "import sys; from vcache_backend.integration.plugin import register; register(); "
        "register();"
        f"print([n for n in {heavy!r} if n in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (child.stdout, child.stderr) == ("[]\n", "")
