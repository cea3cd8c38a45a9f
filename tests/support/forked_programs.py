"""Programs that start vLLM in processes of their own, with these forked from one that has imported
it: the import is most of their cost.

For `vllm_cases.forking`.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

FORKED = (
    "benchmarks.vllm.child",
    "vcache_backend.integration.vllm.model.report",
    "vcache_backend.prove.instance",
    "vllm.entrypoints.openai.api_server",
)
"""Modules that are run without a new Python; all other programs are started as ever."""


class Popen(subprocess.Popen[bytes]):
    """`subprocess.Popen`, but that `python -m MODULE ARGUMENT…` of one of `FORKED` is run in the
    fork.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        words = [command] if isinstance(command, str) else [w for w in command if w != "-P"]
        if words[:2] == [sys.executable, "-m"] and words[2] in FORKED:
            before: Callable[[], None] = more.pop("preexec_fn", lambda: None)
            environment = dict(os.environ if env is None else env)
            more["preexec_fn"] = lambda: _live(before, words[2:], environment)
            sys.stdout.flush()
            sys.stderr.flush()
        super().__init__(command, env=env, **more)


def _live(
    before: Callable[[], None], command: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """In the child, which has its standard streams and its process group: the life of a program."""
    status = 1
    try:
        before()
        # Among them the pipe by which the parent waits for an exec.
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2:
                with suppress(OSError):
                    os.close(fd)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        gc.enable()
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.argv = open(0, closefd=False), list(command)  # noqa: SIM115 - as long as it lives
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # as Python does
    except BaseException:  # noqa: BLE001 - the process's outermost loop
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(program: str, arguments: Sequence[str]) -> Any:
    """What `main` of a module returns, or the exit status of a file."""
    subprocess.Popen = Popen  # type: ignore[misc]
    if not program.endswith(".py"):
        return import_module(program).main(arguments)
    sys.argv[:] = [program, *arguments]
    sys.path.insert(0, os.path.dirname(program))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end.code
