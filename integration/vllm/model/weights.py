"""Identifies the weights that vLLM loads, and the settings that change their results, as text that
is equal in every process.

Weights have a name and a revision. From the Hugging Face hub: the repository and its commit, even
if vLLM names a folder of the hub's cache. Local files: the real path, and a digest of file names,
sizes and times, because the pool outlives weights that are overwritten in place. So equal copies
under two paths do not share, unless the user gives them one name. The revision is empty if vcache
cannot know which weights vLLM has loaded: weights in object storage or in another process
(`_ELSEWHERE`), local files that cannot be read, and local files that changed after this process
began, since vLLM reads the files before vcache does."""

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
_VOLATILE = ("transformers_version",)
"""Keys of a Hugging Face configuration, besides keys with a leading `_`, that do not describe the
model."""
_ROPE = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "rope_local_base_freq",
)
_EXACT_SECONDS = 0.1
"""The accuracy of process and file times. vLLM needs more time before it loads weights."""
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
_NO_DRAFT_KV = (None, "ngram", "ngram_gpu", "suffix")
"""Speculative methods without a model of their own, and so without layers in the KV cache."""


def weights(model: Any, load: Any = None) -> tuple[str, str]:
    """(name, revision) of the weights in vLLM's `ModelConfig`; see the module's docstring. load:
    vLLM's `LoadConfig`."""
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
    if identity is not None:
        return identity
    revision = getattr(model, "revision", None)
    # The text of vLLM's resolved revision is the branch's name: read the commit instead.
    return name, str(getattr(revision, "resolved", revision) or "")


def located(name: str) -> tuple[str, str] | None:
    """(name, revision) of the weights at a path; see the module's docstring. None if nothing is at
    the path, OSError if it cannot be read."""
    snapshot = _SNAPSHOT.search(name)
    if snapshot:
        return snapshot["repository"].replace("--", "/", 1), snapshot["commit"]
    path = Path(name)
    return (str(path.resolve()), _files_digest(path.resolve())) if path.exists() else None


def _files_digest(path: Path) -> str:
    """`files-` and a digest of the names, sizes and times of the files at `path`, without hidden
    files and subfolders."""
    hashed = blake2b(digest_size=8, person=b"vcache-model-1")
    for file in _files(path):
        status = file.stat()
        hashed.update(os.fsencode(file.name) + f"/{status.st_size} {status.st_mtime_ns}\n".encode())
    return f"files-{hashed.hexdigest()}"


def _files(path: Path) -> list[Path]:
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
    began = started(os.getpid()) / os.sysconf("SC_CLK_TCK") + _EXACT_SECONDS
    # Files written before the clock was set forward keep the earlier times.
    return max(times, default=0.0) > began + min(BOOTED, booted())


def extra(vllm_config: Any) -> dict[str, str]:
    """Settings that change a block's bytes and have no field of their own in `Layout`."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", ()) or ()
    settings = {
        "engine": f"vllm {getattr(sys.modules.get('vllm'), '__version__', '')}",
        "model_config": digest(_model_config(model)),
        "model_layers": str(model.get_total_num_hidden_layers()),
        "model_dtype": plain(model.dtype),
        "quantization": str(model.quantization or ""),
        "quantization_config": digest(_plain(getattr(model, "quantization_config", None))),
        "weights": _loaded(getattr(vllm_config, "load_config", None)),
        "code": digest(_code(model)),
        "environment": digest(_environment()),
        "kv_skip_layers": ",".join(map(str, skipped)),
        "sliding_window": "off" if getattr(model, "disable_sliding_window", False) else "",
        "multimodal": digest(_seen_as(getattr(model, "multimodal_config", None))),
        "draft": _draft(getattr(vllm_config, "speculative_config", None)),
        "longest": _longest(model),
        "adapted": digest(_adapted(getattr(vllm_config, "lora_config", None), text(model.dtype))),
    }
    return {name: value for name, value in settings.items() if value}


def _environment() -> dict[str, str]:
    """The variables of `_ENVIRONMENT` that are set, and not off."""
    values = {name: os.environ.get(name, "") for name in _ENVIRONMENT}
    return {name: value for name, value in values.items() if value not in ("", "0")}


def _seen_as(multimodal: Any) -> dict[str, Any]:
    """Settings that change an instance's reading of an image. vLLM's hash of the image covers its
    content and the request's own settings."""
    names = (
        "media_io_kwargs",
        "mm_processor_kwargs",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "video_pruning_rate",
    )
    settings = {name: getattr(multimodal, name, None) for name in names}
    settings["video_pruning_method"] = settings["video_pruning_rate"] and getattr(
        multimodal, "video_pruning_method", None
    )
    return {name: _plain(value) for name, value in settings.items() if value}


def _longest(model: Any) -> str:
    """`max_model_len` if it changes how vLLM rotates all positions (LongRoPE; dynamic NTK in some
    models) or scales queries (Llama 4, with the generation settings that may override it);
    otherwise empty."""
    scales = str(getattr(model.hf_config, "model_type", "")).startswith("llama4")
    settings = [model.generation_config, model.override_generation_config] if scales else []
    matters = scales or any(kind in rope(model) for kind in ("longrope", "dynamic"))
    return f"{model.max_model_len} {digest(settings)}".strip() if matters else ""


def _adapted(lora: Any, dtype: str) -> dict[str, Any]:
    """Settings that change how an instance applies a LoRA adapter, without defaults. dtype: the
    model's, the adapters' default."""
    names = "target_modules", "enable_tower_connector_lora"
    settings = {name: getattr(lora, name, None) for name in names}
    settings["dtype"] = (
        set_ if (set_ := text(getattr(lora, "lora_dtype", "auto"))) not in ("auto", dtype) else None
    )
    given = {name: value for name, value in settings.items() if value}
    return {name: sorted(at) if isinstance(at, list) else at for name, at in given.items()}


def _loaded(load: Any) -> str:
    """Name a load format that reads other files than safetensors, with a digest of its settings;
    otherwise empty."""
    kind = text(getattr(load, "load_format", "auto"))
    if kind in _SAFETENSORS:
        return ""
    return f"{kind} {digest(_plain(getattr(load, 'model_loader_extra_config', None)))}".strip()


def _code(model: Any) -> dict[str, str]:
    """Name foreign code that computes models: registered classes of models, and of layers in place
    of vLLM's, the user's choice of classes, and the revision of a model's own code."""
    models = getattr(getattr(model, "registry", None), "models", {})
    layers = getattr(sys.modules.get("vllm.model_executor.custom_op"), "op_registry_oot", {})
    places = {name: _place(registered) for name, registered in [*models.items(), *layers.items()]}
    others = {name: place for name, place in places.items() if not place.startswith("vllm.")}
    revision = str(getattr(model, "code_revision", None) or "")
    others |= {"revision": revision} if revision else {}
    return others | (getattr(model, "model_class_overrides", None) or {})


def _place(registered: Any) -> str:
    """The module and the name of a class, or of the class of an entry in vLLM's registry."""
    model_class = getattr(registered, "model_cls", registered)
    if isinstance(model_class, type):
        return f"{model_class.__module__}:{model_class.__qualname__}"
    return f"{registered.module_name}:{registered.class_name}"


def _draft(speculative: Any) -> str:
    method = getattr(speculative, "method", None)
    if method in _NO_DRAFT_KV:
        return ""
    model = getattr(speculative, "draft_model_config", None)
    return f"{method} {'@'.join(weights(model)) if model is not None else ''}".strip()


def rope(model: Any) -> str:
    """The rotary embedding of a `ModelConfig`, as canonical JSON; empty without one."""
    config = getattr(model, "hf_text_config", None)
    settings = {name: getattr(config, name, None) for name in _ROPE}
    if not any(settings.values()):
        return ""
    return _canonical({name: value for name, value in settings.items() if value is not None})


def _model_config(model: Any) -> Any:
    """The Hugging Face configuration, without keys that differ between equal instances
    (`_VOLATILE`, and keys with a leading `_`)."""
    hf_config: Any = getattr(model, "hf_config", None)
    return _plain(hf_config.to_dict()) if hasattr(hf_config, "to_dict") else None


def _plain(values: Any) -> Any:
    """A configuration as mappings and lists, without keys that differ between equal instances."""
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    if isinstance(values, Mapping):
        kept = {
            str(name): value
            for name, value in values.items()
            if not str(name).startswith("_") and name not in _VOLATILE
        }
        return {name: _plain(value) for name, value in kept.items()}
    if isinstance(values, set | frozenset):
        return sorted(str(value) for value in values)
    return [_plain(value) for value in values] if isinstance(values, list | tuple) else values


def _canonical(values: Any) -> str:
    # An object's text may hold an address, which differs by process: then use the type's name.
    def named(value: object) -> str:
        said = str(value)
        return type(value).__qualname__ if " at 0x" in said else said

    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=named)


def digest(values: Any) -> str:
    """16 hexadecimal digits, equal for equal plain values in every process; empty for an empty
    value."""
    if not values:
        return ""
    data = _canonical(values).encode()
    return blake2b(data, digest_size=8, person=b"vcache-model-1").hexdigest()


def plain(dtype: object) -> str:
    """The name of a torch dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def text(named: Any) -> str:
    """The text of an enumeration's value or of a plain value."""
    return str(getattr(named, "value", named))
