"""Two vLLM instances on two GPUs: one computes a prompt, the other reads its KV over NVLink.
LMCache connects them to the pool.

    python examples/two_vllm_instances.py [--model NAME] [--lengths 1024,4096,16384] [--json]
                                          [-- OPTIONS OF vllm serve]
    python examples/two_vllm_instances.py --cpu     # a tiny model and a pool in host memory

Starts a metadata server and the instances, with the settings of configs/lmcache-vcache.yaml. Each
prompt goes to A, which computes it; to A again, which has it in vLLM's own prefix cache; and to B,
which has only the pool. Then it shows `vcache status`. Without --model the weights are generated,
and nothing is downloaded. Exit code 0 if B loaded every prompt from the pool and answered with the
same tokens as A did from its own cache. All started processes end with this program."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

try:
    import yaml
    from serving import ROOT, Machine, Site, ask, main, parser, prompts, report, two_servers
except ModuleNotFoundError as absent:
    sys.exit(
        f"{Path(sys.argv[0]).name}: this Python has no {absent.name}: pip install "
        "'/path/to/vcache[vllm,lmcache]'"
    )

STORE_SECONDS = 10.0
TRANSFER = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def lmcache(machine: Machine, socket: Path) -> dict[str, Any]:
    """configs/lmcache-vcache.yaml, with what is different in this run."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "configs/lmcache-vcache.yaml").read_text())
    settings["chunk_size"] = machine.chunk
    settings["extra_config"]["vcache"] = {
        "server": {"socket": str(socket)},
        "client": machine.client,
        "pool": {"segment_bytes": machine.pool},
    }
    return settings


def one_round(site: Site, prompts: list[list[int]], chunk: int) -> list[dict[str, Any]]:
    """Each prompt to A, to A again, and to B. Rows of the table; `tokens_equal`: to A's answer from
    its own cache."""
    rows = []
    a, b = site.servers
    for prompt in prompts:
        wanted = site.client.stats().chunks + len(prompt) // chunk
        computed = ask(a, site.model, prompt)
        deadline = time.monotonic() + STORE_SECONDS
        while site.client.stats().chunks < wanted and time.monotonic() < deadline:
            time.sleep(0.01)  # chunks become visible in the background, once they are copied
        if (stored := site.client.stats().chunks) < wanted:
            raise a.failure(
                f"has stored too little: the pool holds {stored} chunks where {wanted} are due "
                f"after {STORE_SECONDS:g} s"
            )
        own, pool = ask(a, site.model, prompt), ask(b, site.model, prompt)
        for name, source, answer in (
            ("A", "computed", computed),
            ("A", "own cache", own),
            ("B", "pool", pool),
        ):
            row = {
                "prompt": len(prompt),
                "instance": name,
                "source": source,
                "cached": answer.cached,
            }
            rows.append(
                {
                    **row,
                    "ttft_ms": answer.seconds * 1e3,
                    "tokens_equal": answer.tokens == own.tokens,
                }
            )
    return rows


def run(options: argparse.Namespace, folder: Path) -> int:
    """Everything. The exit code."""
    file = folder / "lmcache.yaml"
    file.write_text(json.dumps(lmcache(options.machine, folder / "vcache.sock")))
    environment = {"LMCACHE_CONFIG_FILE": str(file)}
    with two_servers(
        options, ("instance A", "instance B"), [TRANSFER, TRANSFER], folder, environment
    ) as site:
        one_round(site, prompts(options, seed=0), options.machine.chunk)  # warms up
        code = report(
            options, site, one_round(site, prompts(options, seed=1), options.machine.chunk)
        )
        if not options.json:
            status = [
                sys.executable,
                "-m",
                "vcache_backend",
                "status",
                "--socket",
                str(folder / "vcache.sock"),
            ]
            subprocess.run(status, check=False, timeout=30)
    return code


if __name__ == "__main__":
    sys.exit(main(parser(__doc__, [8100, 8200]), run, needs=("vllm", "lmcache")))
