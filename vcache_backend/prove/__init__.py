"""`vcache prove`: whether the installed vLLM and vcache give right hits on this machine.

Two instances of vLLM, in processes of their own, share KV. One computes a prompt and is asked
again, so that vLLM's own prefix cache answers. The other one, whose blocks hold other prompts' KV,
loads it, and must give the same tokens and logprobs, bit for bit. Then both work under load, with
resets, aborts and preemptions, and are asked again. What was shown is kept: see `proofs`."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from vcache_backend.children import Child, ChildFailed, MetadataServer, environment, module
from vcache_backend.config import ClientConfig
from vcache_backend.doctor import Finding
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.proofs import Combination, Proof
from vcache_backend.protocol.client import Client
from vcache_backend.supported import VLLM
from vcache_backend.vram_pool.devices import gpus

from .instance import CPU_ENVIRONMENT, ENVIRONMENT
from .model import TINY_LLAMA, write_model
from .prompts import EXPONENT, MASK, STEP, Hit, Prompts, alike, ask, difference

CHUNK, ANSWER = 64, 16
"""Tokens of a chunk, and of an answer that is compared."""
_PATIENT = ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0)
_OWN = {"kv_transfer_params": {"vcache": {"load": False, "store": False}}}
_LOADS = {"kv_transfer_params": {"vcache": {"store": False}}}
"""Requests of which others hear nothing: answered by vLLM's own prefix cache, or by a load."""


def shown(what: str, right: int, of: int, more: str = "") -> Finding:
    """One row: in words what was looked at, how often it was right, of how many times, and what
    else there is to say."""
    said = f"{right:,} of {of:,}" + (f": {more}" if more else "")
    return Finding(what, "ok" if right == of > 0 else "fail", said)


class Settings(msgspec.Struct, frozen=True):
    """What to prove. model: as `vllm serve` takes it; empty: a generated one. share: `in_place` or
    `pool`. seconds: of work under load."""

    model: str = ""
    share: str = "in_place"
    seconds: float = 60.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return 4096 if self.model else 1024


def run(settings: Settings, tell: Callable[[str], None]) -> tuple[Proof, list[Finding]]:
    """Prove it: what was proved if all rows are ok, and the rows. tell: called with what happens.

    Takes minutes, and leaves no process behind, even if killed. VCacheError if it cannot be tried,
    or a process ends."""
    if find_spec("vllm") is None:
        raise VCacheError(f"vLLM is not installed in vcache's environment ({sys.prefix})")
    # A socket's path has at most 107 bytes.
    parent = None if len(tempfile.gettempdir()) < 70 else "/tmp"
    with ExitStack() as undo:
        try:
            folder = undo.enter_context(tempfile.TemporaryDirectory("", "vcache-prove-", parent))
            pair = Pair(undo, Path(folder), settings, tell)
            return pair.proof, list(pair.look())
        except ChildFailed as error:
            raise VCacheError(error.line) from error
        except OSError as error:
            raise VCacheError(f"it cannot be tried: {error}") from error


class Pair:
    """A metadata server, and two instances of vLLM: `writer` computes, `reader` loads. On two GPUs
    if there are two."""

    def __init__(
        self, undo: ExitStack, folder: Path, settings: Settings, tell: Callable[[str], None]
    ) -> None:
        """Starts all of it. undo: ends it. ChildFailed."""
        self._settings, self._tell = settings, tell
        found, (name, version) = _gpus(), VLLM.installed()
        cpu = not found or name != VLLM.name or "cpu" in version
        more = CPU_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if cpu else {}
        given = environment(**ENVIRONMENT, **more)
        model = settings.model or str(write_model(folder / "model", TINY_LLAMA))
        server = MetadataServer(folder / "vcache.sock", folder / "server.log", given)
        undo.enter_context(server)
        self._client = undo.enter_context(Client(server.path, _PATIENT))
        told = msgspec.json.encode(_arguments(settings, model, server.path, cpu)).decode()
        command = module(f"{__name__}.instance", told)
        self.writer, self.reader = (
            undo.enter_context(Child(name, command, folder / f"{name}.log", given | visible))
            for name, visible in zip(("writer", "reader"), _visible(found), strict=True)
        )
        for child in (self.writer, self.reader):
            tell(f"{child.name} starts")
            child.answer(600.0)
        facts = self.writer.ask("facts")
        self._tokens = facts["blocks"] * facts["block"]
        self._prompts = Prompts(facts["vocabulary"], CHUNK, facts["block"])
        names = {name: facts[name] for name in ("vllm", "torch", "device")}
        combination = Combination(share=settings.share, **names)
        self.proof = Proof(combination=combination, date=str(date.today()), model=settings.model)

    def look(self) -> Iterator[Finding]:
        """All rows. ChildFailed."""
        self._soil()
        if (failed := self._failures()).status == "fail":
            yield failed
            return
        same = [alike((self.writer, self.reader), self._prompts.new(n), ANSWER) for n in (64, 300)]
        yield shown("both compute alike, without a cache", sum(same), len(same))
        before = self._compare("hits are vLLM's own, bit for bit")
        yield before
        yield self._flip()
        if before.status == "ok":
            yield self._churn()
            yield self._compare("the same after that")
        yield self._failures()

    # ---- what is looked at

    def _compare(self, what: str) -> Finding:
        """Ask both for prompts of which the writer has computed a beginning."""
        self._tell(f"{what}?")
        longest, prompts = self._settings.longest - 2 * ANSWER, self._prompts
        if self._settings.share == "in_place":
            hits = prompts.ends([longest // 16, longest // 7, longest // 4, longest // 2])
        else:
            lengths = range(CHUNK, longest - prompts.tail, longest // 8 // CHUNK * CHUNK)
            hits = prompts.hits(dict.fromkeys(lengths, 2), 4)
        wrong, cached = Counter[str](), 0
        for hit in hits:
            expected, got = self._both(hit)
            cached += bool(expected["cached"])
            if how := difference(expected, got):
                wrong[how] += 1
        more = "; ".join(f"{count} {how}" for how, count in wrong.most_common(3))
        more = more or f"{cached} of {len(hits)} prompts hit something"
        right = len(hits) - wrong.total() if 2 * cached > len(hits) else 0
        return shown(what, right, len(hits), more)

    def _both(self, hit: Hit) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer of vLLM's own prefix cache, and the other instance's."""
        for prompt in (*hit.before, hit.first):
            ask(self.writer, prompt, 1)
        self.writer.ask("told")
        return self._own(hit), ask(self.reader, hit.then, ANSWER, extra=_LOADS)

    def _own(self, hit: Hit) -> dict[str, Any]:
        return ask(self.writer, hit.then, ANSWER, extra=_OWN)

    def _flip(self) -> Finding:
        """Change bytes in the writer's blocks, and change them back. In place the reader's answer
        then is another one, the writer's own; the pool's chunks stay as they are."""
        what = "a changed byte changes the answer"
        self._tell(f"{what}?")
        hit = self._prompts.whole(4 * CHUNK)
        expected, got = self._both(hit)
        checks, in_place = [not difference(expected, got)], self._settings.share == "in_place"
        for changed in (True, False):
            self.writer.ask("flip", offset=EXPONENT, mask=MASK, step=STEP)
            self.reader.ask("reset")
            own, got = self._own(hit), ask(self.reader, hit.then, ANSWER, extra=_LOADS)
            due = own if in_place else expected
            checks += [
                difference(expected, own).startswith("differs") == changed,
                not difference(due, got),
            ]
        return shown(what, sum(checks), len(checks), "then it is changed back")

    def _churn(self) -> Finding:
        """Both work at once, for the same prompts and their beginnings."""
        seconds, prompts = self._settings.seconds, self._prompts
        if not seconds:
            return shown("under load", 1, 1, "left out")
        longest = self._settings.longest // 2
        whole = [prompts.new(longest) for _ in range(6)]
        heads = [one[: longest // part] for one in whole for part in (1, 2, 3)]
        asked = [[*head, *prompts.new(prompts.tail)] for head in heads]
        told = {"prompts": asked, "count": longest // 4, "seconds": seconds}
        found = self._found()
        self._tell(f"under load, {seconds:g} s")
        children = (self.writer, self.reader)
        for seed, child in enumerate(children):
            child.send("churn", seed=seed, **told)
        total = Counter[str]()
        for child in children:
            total.update(child.answer(seconds + 180.0))
        requests = total.pop("requests")
        said = [f"{count:,} {name}" for name, count in total.items()]
        said.append(f"{self._found() - found:,} tokens from the other one")
        return shown("requests under load end", requests, requests, ", ".join(said))

    def _failures(self) -> Finding:
        said = {one.pid: one.text for one in self._client.stats().reports if one.level == "error"}
        more = "; ".join(dict.fromkeys(said.values()))
        return shown("instances without a failure", 2 - len(said), 2, more)

    # ---- inside

    def _found(self) -> int:
        return sum(found for _, found in self._client.stats().hits.values())

    def _soil(self) -> None:
        """Fill the reader's blocks with the KV of prompts that nobody asks for again."""
        self._tell("the reader's blocks are filled with other prompts")
        for _ in range(min(self._tokens, 8192) // (self._settings.longest // 2) + 1):
            ask(self.reader, self._prompts.new(self._settings.longest // 2), 1, extra=_OWN)


def _gpus() -> list[str]:
    """The UUIDs of the GPUs; none without a driver."""
    try:
        return [gpu.uuid for gpu in gpus()]
    except SegmentError:
        return []


def _visible(found: list[str]) -> list[dict[str, str]]:
    """For each of two instances, the variables that give it a GPU."""
    both = [*found, *found][:2] or ["", ""]
    return [{"CUDA_VISIBLE_DEVICES": uuid} if uuid else {} for uuid in both]


def _arguments(settings: Settings, model: str, socket: Path, cpu: bool) -> dict[str, Any]:
    """Of vLLM's `LLM`."""
    nbytes = (256 << 20 if cpu else 1 << 30) if settings.model else 4 << 20
    in_place = settings.share == "in_place"
    least = 1 if in_place else CHUNK
    connector = {"share": settings.share, "min_hit_tokens": least, "unproved": True}
    sections = {
        "server": {"socket": str(socket)},
        "client": msgspec.to_builtins(_PATIENT),
        "engine": {"chunk_size": CHUNK},
        "connector": connector,
        "pool": {"segment_bytes": 0 if in_place else max(4 * nbytes, 64 << 20)},
    }
    given: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "max_model_len": settings.longest,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": nbytes,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "disable_log_stats": False,
        "kv_transfer_config": {
            "kv_connector": "VCacheConnector",
            "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": sections,
        },
    }
    if not settings.model:
        given |= {"dtype": "bfloat16", "block_size": 32 if cpu else 16}
    # vLLM takes the KV cache it is given; of this it only wants to see so much of the GPU free.
    return given if cpu else given | {"gpu_memory_utilization": 0.15}
