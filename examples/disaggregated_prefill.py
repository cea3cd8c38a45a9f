"""Disaggregated prefill: one vLLM server computes prompts, another generates the answers, and KV
goes from GPU to GPU over NVLink.

    python examples/disaggregated_prefill.py [--share in_place|pool]
                                             [--order together|decode-first|prefill-first]
                                             [--model NAME] [--stay] [--json]
    python examples/disaggregated_prefill.py --cpu       # a tiny model, without a GPU

Starts a metadata server, a vLLM server for prefill on GPU 0, one for decode on GPU 1, and
examples/prefill_proxy.py in front of them. Then it sends a few prompts to the proxy and prints, for
each, how many tokens the decode server loaded, the time to first token, and whether its tokens are
those that the prefill server gives if it answers itself. With --stay the servers then stay up for
your own requests until Ctrl-C. Exit code 0 if every prompt was loaded from the prefill server and
all tokens are right.

The decode server reads the prefill server's KV cache, and nothing is copied in between. With
--share pool it reads a pool that the prefill server lends and fills.

By hand (each vLLM needs to see only its own GPU; it can map memory of the other one all the same):

    CUDA_VISIBLE_DEVICES=0 vllm serve MODEL --port 8100 --kv-transfer-config '{
      "kv_role":"kv_producer", "kv_connector":"VCacheConnector"}' &
    CUDA_VISIBLE_DEVICES=1 vllm serve MODEL --port 8200 --kv-transfer-config '{
      "kv_role":"kv_consumer", "kv_connector":"VCacheConnector"}' &
    # with a pool: "kv_connector_extra_config":{"pool":{"segment_bytes":"8 GiB"}} for the first;
    # for the second
    # "kv_connector_extra_config":{"connector":{"share":"pool"},"pool":{"segment_bytes":0}}
    python examples/prefill_proxy.py --prefill http://127.0.0.1:8100 \\
      --decode http://127.0.0.1:8200 --port 8000 &
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model":"MODEL", "prompt":"...", "max_tokens":64, "stream":true}'"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from prefill_proxy import ORDERS
from serving import Machine, Process, Site, ask, main, parser, prompts, report, two_servers

PROXY = Path(__file__).resolve().with_name("prefill_proxy.py")
SHARES = ("in_place", "pool")
UNSTORED = {"kv_transfer_params": {"vcache": {"store": False}}}


def one_round(site: Site, proxy: Process, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt through the proxy. Rows of the table.

    The right tokens are those of the prefill server, which is asked second. It has the prompt in
    vLLM's prefix cache, so it computes the same last tokens in a step of the same shape as the
    decode server did, and answers can be compared token by token."""
    rows = []
    for prompt in prompts:
        answer = ask(proxy, site.model, prompt)
        right = ask(site.servers[0], site.model, prompt, **UNSTORED)
        row = {
            "prompt": len(prompt),
            "source": "other server",
            "cached": answer.cached,
            "ttft_ms": answer.seconds * 1e3,
        }
        rows.append(
            {
                **row,
                "tokens_equal": answer.tokens == right.tokens,
                "left_in_pool": site.client.stats().chunks,
            }
        )
    return rows


def transfer(
    socket: Path, machine: Machine, share: str, role: str, pool: str | int
) -> dict[str, Any]:
    """`--kv-transfer-config` of a server that lends so much to the pool, if there is one."""
    return {
        "kv_connector": "VCacheConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "server": {"socket": str(socket)},
            "client": machine.client,
            "pool": {"segment_bytes": pool if share == "pool" else 0},
            "engine": {"chunk_size": machine.chunk},
            "connector": {"share": share, "min_hit_tokens": machine.chunk},
        },
    }


def run(options: argparse.Namespace, folder: Path) -> int:
    """Everything. The exit code."""
    front, *options.ports = options.ports
    # Only the prefill server lends memory, and only to a pool: it stores, the other loads.
    roles = (("kv_producer", options.machine.pool), ("kv_consumer", 0))
    transfers = [
        transfer(folder / "vcache.sock", options.machine, options.share, *role) for role in roles
    ]
    with two_servers(options, ("prefill server", "decode server"), transfers, folder) as site:
        prefill, decode = (server.url for server in site.servers)
        command = [
            sys.executable,
            str(PROXY),
            "--prefill",
            prefill,
            "--decode",
            decode,
            "--port",
            str(front),
        ]
        command += ["--order", options.order, "--wait-seconds", str(options.wait_seconds)]
        with Process(
            "the proxy", command, folder / "proxy.log", f"http://127.0.0.1:{front}"
        ) as proxy:
            proxy.wait(proxy.ready, 30)
            one_round(site, proxy, prompts(options, seed=0))  # warms up
            code = report(
                options, site, one_round(site, proxy, prompts(options, seed=1)), **UNSTORED
            )
            if options.stay:
                print(
                    (
                        f'send completions to {proxy.url}/v1/completions, model "{site.model}"; '
                        "Ctrl-C ends"
                    ),
                    flush=True,
                )
                while proxy.alive:
                    time.sleep(1)
                raise proxy.failure()
            return code


if __name__ == "__main__":
    options = parser(__doc__, [8000, 8100, 8200])
    options.add_argument(
        "--share", choices=SHARES, default=SHARES[0], help="how the servers share KV (in_place)"
    )
    options.add_argument(
        "--order",
        choices=ORDERS,
        default="together",
        help="which server the proxy asks first (together)",
    )
    options.add_argument(
        "--wait-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long decode waits for KV (30)",
    )
    options.add_argument(
        "--stay", action="store_true", help="go on serving after the prompts, until Ctrl-C"
    )
    sys.exit(main(options, run, needs=("vllm",)))
