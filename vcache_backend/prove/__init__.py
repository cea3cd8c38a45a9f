"""`vcache prove`: whether the installed vLLM and vcache give right hits on this machine.

Two instances of vLLM, in processes of their own, share KV. One computes a prompt and is asked
again, so that vLLM's own prefix cache answers. The other one, whose blocks hold other prompts' KV,
loads it, and must give the same tokens and logprobs, bit for bit. Then both work under load, with
resets, aborts and preemptions, and are asked again. What was shown is kept: see `proofs`."""

from __future__ import annotations

import json
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
from vcache_backend.doctor import THERE, Finding, has_nvidia, missing
from vcache_backend.errors import VCacheError
from vcache_backend.proofs import Proof
from vcache_backend.protocol.client import Client
from vcache_backend.supported import VLLM
from vcache_backend.vram_pool.devices import gpus

from .comparison import Comparison, Prompts, alike, difference, soil
from .instance import CPU_ENVIRONMENT, ENVIRONMENT, arguments, transfer
from .model import TINY_LLAMA, write_model

CHUNK, ANSWER, SOILED = 64, 16, 8192
"""Tokens of a chunk, of an answer that is compared, and of what fills the reader's blocks before;
the generated model's have room for half as many."""
PATIENT = ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0)
"""For clients that wait for others."""


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


def run(settings: Settings, tell: Callable[[str], None]) -> tuple[Proof, list[Finding]]:
    """Prove it: what was proved if all rows are ok, and the rows. tell: called with what happens.

    Takes minutes, and leaves no process behind, even if killed. VCacheError if it cannot be tried,
    or a process ends."""
    if said := missing(settings.model):
        raise VCacheError(f"{said}; {THERE}")
    if find_spec("vllm") is None:
        raise VCacheError(
            f"vLLM is not installed in {sys.prefix}, where vcache is: install vcache beside vLLM"
        )
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


class Pair(Comparison):
    """A metadata server, and two instances of vLLM, on two GPUs if there are two. The reference is
    the writer."""

    def __init__(
        self, undo: ExitStack, folder: Path, settings: Settings, tell: Callable[[str], None]
    ) -> None:
        """Starts all of it. undo: ends it. ChildFailed."""
        self._settings, self._tell = settings, tell
        self._in_place = settings.share == "in_place"
        self._longest = 4096 if settings.model else 1024
        name, version = VLLM.installed()
        cpu = name != VLLM.name or "cpu" in version or not has_nvidia()
        uuids = [""] if cpu else [gpu.uuid for gpu in gpus()]
        more = CPU_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if cpu else {}
        given = environment(**ENVIRONMENT, **more)
        server = MetadataServer(folder / "vcache.sock", folder / "server.log", given)
        undo.enter_context(server)
        self._client = undo.enter_context(Client(server.path, PATIENT))
        told = json.dumps(self._arguments(folder, server.path, cpu))
        command, children = module(f"{__name__}.instance", told), list[Child]()
        for name, uuid in zip(("writer", "reader"), uuids * 2, strict=False):
            own = given | {"CUDA_VISIBLE_DEVICES": uuid}
            children.append(undo.enter_context(Child(name, command, folder / f"{name}.log", own)))
        for child in children:
            tell(f"{child.name} starts")
            child.answer(600.0)
        writer, reader = children
        super().__init__(writer, reader, writer, ANSWER, cuts=not settings.model)
        what, words, block = writer.ask("facts", share=settings.share)
        self._prompts = Prompts(words, block if self._in_place else CHUNK, block)
        self._room = self._longest - 2 * ANSWER - block
        self.proof = Proof(combination=what, date=str(date.today()), model=settings.model)

    def _arguments(self, folder: Path, socket: Path, cpu: bool) -> dict[str, Any]:
        """Of vLLM's `LLM`."""
        model, share = self._settings.model, self._settings.share
        nbytes = (256 << 20 if cpu else 1 << 30) if model else 4 << 20
        least = 1 if self._in_place else CHUNK
        sections = {
            "server": {"socket": str(socket)},
            "client": msgspec.to_builtins(PATIENT),
            "engine": {"chunk_size": CHUNK},
            "connector": {"share": share, "min_hit_tokens": least, "unproved": True},
            "pool": {"segment_bytes": 0 if self._in_place else max(4 * nbytes, 64 << 20)},
        }
        more: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 8}
        more |= {"disable_log_stats": False, "kv_transfer_config": transfer(sections)}
        if not model:
            model = str(write_model(folder / "model", TINY_LLAMA))
            more |= {"dtype": "bfloat16", "block_size": 32 if cpu else 16}
        return arguments(model, nbytes, self._longest, cpu, **more)

    def look(self) -> Iterator[Finding]:
        """All rows. ChildFailed."""
        self._tell("the reader's blocks are filled with other prompts")
        soil(self.reader, self._prompts, SOILED, self._longest // 2)
        if (failed := self._failures()).status == "fail":
            yield failed
            return
        both = self.writer, self.reader
        same = [alike(both, self._prompts.new(length), ANSWER) for length in (64, 300)]
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
        lengths = [self._room * part // 6 for part in range(1, 7)]
        found, some = self.differences(self._prompts.hits(dict.fromkeys(lengths, 6)))
        wrong = Counter(filter(None, found))
        more = "; ".join(f"{count} {how}" for how, count in wrong.most_common(3))
        if not more and some < len(found):
            more = f"{some} of {len(found)} prompts hit something"
        compared = len(found) - found.count(None)
        return shown(what, found.count("") if 2 * some > len(found) else 0, compared, more)

    def _flip(self) -> Finding:
        """Change bytes in the writer's blocks, and change them back. In place the reader's answer
        then is another one, the writer's own; the pool's chunks stay as they are."""
        what = "a changed byte changes the answer"
        self._tell(f"{what}?")
        hit = self._prompts.whole(4 * CHUNK)
        expected, got = self.both(hit)
        checks = [not difference(expected, got)]
        for changed, got in zip((True, False), self.flips(hit), strict=True):
            own = self.own(hit)
            differs = difference(expected, own).startswith("differs")
            checks += [differs == changed, not difference(own if self._in_place else expected, got)]
        return shown(what, sum(checks), len(checks), "then it is changed back")

    def _churn(self) -> Finding:
        """Both work at once, for the same prompts and their beginnings."""
        if not (seconds := self._settings.seconds):
            return shown("under load", 1, 1, "left out")
        self._tell(f"under load, {seconds:g} s")
        longest, prompts, before = self._longest // 2, self._prompts, self._found()
        whole = [prompts.new(longest) for _ in range(6)]
        heads = [one[: longest // part] for one in whole for part in (1, 2, 3)]
        asked = [head + prompts.new(prompts.tail) for head in heads]
        both, total = (self.writer, self.reader), Counter[str]()
        for seed, child in enumerate(both):
            child.send("churn", prompts=asked, count=longest // 4, seconds=seconds, seed=seed)
        for child in both:
            total.update(child.answer(seconds + 180.0))
        requests = total.pop("requests")
        said = [f"{count:,} {name}" for name, count in total.items()]
        said.append(f"{self._found() - before:,} tokens from the other one")
        return shown("requests under load end", requests, requests, ", ".join(said))

    def _failures(self) -> Finding:
        said = {one.pid: one.text for one in self._client.stats().reports if one.level == "error"}
        more = "; ".join(dict.fromkeys(said.values()))
        return shown("instances without a failure", 2 - len(said), 2, more)

    def _found(self) -> int:
        return sum(found for _, found in self._client.stats().hits.values())
