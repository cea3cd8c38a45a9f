"""Identifies the weights that vLLM loads, and the settings that change their results, as text that
is equal in every process. Imports neither torch nor vLLM."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ... import BOOTED, booted

_SNAPSHOT = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{7,64})(?:/|$)")
_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that read the same files."""
_ELSEWHERE = ("ipc_cache", "modelexpress")
"""Load formats whose weights another process holds and identifies by less than their content."""
_ENVIRONMENT = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
)
"""Variables that change a model's results beyond the rounding of another kernel; and the variable
that makes results independent of the batch."""
ROPE = "rope_parameters rope_scaling rope_theta partial_rotary_factor rope_local_base_freq"
_IMAGES = (
    "media_io_kwargs mm_processor_kwargs mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
    "video_pruning_rate"
)
"""Settings that change an instance's reading of an image. vLLM's hash of the image covers its
content and the request's own settings."""


def weights(model: Any, load: Any = None) -> tuple[str, str]:
    """(name, revision) of the weights in vLLM's `ModelConfig`. load: vLLM's `LoadConfig`.

    From the Hugging Face hub: the repository and its commit, even if vLLM names a folder of the
    hub's cache. Local files: the real path, and a digest of file names, sizes and times, because
    the pool outlives weights that are overwritten in place. So equal copies under two paths do not
    share, unless the user gives them one name. The revision is empty if vcache cannot know which
    weights vLLM has loaded: weights in object storage or in another process, local files that
    cannot be read, and local files that changed after this process began, since vLLM reads them
    before vcache does."""
    # For weights in object storage vLLM copies the small files into a folder, and keeps the
    # address in `model_weights`.
    name = str(getattr(model, "model_weights", "") or model.model)
    if text(getattr(load, "load_format", "")) in _ELSEWHERE:
        return name, ""
    try:
        identity = located(name)
        # Read the times last: changes during the reading count, too.
        if identity and identity[1].startswith("files-") and _changed_lately(Path(name)):
            return identity[0], ""
    except OSError:
        return name, ""
    revision = getattr(model, "revision", None)
    # The text of vLLM's resolved revision is the branch's name: read the commit instead.
    return identity or (name, str(getattr(revision, "resolved", revision) or ""))


def located(name: str) -> tuple[str, str] | None:
    """(name, revision) of the weights at a path, see `weights`. None if nothing is at the path,
    OSError if it cannot be read."""
    if snapshot := _SNAPSHOT.search(name):
        return snapshot["repository"].replace("--", "/", 1), snapshot["commit"]
    path = Path(name).resolve()
    if not path.exists():
        return None
    found = [(file.name, file.stat()) for file in _files(path)]
    seen = [(os.fsencode(name).hex(), one.st_size, one.st_mtime_ns) for name, one in found]
    return str(path), f"files-{digest(seen)}"


def _files(path: Path) -> list[Path]:
    """The file at `path`, or the folder's files without hidden ones and subfolders."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.name[0] != ".")


def _changed_lately(path: Path) -> bool:
    """Whether a file at `path`, or a link on the way to it, has been written, replaced or renamed
    since this process began. OSError if unreadable."""
    from vcache_backend.metadata_server.processes import started  # each process of vLLM imports us

    ways, times = [path.absolute()], list[float]()
    for way in ways:
        for link in filter(Path.is_symlink, (way, *way.parents)):
            times.append(link.lstat().st_ctime)
            ways.append(link.parent / link.readlink())
    for file in _files(path):
        times += file.stat().st_ctime, file.lstat().st_ctime
    # The times are exact to 0.1 s. vLLM needs more before it loads weights.
    began = started(os.getpid()) / os.sysconf("SC_CLK_TCK") + 0.1
    # Files written before the clock was set forward keep the earlier times.
    return max(times, default=0.0) > began + min(BOOTED, booted())


# ---- settings


def settings(vllm_config: Any, rotary: str) -> dict[str, str]:
    """Settings that change a block's bytes and have no field of their own in `Layout`."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    images = set_in(model.multimodal_config, _IMAGES)
    if "video_pruning_rate" in images:
        images |= set_in(model.multimodal_config, "video_pruning_method")
    adapters = set_in(vllm_config.lora_config, "target_modules enable_tower_connector_lora")
    dtype = text(getattr(vllm_config.lora_config, "lora_dtype", "auto"))
    if dtype not in ("auto", text(model.dtype)):
        adapters["dtype"] = dtype
    variables = {name: os.environ.get(name, "") for name in _ENVIRONMENT}
    variables = {name: value for name, value in variables.items() if value not in ("", "0")}
    to_dict = getattr(getattr(model, "hf_config", None), "to_dict", dict)
    found = {
        "engine": f"vllm {getattr(sys.modules.get('vllm'), '__version__', '')}",
        "model_config": digest(plain(to_dict())),
        "model_layers": str(model.get_total_num_hidden_layers()),
        "model_dtype": dtype_name(model.dtype),
        "quantization": str(model.quantization or ""),
        "quantization_config": digest(plain(getattr(model, "quantization_config", None))),
        "weights": _loaded(vllm_config.load_config),
        "code": digest(_foreign_code(model)),
        "environment": digest(variables),
        "kv_skip_layers": ",".join(map(str, cache.kv_cache_dtype_skip_layers or ())),
        "sliding_window": "off" if getattr(model, "disable_sliding_window", False) else "",
        "multimodal": digest(images),
        "draft": _draft(vllm_config.speculative_config),
        "longest": _longest(model, rotary),
        "adapted": digest(adapters),
    }
    return {name: value for name, value in found.items() if value}


def set_in(section: Any, names: str) -> dict[str, Any]:
    """The settings of a section of vLLM's configuration that are set, as plain values. names:
    separated by blanks."""
    given = {name: plain(getattr(section, name, None)) for name in names.split()}
    return {name: value for name, value in given.items() if value}


def _longest(model: Any, rotary: str) -> str:
    """`max_model_len` if it changes how vLLM rotates all positions (LongRoPE; dynamic NTK in some
    models) or scales queries (Llama 4, with the generation settings that may override it);
    otherwise empty."""
    scales = str(getattr(model.hf_config, "model_type", "")).startswith("llama4")
    settings = [model.generation_config, model.override_generation_config] if scales else []
    matters = scales or "longrope" in rotary or "dynamic" in rotary
    return f"{model.max_model_len} {digest(settings)}".strip() if matters else ""


def _loaded(load: Any) -> str:
    """Name a load format that reads other files than safetensors, with a digest of its settings;
    otherwise empty."""
    kind = text(getattr(load, "load_format", "auto"))
    settings = digest(plain(getattr(load, "model_loader_extra_config", None)))
    return "" if kind in _SAFETENSORS else f"{kind} {settings}".strip()


def _foreign_code(model: Any) -> dict[str, str]:
    """Name foreign code that computes models: registered classes of models, and of layers in place
    of vLLM's, the user's choice of classes, and the revision of a model's own code."""

    def place(registered: Any) -> str:
        made = getattr(registered, "model_cls", registered)
        if isinstance(made, type):
            return f"{made.__module__}:{made.__qualname__}"
        return f"{registered.module_name}:{registered.class_name}"

    models = getattr(getattr(model, "registry", None), "models", {})
    layers = getattr(sys.modules.get("vllm.model_executor.custom_op"), "op_registry_oot", {})
    places = {name: place(registered) for name, registered in [*models.items(), *layers.items()]}
    others = {name: where for name, where in places.items() if not where.startswith("vllm.")}
    return others | set_in(model, "code_revision") | set_in(model, "model_class_overrides")


def _draft(speculative: Any) -> str:
    """Name a draft model with layers in the KV cache, and its weights; otherwise empty."""
    method = getattr(speculative, "method", None)
    if method in (None, "ngram", "ngram_gpu", "suffix"):
        return ""
    model = getattr(speculative, "draft_model_config", None)
    return f"{method} {'@'.join(weights(model)) if model is not None else ''}".strip()


# ---- text


def plain(values: Any) -> Any:
    """A configuration as mappings and lists, without keys that differ between equal instances:
    the version of transformers, and keys with a leading `_`."""
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    if isinstance(values, Mapping):
        named = {str(name): value for name, value in values.items()}
        varies = {name for name in named if name[:1] == "_"} | {"transformers_version"}
        return {name: plain(value) for name, value in named.items() if name not in varies}
    if isinstance(values, set | frozenset):
        return sorted(str(value) for value in values)
    return [plain(value) for value in values] if isinstance(values, list | tuple) else values


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def canonical(values: Any) -> str:
    """Plain values as JSON, equal in every process."""

    # An object's text may hold an address, which differs by process: then use the type's name.
    def named(value: object) -> str:
        shown = str(value)
        return type(value).__qualname__ if " at 0x" in shown else shown

    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=named)


def digest(values: Any) -> str:
    """16 hexadecimal digits, equal for equal plain values in every process; empty for an empty
    value."""
    if not values:
        return ""
    data = canonical(values).encode()
    return blake2b(data, digest_size=8, person=b"vcache-model-1").hexdigest()


def text(named: Any) -> str:
    """The text of an enumeration's value or of a plain value."""
    return str(getattr(named, "value", named))
