"""Asks the vLLM that is installed here which of its models are cached, and how.

python scripts/which_models.py run FILE [NAME...]   asks vLLM, for some minutes; FILE gets the
                                                    answers. With names, only about these
python scripts/which_models.py write FILE           replaces the tables in docs/vllm/models.md

For each architecture in vLLM's registry of text generation and of multimodal models, vLLM makes the
model without weights, its KV cache specifications and its block tables. Our connector decides as at
the start of an instance (`integration.vllm.model.report`). Configurations are transformers' or
vLLM's defaults, with what which_models.json beside this file says of an architecture: there are
layers' patterns and shapes as published, with few layers and experts. An architecture without
usable defaults is counted as not asked.

Without a GPU vLLM is told that it runs on an H200 (`as_on_h200`); PYTHONPATH may name the unpacked
wheel of another vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "vllm" / "models.md"
BEGIN, END = (
    "<!-- python scripts/which_models.py write benchmarks/results/models.json -->\n",
    "<!-- end -->\n",
)
SECONDS = 240
"""How long one architecture may take."""
HOW = {
    "in place": "in place",
    "pool": "through a pool only",
    "refused": "refused",
    "not asked": "not asked",
}
IN_A_CELL = 16
"""The most names in a cell of a table. More follow behind the table, by their first letter."""
FEW = {"refused", "not asked"}
"""Said with the reason."""
SHAPES = ROOT / "benchmarks" / "vllm" / "models.json"
"""Configurations of some models, with fewer layers."""
SAID = Path(__file__).with_suffix(".json")
"""By architecture: a configuration, or without `model_type` what the defaults lack."""
BACKENDS = {
    "FlintForCausalLM": "FLASHINFER",
    "Rnj1ForCausalLM": "TRITON_ATTN",
    "Step1ForCausalLM": "TRITON_ATTN",
}
"""What vLLM says that these models need."""
MISSING = {"flashinfer", "timm", "torchvision"}
"""Packages that some models import and need for nothing that is asked here."""
REFUSED = {"Step5ForCausalLM": "vLLM starts it with its own connectors for Mooncake and NIXL alone"}
"""By vLLM, with our connector."""
UNASKED = {
    "DeciLMForCausalLM": "its configuration is code of the model's repository",
    "FlintForCausalLM": "vLLM starts it on Blackwell alone",
}
KINDS = {"Llama4ForCausalLM": "llama4_text"}
_FITTING = re.compile(r"set engine.chunk_size \(with LMCache: chunk_size\) to (\d+)")


def run(file: Path, wanted: Collection[str]) -> None:
    """Ask about each architecture in a process of its own, forked once vLLM is imported. wanted:
    see the module's text."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    where = _gpu()
    import vllm
    from vllm.model_executor.models import registry

    from vcache_backend.integration.vllm.model import report  # noqa: F401 - children need it

    # By itself vLLM looks at each model's class in another new process, for ten seconds.
    registry._run_in_subprocess = lambda look: look()
    told: dict[str, Any] = (
        json.loads(file.read_text()) if wanted else {"text": {}, "multimodal": {}}
    )
    told |= {"vllm": vllm.__version__, "gpu": where}
    kinds = {"text": registry._TEXT_GENERATION_MODELS, "multimodal": registry._MULTIMODAL_MODELS}
    for kind, names in kinds.items():
        for name in names:
            if wanted and name not in wanted:
                continue
            told[kind][name] = _in_child(name)
            print(name, told[kind][name], file=sys.stderr, flush=True)
            file.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


def _gpu() -> str:
    """Name the GPU here, or the one that vLLM is told."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    import as_on_h200

    # Once transformers has looked for them.
    import transformers.models.auto.image_processing_auto  # noqa: F401

    as_on_h200.FINDER.names |= MISSING
    return "none; vLLM was told of an NVIDIA H200"


def _in_child(name: str) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        signal.alarm(SECONDS)
        try:
            answer = _ask(name)
        except Exception as error:  # noqa: BLE001 - whatever vLLM says of a model is its answer
            said = REFUSED.get(name) or UNASKED.get(name) or " ".join(str(error).split())[:200]
            answer = {"how": "refused" if name in REFUSED else "not asked", "why": said}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        told = answers.read()
    os.waitpid(pid, 0)
    late = {"how": "not asked", "why": f"no answer within {SECONDS} s"}
    return json.loads(told) if told else late


def _ask(name: str) -> dict[str, Any]:
    from vcache_backend.config import from_dict
    from vcache_backend.integration.vllm.model import report

    made = report.EngineArgs
    backend = BACKENDS.get(name)
    needs = {"attention_config": {"backend": backend}} if backend else {}
    report.EngineArgs = lambda **given: made(**given, **needs)
    with tempfile.TemporaryDirectory() as folder:
        config = _configuration(name)
        Path(folder, "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        settings: dict[str, Any] = {"connector": {"model": name}}
        found = report.report(folder, from_dict(settings))
        # Another chunk size is a setting, and no refusal.
        if fitting := _FITTING.search(found.refused):
            settings |= {"engine": {"chunk_size": int(fitting[1])}}
            found = report.report(folder, from_dict(settings))
    layers = [
        f"{count} {kind}{window or ''}/{block}"
        for (kind, window, block), count in found.layers.items()
    ]
    answer = {"layers": " + ".join(layers), "hits": found.hits}
    if found.refused:
        return answer | {"how": "refused", "why": found.refused}
    return answer | {"how": found.settings.connector.share.replace("_", " ")}


def _configuration(name: str) -> dict[str, Any]:
    """The configuration with which an architecture is asked. LookupError if there is none."""
    said: dict[str, Any] = json.loads(SAID.read_text()).get(name, {})
    if "model_type" in said:
        return said
    for shape in json.loads(SHAPES.read_text()).values():
        if shape.get("architectures") == [name]:
            return dict(shape) | said
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for kind in _kinds(name, [*CONFIG_MAPPING, *_CONFIG_REGISTRY]):
        made = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else CONFIG_MAPPING[kind]
        defaults: dict[str, Any] = json.loads(made().to_json_string(use_diff=False))
        return {"torch_dtype": "bfloat16"} | defaults | {"dtype": "bfloat16"} | said
    raise LookupError("neither vLLM nor transformers has a configuration for it")


def _kinds(name: str, known: list[str]) -> Iterator[str]:
    """Types of configurations that may be an architecture's."""
    from transformers.models.auto import modeling_auto

    if name in KINDS:
        yield KINDS[name]
    for tasks in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM"):
        named = getattr(modeling_auto, f"MODEL_FOR_{tasks}_MAPPING_NAMES", {})
        for kind, names in named.items():
            if name in (names if isinstance(names, tuple) else (names,)):
                yield kind
    plain = re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$", "", name).lower()
    yield from (kind for kind in known if re.sub("[-_]", "", kind) == plain)


def tables(told: Mapping[str, Any]) -> str:
    """The page's tables: how many architectures are cached in which way, and the names."""
    text, others = told["text"], told["multimodal"]
    asked = {name: answer for name, answer in others.items() if answer["how"] != "not asked"}
    made = [f"Of vLLM {told['vllm']}'s {len(text)} architectures that generate text:\n\n"]
    made += [*_table(text), "\n"]
    made += [f"Of {len(others)} that also take images or sound, {len(asked)} were asked; the "]
    made += ["others keep what their\nlanguage models keep:\n\n", *_table(asked)]
    return "".join(made)


def _table(asked: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    named: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, answer in asked.items():
        why = _reason(answer["why"]) if answer["how"] in FEW else _kind(answer)
        named[answer["how"], why].append(_short(name))
    rows = [
        (f"{words}: {why}", sorted(names))
        for how, words in HOW.items()
        for (which, why), names in sorted(named.items())
        if which == how
    ]
    yield "| | architectures | |\n| --- | --- | --- |\n"
    for what, names in rows:
        said = ", ".join(names) if len(names) <= IN_A_CELL else "below"
        yield f"| {what} | {len(names)} | {said} |\n"
    for what, names in rows:
        if len(names) > IN_A_CELL:
            yield f"\n<details><summary>{what} ({len(names)})</summary>\n\n"
            for _, alike in groupby(names, lambda name: name[0]):
                yield f"- {', '.join(alike)}\n"
            yield "\n</details>\n"


def _reason(why: str) -> str:
    """A refusal without the layer's name and the change to make."""
    return why.rpartition("and its group: ")[2].partition(": no setting")[0].replace("|", "/")


def _kind(answer: Mapping[str, Any]) -> str:
    """Name what an architecture's layers keep."""
    layers = re.findall(r"\d+ ([a-zA-Z]+)\d*/", answer["layers"])
    words = {"full": "full attention", "window": "windows", "state": "states", "local": "local"}
    words["again"] = "layers that no hit needs"
    return ", ".join(said for kind, said in words.items() if kind in layers)


def _short(name: str) -> str:
    return re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", name)


def main(arguments: list[str]) -> int:
    """See the module's text."""
    what, *files = arguments or [""]
    if what not in ("run", "write") or not files or (what == "write" and len(files) > 1):
        print(__doc__)
        return 2
    file = Path(files[0])
    if what == "run":
        run(file, files[1:])
        return 0
    before, rest = PAGE.read_text().split(BEGIN)
    made = tables(json.loads(file.read_text()))
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END, 1)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
