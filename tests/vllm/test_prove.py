"""`vcache prove`: a real one on the CPU, and what ends it early."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from processes import Worker, children_of, eventually, script, with_words
from vllm_cases import home

from vcache_backend import cli, prove
from vcache_backend.errors import VCacheError
from vcache_backend.prove import Pair, Settings
from vcache_backend.prove.comparison import Comparison, Prompts, difference

needs_vllm = vllm_cases.needs_vllm

START_SECONDS = 240.0
"""It imports vLLM first."""


def proved(_: object, settings: Settings) -> Any:
    """In a process from which vLLM's are forked."""
    from forked_programs import Popen

    subprocess.Popen = Popen  # type: ignore[misc]
    return prove.run(settings, print)


@needs_vllm
def test_the_installed_vllm_is_proved(tmp_path: Path) -> None:
    with Worker(home(), object, name="prove", log=tmp_path / "log") as worker:
        proof, shown = worker.ask(proved, Settings(share="in_place", seconds=0.5), seconds=300.0)
    assert [one for one in shown if one.status != "ok"] == []
    assert [int(one.detail.split(" ")[0]) > 1 for one in shown] == [True] * 6
    assert (proof.combination.share, proof.combination.device) == ("in_place", "cpu")


@contextmanager
def temporary() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder that the command takes for this machine's temporary one, and its environment. Behind
    a long path it would work in another folder, for its sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder), {"TMPDIR": folder, "XDG_STATE_HOME": f"{folder}/state"}


@needs_vllm
def test_a_killed_one_leaves_no_process_behind() -> None:
    program = "from vcache_backend.cli import main; main()"
    with temporary() as (folder, places), script(program, "prove", **places) as command:
        eventually(lambda: len(with_words("prove.instance", folder)) == 2, START_SECONDS, 0.1)
        command.kill()
        eventually(lambda: not with_words(folder), every=0.1)


def prove_forked(_: object) -> Any:
    """The command, whose instances are forked; its exit status."""
    from forked_programs import Popen

    subprocess.Popen, sys.argv[1:], tempfile.tempdir = Popen, ["prove"], None  # type: ignore[misc]
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code


@needs_vllm
@pytest.mark.parametrize(
    ("who", "how", "status", "said"),
    [
        ("itself", signal.SIGINT, 130, ""),
        ("an instance", signal.SIGKILL, 1, "vcache: reader: ended with code -9"),
    ],
)
def test_what_ends_it_leaves_nothing_behind(
    tmp_path: Path, who: str, how: signal.Signals, status: int, said: str
) -> None:
    with (
        temporary() as (folder, places),
        Worker(
            home(), object, log=tmp_path / "log", environment=vllm_cases.changed(places)
        ) as command,
    ):
        command.tell(prove_forked)
        eventually(lambda: "writer starts" in command.log, START_SECONDS)
        _, _, reader = started = children_of(command.pid)
        os.kill(command.pid if who == "itself" else reader, how)
        assert command.answer() == status
        assert command.log.splitlines()[-1].startswith(said)
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
        assert not [*folder.glob("vcache-prove-*")]


def test_without_vllm_or_disk_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(VCacheError, match="it cannot be tried: .*No space left on device"):
        prove.run(Settings(), print)
    monkeypatch.setattr(prove, "find_spec", lambda _: None)
    with pytest.raises(VCacheError, match="vLLM is not installed"):
        prove.run(Settings(), print)


@pytest.mark.parametrize(("chunk", "block"), [(64, 16), (16, 16)], ids=["pool", "in place"])
def test_what_prompts_have_in_common_ends_less_than_a_block_behind_a_chunk(
    chunk: int, block: int
) -> None:
    hits = Prompts(1 << 30, chunk, block).hits(dict.fromkeys((chunk, 300, 512), 12))
    pairs = [zip(hit.then, *hit.first, strict=False) for hit in hits]
    shared = [len([*takewhile(lambda same: len({*same}) == 1, each)]) for each in pairs]
    assert chunk <= min(shared) <= max(len(hit.then) for hit in hits) < 512 + chunk + block
    behind = {length % chunk for length in shared}
    assert {1, block - 1} < behind < {*range(block)}
    # LMCache would compute one token more than vLLM of a prompt that ends with a chunk.
    ending = [hit for hit in hits if hit.then == hit.first[-1] and len(hit.then) % chunk == 0]
    assert bool(ending) == (chunk == block)
    assert Counter((len(hit.first), hit.then in hit.first) for hit in hits) == {
        (1, True): 24,
        (1, False): 6,
        (2, False): 6,
    }
    assert len({tuple(hit.then[:chunk]) for hit in hits}) == len(hits)


def test_an_answer_is_right_only_with_the_same_bits_after_a_hit_of_the_same_length() -> None:
    steps = [[(1, -0.5), (2, math.nan)], [(3, -0.25)]]
    right = {"tokens": [1, 3], "logprobs": steps, "cached": 64, "ttft": 0.1}
    assert difference(right, {**right, "ttft": 9.9}) == ""
    assert difference(right, {**right, "cached": 48}) == "48 tokens cached where 64 were due"
    for tokens, said in ([1, 3], "equal"), ([1, 4], "differ"):
        other = {**right, "tokens": tokens, "logprobs": [steps[0], [(3, -0.2500001)]]}
        assert difference(right, other) == f"differs from step 1 on; tokens {said}"


class Answers:
    """An instance that has so many tokens of the next prompts cached, over and over."""

    def __init__(self, *cached: int) -> None:
        self._cached = cycle(cached)

    def send(self, command: str, **asked: Any) -> None: ...

    def answer(self, seconds: float = 0.0) -> Any:
        return {"tokens": [1], "logprobs": [[(1, -0.25)]], "cached": next(self._cached)}

    def ask(self, command: str, seconds: float = 0.0, **asked: Any) -> Any:
        return self.answer() if "extra_args" in asked else None


@pytest.mark.parametrize(
    ("cached", "reads", "status", "said"),
    [
        ([64, 64, 0], [64, 64, 0], "ok", "24 of 24: 24 of 36 prompts hit something"),
        ([64, 64, 0], [64, 64, 64], "fail", "24 of 36: 12 64 tokens cached where 0 were due"),
        ([64, 0, 0], [64, 0, 0], "fail", "0 of 12: 12 of 36 prompts hit something"),
        ([0], [0], "fail", "0 of 0: 0 of 36 prompts hit something"),
    ],
)
def test_what_neither_has_cached_is_no_right_hit(
    cached: list[int], reads: list[int], status: str, said: str
) -> None:
    made: Any = object.__new__(Pair)
    made._tell, made._room, made._prompts = (lambda _: None), 512, Prompts(1 << 30, 16, 16)
    writer: Any = Answers(*cached)
    reader: Any = Answers(*reads)
    Comparison.__init__(made, writer, reader, writer, 1)
    row = made._compare("hits")
    assert (row.status, row.detail) == (status, said)


class Misplaced(Answers):
    """One that has loaded the right blocks, but each in another's place."""

    def ask(self, command: str, seconds: float = 0.0, **asked: Any) -> Any:
        return {"tokens": [1], "logprobs": [[(1, -0.5)]], "cached": 64}


def test_a_right_answer_is_no_right_hit_if_the_reader_has_a_beginning_wrong() -> None:
    """Attention adds up in any order: where blocks lie shows only in a prompt that ends between."""
    hit, writer = Prompts(1 << 30, 16, 16).whole(128), Answers(64)
    answers: Any = Answers(64), Misplaced(64)
    for reader, right in zip(answers, (True, False), strict=True):
        made: Any = Comparison
        (how,), some = made(writer, reader, writer, 1, cuts=True).differences([hit])
        assert (how == "", some) == (right, 1)
