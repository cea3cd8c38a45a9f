"""A vLLM that vcache was not tested with: this one, by another version, and changed on purpose where
vcache hooks in, each place in turn. It shares behind a proof, and is right or refused."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from vllm_cases import CHUNK, Instance, Node, beside_vllm, keep, new_tokens
from vllm_cases import quick as here

from vcache_backend import proofs
from vcache_backend.integration.vllm import shapes
from vcache_backend.proofs import Combination, Proof

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm
NEWER = "0.99.0"
OURS = "vcache_backend.integration.vllm"


# ---- in an instance


def changed(arguments: dict[str, Any]) -> Any:
    """An instance's commands. change: what is done to vLLM before our connector is imported."""
    import vllm
    from vllm_inside import Serving

    vllm.__version__ = NEWER
    for name in [name for name in sys.modules if name.startswith(OURS)]:
        del sys.modules[name]
    package = importlib.import_module("vcache_backend.integration")
    for name in "vllm", "vllm_connector":
        vars(package).pop(name, None)
    if change := arguments.pop("change", None):
        (CHANGES | HARMLESS)[change]()
    return Serving(arguments)


def class_of(path: str) -> Any:
    module, _, kind = path.partition(":")
    owner = importlib.import_module(f"vllm.{module}")
    return getattr(owner, kind) if kind else owner


BASE = "distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
POOL = "v1.core.block_pool:BlockPool"


def more_for_connectors() -> None:
    """vLLM gives connectors more than it did."""
    base = class_of(BASE)
    factory = class_of("distributed.kv_transfer.kv_connector.factory:KVConnectorFactory")
    begins = base.__init__

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any, more: Any) -> None:
        begins(self, vllm_config, role, kv_cache_config)

    def create(cls: Any, config: Any, role: Any, kv_cache_config: Any) -> Any:
        kind = cls.get_connector_class(config.kv_transfer_config)
        return kind(config, role, kv_cache_config, "more")

    base.__init__ = __init__
    factory.create_connector = classmethod(create)


def tuples() -> None:
    """Found blocks come as a tuple."""
    pool = class_of(POOL)
    gets = pool.get_cached_block
    pool.get_cached_block = functools.wraps(gets)(lambda *given: tuple(gets(*given) or ()) or None)


CHANGES: dict[str, Callable[[], None]] = {
    "gone: what connectors import": lambda: delattr(
        class_of(BASE.partition(":")[0]), "KVConnectorHandshakeMetadata"
    ),
    "signature: of the constructor": more_for_connectors,
}
HARMLESS = {"returns: a tuple of found blocks": tuples}


# ---- a vLLM of another version


def start(
    node: Node, name: str, change: str = "", state: Path | None = None, **ours: Any
) -> Instance:
    settings = {"connector": {"share": "in_place", **ours}}
    arguments = {"model": str(node.model), "kv_transfer_config": node.transfer(settings)}
    told = arguments | ({"change": change} if change else {})
    environment: dict[str, str | None] = {"XDG_STATE_HOME": str(state or node.folder / "nothing")}
    made = Instance(node.folder, name, environment, told, make=changed)
    made.in_place = True
    return node.undo.enter_context(made)


def log_of(instance: Instance) -> str:
    return (instance.folder / f"{instance.name}.log").read_text()


def test_another_version_shares_behind_a_proof_or_if_it_is_told_to(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    state, tokens = here.folder / "state", new_tokens(4 * CHUNK + 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    made = Combination(vllm=NEWER, torch=str(torch.__version__), device="cpu", share="in_place")
    proofs.write(Proof(combination=made, date="2026-11-29", model=""))
    proved, told = start(here, "proved", state=state), start(here, "told", unproved=True)
    without = start(here, "without")
    computed = keep(proved, tokens)
    hit = told.one(tokens)
    assert (hit.cached, hit.agrees(computed)) == (4 * CHUNK, True)
    known = {one.vllm for one in here.stats().instances}
    assert known == {f"{NEWER}, proved 2026-11-29", f"{NEWER}, unproved"}
    found = without.one(tokens)
    assert (found.cached, found.agrees(computed)) == (0, True)
    said = (
        f"vcache caches nothing: vcache was not tested with vLLM {NEWER}, and nobody has proved it"
    )
    assert f"{said} here: run `vcache prove`" in log_of(without)


@pytest.mark.parametrize("change", HARMLESS)
def test_a_change_that_means_nothing_to_vcache_is_right(here: Node, change: str) -> None:
    told = {"unproved": True}
    one, other = start(here, "as ever", **told), start(here, "harmless", change, **told)
    tokens = new_tokens(4 * CHUNK + 1)
    computed, hit = keep(one, tokens), other.one(tokens)
    assert (hit.cached, hit.agrees(computed)) == (4 * CHUNK, True)
    assert other.again(tokens).agrees(computed)


@pytest.mark.parametrize("change", CHANGES)
def test_a_vllm_that_was_changed_where_vcache_hooks_in_serves_without_it(
    here: Node, change: str
) -> None:
    """It says so once, and answers as ever. Which changes are seen:
    `test_each_place_that_is_changed_is_noticed`."""
    number = list(CHANGES).index(change)
    instance = start(here, f"changed-{number}", change, unproved=True)
    tokens = new_tokens(4 * CHUNK + 1)
    first, again = instance.one(tokens), instance.one(tokens)
    assert (first.cached, again.cached, again.agrees(first)) == (0, 4 * CHUNK, True)
    assert instance.again(tokens).agrees(first)
    (said,) = [line for line in log_of(instance).splitlines() if " ERROR " in line]
    assert f"vcache caches nothing: vLLM {NEWER} is not the one that vcache knows: " in said


# ---- what is looked at


def look(_: object) -> dict[str, str]:
    """Each place that vcache knows, changed in each way in turn: what was said."""
    from vcache_backend.integration.vllm import shapes
    from vcache_backend.integration.vllm.connector import VCacheConnector

    said = {"nothing": shapes.fault(VCacheConnector)}
    # They have a test of their own, and take a second.
    shapes.differences = shapes.elsewhere = lambda _: iter(())
    owners = class_of(BASE), class_of(BASE.replace("KVConnectorBase_V1", "SupportsHMA"))
    names = [one for one in vars(VCacheConnector) if one[0] != "_"]
    places = [(owner, one) for owner in owners for one in names if one in vars(owner)]
    places += [(class_of(POOL), one) for one in shapes.REPLACED]
    for owner, name in places:
        for way in (without, *([more] if name not in TAKE_ALL else [])):
            with pytest.MonkeyPatch.context() as patch:
                way(patch, owner, name)
                said[f"{way.__name__}: {owner.__name__}.{name}"] = shapes.fault(VCacheConnector)
    for name, (path, attribute, made) in OTHERS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(class_of(path), attribute, made(getattr(class_of(path), attribute)))
            said[name] = shapes.fault(VCacheConnector)
    return said


def without(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    patch.delattr(owner, name)


def more(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """A further parameter, or no property any more."""
    found = inspect.getattr_static(owner, name)
    made = lambda *_, **__: None  # noqa: E731
    if not isinstance(found, property):
        signature = inspect.signature(getattr(found, "__func__", found))
        added = inspect.Parameter("more", inspect.Parameter.KEYWORD_ONLY, default=0)
        given = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
        made.__signature__ = signature.replace(parameters=[*given, added])  # type: ignore[attr-defined]
    patch.setattr(owner, name, made)


def answers(annotation: Any) -> Callable[[Any], Any]:
    def made(theirs: Any) -> Any:
        function = functools.wraps(theirs)(lambda *given: theirs(*given))
        function.__annotations__ = theirs.__annotations__ | {"return": annotation}
        signature = inspect.signature(theirs).replace(return_annotation=annotation)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return made


TAKE_ALL = ("build_prom_metrics", "save_kv_layer", "start_load_kv", "wait_for_layer_load")
TAKE_ALL += ("cache_partial_block",)
"""Our methods that take whatever vLLM gives."""
OTHERS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "a connector takes more": (BASE, "__init__", lambda _: lambda self, more: None),
    "a look-up answers three things": (
        BASE,
        "get_num_new_matched_tokens",
        answers(tuple[int, bool, str]),
    ),
    "failed blocks come in a list": (BASE, "get_block_ids_with_load_errors", answers(list[int])),
    "freed blocks are handed out last": (
        POOL,
        "free_blocks",
        lambda frees: lambda self, blocks: frees(self, reversed(list(blocks))),
    ),
    "failed blocks have another name": (
        "v1.outputs:KVConnectorOutput",
        "__dataclass_fields__",
        lambda fields: {name: one for name, one in fields.items() if name != "invalid_block_ids"},
    ),
    "a look-up finds nothing": (POOL, "get_cached_block", lambda _: lambda *_: None),
    "all blocks are null": ("v1.core.kv_cache_utils:KVCacheBlock", "is_null", lambda _: True),
}


def test_each_place_that_is_changed_is_noticed() -> None:
    with beside_vllm() as worker:
        said = worker.ask(look)
    assert said.pop("nothing") == ""
    assert len(said) > 60
    assert [name for name, fault in said.items() if not fault] == []


WAYS = {
    "take": "    @traced\n    def take(self, n): return self.free_block_queue.popleft_n(n)\n",
    "a lambda": "    take = lambda self, n: self.free_block_queue.popleft_n(n)\n",
    "of": "def of(pool, n): return getattr(pool, 'free_block_queue')\n",
}
"""By what is said to do it: another way to get blocks, at the end of vLLM's class of block pools."""


@pytest.mark.parametrize("name", WAYS)
def test_another_way_to_get_blocks_is_noticed_in_the_sources(tmp_path: Path, name: str) -> None:
    package = sources()
    assert list(shapes.elsewhere(package)) == []
    made = tmp_path / "v1/core/block_pool.py"
    made.parent.mkdir(parents=True)
    made.write_text((package / "v1/core/block_pool.py").read_text() + "\n" + WAYS[name])
    found = list(shapes.elsewhere(tmp_path))
    said = "free_block_queue, which vcache does not see"
    assert f"v1/core/block_pool.py: {name} uses {said}" in found


def sources() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_another_order_of_calls_is_noticed_in_the_sources(tmp_path: Path) -> None:
    """In each function of vLLM whose calls vcache knows, one that does not come any more."""
    package = sources()
    assert list(shapes.differences(package)) == []
    for file in shapes.FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        text = (package / file).read_text()
        lines, known = text.splitlines(keepends=True), shapes.ORDERS.get(file, {})
        for node in ast.walk(ast.parse(text)):
            order = known.get(getattr(node, "name", ""))
            if isinstance(node, ast.FunctionDef) and order is not None:
                for number in range(node.body[0].lineno - 1, node.end_lineno or 0):
                    lines[number] = lines[number].replace(order.split()[0], "nothing(")
        (tmp_path / file).write_text("".join(lines).replace("with nothing(", "with nothing:"))
    said = " ".join(shapes.differences(tmp_path))
    due = [f"{file}: {name} " for file, known in shapes.ORDERS.items() for name in known]
    assert [one for one in due if one not in said] == []
