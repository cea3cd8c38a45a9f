"""Does a wrong byte ever come from the store? Workers of two nodes read, check and store while everything below them is killed.

    python -m benchmarks.mooncake_chaos [--gets 100000] [--workers 4] [--accept]

Master, providers, workers and the processes that hold the workers' clients are killed or stopped at random and started again; objects
are replaced by damaged ones; pools and store are too small for what is stored. A get is a chunk that `retrieve` says is in place: all of
its bytes are compared with what they must be. With a GPU the workers' KV caches and pools lie on it. `--accept` makes the workers take
every object for a right one: then there must be wrong bytes, which shows that they would be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from vcache_backend.config import ByteSize, Config, EngineConfig, PoolConfig, ServerConfig, dump
from vcache_backend.offload import objects
from vcache_backend.transfer.keys import TokenHasher

from .metadata import PATIENT
from .mooncake_chaos_worker import CHUNK_BYTES, CHUNK_TOKENS, MOST_CHUNKS, Outcomes, Settings, layout, prompt, some_family
from .mooncake_depot import missing
from .mooncake_site import DEVICE, SECONDS, Site, load, write_rows
from .results import Row
from .vllm.process import Child, ChildFailed

GETS = 100_000
FAMILIES = 200
POOL_CHUNKS = 48
"""Of each worker; all prompts together have 2,400."""
STORE_BYTES = 16 << 20
"""Of each of two providers, of which four fifths are filled: not enough for what is stored."""
QUICK = {"retry_seconds": 0.1, "retry_max_seconds": 0.5, "negative_seconds": 0.2, "lookup_seconds": 0.1, "get_seconds": 1.0}
CALL_SECONDS = 3.0
SLACK_SECONDS = 3.0
"""What a busy machine may add to a deadline."""
DAMAGED = 4
"""Prompts whose objects are damaged at once."""
OBJECT_BYTES = objects.HEADER_BYTES + CHUNK_BYTES


def run(gets: int = GETS, workers: int = 4, accept: bool = False, pause: float = 0.4) -> list[Row]:
    """`mooncake_wrong_bytes`, which must be none; about six minutes. pause: seconds between two mishaps, on average."""
    with Chaos(workers, accept) as chaos:
        seconds = chaos.run(gets, pause)
        return [_row(chaos, seconds, accept)]


def _row(chaos: Chaos, seconds: float, accept: bool) -> Row:
    counts = chaos.counts
    late = max(
        counts.longest_lookup - QUICK["lookup_seconds"],
        counts.longest_retrieve - QUICK["get_seconds"],
        counts.longest_store,
    )
    ok = not counts.wrong_bytes and not counts.raised and not chaos.died and late <= SLACK_SECONDS
    said = json.dumps(msgspec.to_builtins(counts))
    what = f"{counts.got} gets on {DEVICE} in {seconds:.0f} s; {said}; mishaps: {json.dumps(chaos.mishaps)}"
    what = f"{what}; ended by themselves: {chaos.died}"
    what = f"{'every object accepted; ' if accept else ''}{what}; {load()}"
    return Row(
        "mooncake_wrong_bytes",
        counts.wrong_bytes,
        "B",
        0.0,
        float(counts.wrong_bytes),
        counts.got,
        0.0,
        what,
        "0",
        ok,
    )


class Chaos:
    """Two nodes with workers on a store, and what goes wrong with them."""

    def __init__(self, workers: int, accept: bool, only: Sequence[str] = ()) -> None:
        """only: the mishaps that there are; all by default."""
        self.counts, self.mishaps, self.died = Outcomes(), Counter[str](), 0
        self._accept, self._only, self._dice, self._lock, self._over = (
            accept,
            only,
            random.Random(),
            threading.Lock(),
            threading.Event(),
        )
        self._hasher = TokenHasher(layout().namespace(), CHUNK_TOKENS)
        self._errors: list[BaseException] = []
        with ExitStack() as undo:
            self._site = undo.enter_context(
                Site(STORE_BYTES, STORE_BYTES, client_ttl=3, default_kv_lease_ttl=200, eviction_high_watermark_ratio=0.8)
            )
            self._nodes = [self._site.node() for _ in range(2)]
            self._workers: list[Child] = []
            undo.callback(self._kill_all)
            for number in range(workers):
                self._workers.append(self._start(number))
            self._undo = undo.pop_all()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._undo.close()

    def run(self, gets: int, pause: float) -> float:
        """Until so many chunks were got and checked, or, where every object is accepted, a byte was wrong: how many seconds that took."""
        jobs: list[Callable[[], None]] = [lambda number=number: self._work(number) for number in range(len(self._workers))]  # type: ignore[misc]
        threads = [threading.Thread(target=self._guarded, args=(job,)) for job in [*jobs, lambda: self._break(pause)]]
        started = shown = time.monotonic()
        for thread in threads:
            thread.start()
        while self.counts.got < gets and not self._errors and not (self._accept and self.counts.wrong_bytes):
            time.sleep(0.1)
            if time.monotonic() - shown > 15:
                shown = time.monotonic()
                print(
                    f"{self.counts.got} of {gets} gets, {self.counts.wrong_bytes} wrong bytes",
                    file=sys.stderr,
                    flush=True,
                )
        self._over.set()
        for thread in threads:
            thread.join(SECONDS)
        if self._errors:
            raise self._errors[0]
        return time.monotonic() - started

    # ---- workers

    def _start(self, number: int) -> Child:
        offload = self._site.depot.offload(
            **QUICK, call_seconds=CALL_SECONDS, staging_bytes=ByteSize(4 << 20), promote=number % 4 < 2
        )
        config = Config(
            server=ServerConfig(socket=str(self._nodes[number % 2])),
            client=PATIENT,
            pool=PoolConfig(device=DEVICE, segment_bytes=ByteSize(POOL_CHUNKS * CHUNK_BYTES)),
            engine=EngineConfig(chunk_size=CHUNK_TOKENS),
            offload=offload,
        )
        settings = Settings(dump(config), self._dice.getrandbits(30), FAMILIES, self._accept, DEVICE.replace("host", "cpu"))
        command = [
            sys.executable,
            "-m",
            "benchmarks.mooncake_chaos_worker",
            msgspec.json.encode(settings).decode(),
        ]
        return Child(f"worker {number}", command, dict(os.environ), self._site.folder / f"worker{number}.log")

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _work(self, number: int) -> None:
        while not self._over.is_set():
            worker = self._workers[number]
            try:
                answer = worker.ask("serve", SECONDS, lasting=0.5)
            except ChildFailed:
                killed = worker.name in self.mishaps
                with self._lock:
                    self.mishaps.pop(worker.name, None)
                    self.died += not killed
                if not killed:
                    print(worker.tail(), file=sys.stderr, flush=True)
                worker.kill()
                self._workers[number] = self._start(number)
                continue
            with self._lock:
                self.counts.add(msgspec.convert(answer, Outcomes))

    # ---- mishaps

    def _break(self, pause: float) -> None:
        depot, dice = self._site.depot, self._dice
        kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "objects damaged": (8, self._damage),
            "provider killed": (2, lambda: self._killed(dice.choice(depot.providers))),
            "provider stopped": (3, lambda: self._stopped(dice.choice(depot.providers))),
            "master killed": (1, lambda: self._killed(depot.master)),
            "master stopped": (2, lambda: self._stopped(depot.master)),
            "gateway killed": (3, lambda: self._signal(self._gateway(), signal.SIGKILL)),
            "gateway stopped": (2, lambda: self._hang(self._gateway())),
            "worker killed": (2, self._kill_worker),
        }
        kinds = {kind: kinds[kind] for kind in self._only or kinds}
        while not self._over.wait(dice.expovariate(1 / pause)):
            (kind,) = dice.choices(list(kinds), [weight for weight, _ in kinds.values()])
            with suppress(ProcessLookupError):
                kinds[kind][1]()
                self._count(kind, 1)

    def _count(self, kind: str, more: int) -> None:
        with self._lock:
            self.mishaps[kind] += more

    def _killed(self, program: Any) -> None:
        program.kill()
        self._over.wait(self._dice.uniform(0, 1))
        program.restart()

    def _stopped(self, program: Any) -> None:
        program.stop()
        self._over.wait(self._dice.uniform(0, 3))
        program.go_on()

    def _hang(self, pid: int) -> None:
        """Longer, now and then, than a call may take: the process is replaced then."""
        self._signal(pid, signal.SIGSTOP)
        self._over.wait(self._dice.uniform(0, 1.5 * CALL_SECONDS))
        self._signal(pid, signal.SIGCONT)

    def _kill_worker(self) -> None:
        worker = self._dice.choice(self._workers)
        self._count(worker.name, 1)
        self._signal(worker.pid, signal.SIGKILL)

    def _gateway(self) -> int:
        """Of some worker. Raises ProcessLookupError if it has none now."""
        found = children(self._dice.choice(self._workers).pid)
        if not found:
            raise ProcessLookupError
        return found[0]

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        os.kill(pid, number)

    def _damage(self) -> None:
        """Objects of a few prompts, by a client of its own, which may itself be stuck or lose its connection."""
        dice = self._dice
        prompts = [prompt(some_family(dice, FAMILIES), MOST_CHUNKS) for _ in range(DAMAGED)]
        names = [objects.name(key) for tokens in prompts for key in self._hasher.keys(tokens)]
        try:
            if not hasattr(self, "_vandal"):
                self._vandal = self._site.raw(DAMAGED * MOST_CHUNKS * OBJECT_BYTES)
            how = dice.choice(["flip", "cut", "zero", "next"])
            self._count("objects replaced", self._vandal.ask("damage", 5.0, names=names, size=OBJECT_BYTES, how=how))
        except ChildFailed:
            with suppress(AttributeError):
                self._vandal.kill()
                del self._vandal

    def _guarded(self, job: Callable[[], None]) -> None:
        """What fails here is the benchmark's own fault, and ends it."""
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._errors.append(error)
            self._over.set()


def children(pid: int) -> list[int]:
    """Processes that a process started, in any thread."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if there was a wrong byte, an exception, or a call that was late; with --accept, if there was none."""
    parser = argparse.ArgumentParser(prog="benchmarks.mooncake_chaos", description=__doc__)
    parser.add_argument("--gets", type=int, default=GETS, help="chunks to get and check (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between two mishaps, on average (default: %(default)s)")
    parser.add_argument("--accept", action="store_true", help="take every object for a right one: there must be wrong bytes")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if missing():
        Console(stderr=True).print(f"nothing is measured: {missing()}")
        return 2
    rows = run(options.gets, options.workers, options.accept, options.pause)
    missed = write_rows(rows, options.out)
    return int(rows[0].value == 0) if options.accept else missed


if __name__ == "__main__":
    raise SystemExit(main())
