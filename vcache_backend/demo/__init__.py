"""`vcache demo`: a real metadata server and real workers replay an excerpt of a public trace, and every byte is checked."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vcache_backend.config import Config, load
from vcache_backend.demo.lockstep import replay
from vcache_backend.demo.plan import choose_devices, make_plan
from vcache_backend.demo.report import render, summarize
from vcache_backend.demo.trace import excerpt
from vcache_backend.errors import ConfigError


def run(config: Config | None = None, *, requests: int | None = None, as_json: bool = False, corrupt: int | None = None) -> int:
    """Run the demo and print its result on stdout, progress on stderr. 0 only if every byte and the hit rate are right, else 1.

    `config`: of it only `engine.chunk_size` and `pool.max_ctas` count; socket, devices and sizes are the demo's own.
    `requests`: only the first so many of the excerpt. `corrupt`: see `replay`. Raises DemoError or ConfigError when it cannot run;
    no process and no file is left behind, on Ctrl-C neither.
    """
    config = config or load()
    if requests is not None and requests < 1:
        raise ConfigError(f"a demo of {requests} requests; expected at least 1")
    plan = make_plan(excerpt()[:requests], config.engine.chunk_size, choose_devices())
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{len(plan.devices)} workers, {', '.join(plan.devices)}", total=len(plan.requests))
        outcome = replay(plan, config, lambda count: bar.update(task, completed=count), corrupt)
    summary = summarize(plan, outcome)
    console = Console()
    if as_json:
        console.print_json(msgspec.json.encode(summary).decode())
    else:
        console.print(render(summary))
    return 0 if summary.ok else 1
