"""`vcache doctor --model`: whether vLLM's connector will cache a model, and how many tokens the pool holds, from its `config.json`.

Nothing is downloaded, no code of the model runs, and neither vLLM nor torch is imported. If the file leaves something out, a child process
asks transformers, if that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vcache_backend.config import ByteSize, Config, hugging_face_cache
from vcache_backend.doctor.finding import Finding
from vcache_backend.metadata_server.layouts import printable

GIB = 1 << 30
ASK_SECONDS = 60.0
MAX_FILE_BYTES = 16 << 20
"""The largest config.json that is read. Real ones have some kilobytes."""
MAX_TOKEN_BYTES = 1 << 40
_FILL_IN = (
    # transformers does without torch here, which takes seconds to import.
    "import json, sys; sys.modules['torch'] = None; from transformers import AutoConfig; "
    "found = AutoConfig.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False); "
    "print(json.dumps(found.to_dict(), default=str))"
)
_NAMES = {
    **dict.fromkeys(("full_attention", "attention", "chunked_attention"), ("full",)),
    "sliding_attention": ("window",),
    "hybrid": ("full", "state"),
    **dict.fromkeys(("mlp", "moe"), ()),
}
"""What layers keep, by their names in configurations; all others keep a state. Chunked attention counts as full: by default vLLM frees none
of its blocks early."""
_STATES = (
    *("mamba_d_state", "ssm_state_size", "state_size", "mamba_n_heads", "linear_attn_config", "linear_num_value_heads"),
    *("conv_L_cache", "attn_type_list", "lru_width", "rwkv_hidden_size", "layer_group_size"),
)
"""Keys that only models with states have."""
_ATTENDING = ("attn_layer_indices", "full_attn_idxs", "full_attn_layers")
"""Keys of such models that list the layers with full attention."""
_BOTH = ("falcon_h1",)
"""Models whose layers all have full attention and a state."""
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Models with windows whose every n-th layer has full attention, by n, for files that do not say it."""
_SIXTEENTHS = {"float8": 16, "fp8": 16, "nvfp4": 9}
"""Sixteenths of a byte that a number takes in the KV cache, by dtype; in others 32: vLLM serves float32 models with 16 bits by default.
In NVFP4 16 numbers of 4 bits share a scale of a byte."""


class UnknownModel(Exception):
    """It cannot be told what the model keeps. The message says why and, after `; `, what would help."""


class ModelKv(NamedTuple):
    """What a model keeps in the KV cache.

    layers: how many of each kind: `full`, `window`, `state`. window: its tokens. full_bytes, window_bytes: of one token in all layers of
    that kind. what: one token's KV, in words. odd: why nothing is cached; empty otherwise. halves: whether fp8 would halve it.
    """

    architecture: str
    layers: Mapping[str, int]
    window: int
    full_bytes: int
    window_bytes: int
    what: str
    odd: str = ""
    halves: bool = True


def check_model(name: str, config: Config) -> Iterator[Finding]:
    """Say whether a model is cached, how large its chunks are, and what a pool holds of it.

    name: a folder with a `config.json`, or a name in Hugging Face's cache.
    """
    try:
        kv = read(find(name))
    except UnknownModel as error:
        why, _, advice = str(error).partition("; ")
        yield Finding("model", "warn", f"{name}: {why}", advice)
        return
    layers = ", ".join(f"{count} layers {_KINDS[kind]}" for kind, count in kv.layers.items()).replace("{}", f"{kv.window:,}")
    known = f"{name} ({kv.architecture}): {layers}"
    reason, advice = _refusal(kv, config.connector.share == "in_place")
    if reason:
        yield Finding("model", "fail", f"{known}: nothing of it is cached: {reason}", advice)
        return
    yield Finding("model", "ok", f"{known}: cached; {kv.what}", advice)
    size = config.engine.chunk_size
    chunk = chunk_bytes(kv, size)
    chunks = GIB // chunk
    states = state_chunks(kv)
    beside = f"; a step's last chunk also has a state, as large as {states:g} chunks of one block" if states else ""
    yield Finding(
        "chunks",
        "ok",
        f"{chunk // size:,} B a token, {ByteSize(chunk).about} a chunk of {size} tokens, all ranks together{beside}",
        _BLOCKS if states else _HALF * kv.halves,
    )
    detail = f"1 GiB of pool holds {chunks:,} chunks, {chunks * size:,} tokens"
    lent = config.pool.lent // chunk
    yield Finding(
        "pool", "ok", f"{detail}; pool.segment_bytes: {config.pool.lent} holds {lent * size:,} tokens a worker and rank"
    )


_KINDS = {"full": "of full attention", "window": "with a window of {} tokens", "state": "with a state"}
_BLOCK = 16
"""Tokens of vLLM's blocks by default."""
_BLOCKS = "set engine.chunk_size to vLLM's block size, which its log says, since a state is as large as a block"
_HALF = "half of that with vLLM's --kv-cache-dtype fp8"


def chunk_bytes(kv: ModelKv, size: int) -> int:
    """Bytes of a chunk of `size` tokens, all ranks. Of layers with a window it holds what a hit can need: the window's end, in blocks."""
    full, window, each = kv.layers.get("full", 0), kv.layers.get("window", 0), _table(kv)
    kept = min(size, -(-(kv.window - 1) // _BLOCK) * _BLOCK)
    found = 0
    for layers, nbytes, tokens in ((full, kv.full_bytes, size), (window, kv.window_bytes, kept)):
        found += -(-layers // each) * each * (nbytes // max(layers, 1)) * tokens
    return found


def state_chunks(kv: ModelKv) -> float:
    """How many chunks of one vLLM block take the room of one state."""
    each = _table(kv)
    return -(-kv.layers.get("state", 0) // each) / sum(-(-kv.layers.get(kind, 0) // each) for kind in ("full", "window"))


def _table(kv: ModelKv) -> int:
    """Layers of one block table. vLLM gives all block tables equally many, and fills up the last one of a kind."""
    few, many = min(kv.layers.values()), max(kv.layers.values())
    return many if many < 1.5 * few else few


def _refusal(kv: ModelKv, in_place: bool) -> tuple[str, str]:
    """Why the connector would cache nothing of the model, as `integration.vllm` decides it, and what to change. If it is cached, an empty
    reason and maybe an advice."""
    if kv.odd:
        return kv.odd, "no setting changes it; vLLM serves all the same"
    if kv.layers.get("state") and len(kv.layers) == 1:
        return "all layers keep a state, and none keeps tokens", "no setting changes it; vLLM serves all the same"
    if kv.layers.get("state") and in_place:
        return "vLLM copies states from block to block without allocating them", "set connector.share: pool"
    if kv.layers.get("state"):
        return "", "take vLLM 0.30 or later: earlier ones cache nothing of it, and 0.26 does not start with our connector"
    if in_place and kv.layers.get("window") and not kv.layers.get("full"):
        return "all layers have windows, and vLLM soon uses blocks behind a window again", "set connector.share: pool"
    return "", ""


# ---- where it lies


def find(name: str) -> Path:
    """The folder of the model's `config.json`: `name`, or its snapshot in Hugging Face's cache. Raises UnknownModel."""
    try:
        return _found(name)
    except OSError as error:
        raise UnknownModel(
            f"{error.filename} cannot be looked at: {error.strerror}; name a folder that this user may read"
        ) from error


def _found(name: str) -> Path:
    try:
        folder = Path(name).expanduser()
        there = folder.is_dir()
    except (OSError, RuntimeError):  # not a folder's name, or a folder that this user may not read
        folder, there = Path(name), False
    if there:
        if (folder / "config.json").is_file():
            return folder
        raise UnknownModel(f"no config.json in {folder}; name the folder that vLLM is given")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UnknownModel(f"no folder {folder}; name the folder with its config.json, or its name on Hugging Face")
    hub = hugging_face_cache()
    cached = hub / f"models--{name.replace('/', '--')}"
    try:
        found = cached / "snapshots" / (cached / "refs" / "main").read_text().strip()
    except OSError:
        found = cached
    if (found / "config.json").is_file():
        return found
    raise UnknownModel(
        f"neither a folder nor in Hugging Face's cache, {hub}; `hf download {name} config.json`, or name its folder"
    )


def _filled(folder: Path) -> dict[str, Any]:
    """The configuration as transformers completes it; empty if it is not installed, fails, or takes more than `ASK_SECONDS`."""
    try:
        asking = [sys.executable, "-P", "-c", _FILL_IN, str(folder)]
        answer = subprocess.run(
            asking,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=True,
        )
        found: dict[str, Any] = json.loads(answer.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return {}
    return found


# ---- what it keeps


def read(folder: Path) -> ModelKv:
    """What the model in `folder` keeps. Raises UnknownModel."""
    file, beside = folder / "config.json", folder / "hf_quant_config.json"
    whole = _read(file)
    quantized = {}
    if whole.get("quantization_config") is None and beside.is_file():  # as ModelOpt wrote it up to 0.29
        quantized = {"quantization_config": _read(beside)}
    try:
        try:
            return _checked(_kv(whole | quantized))
        except UnknownModel:
            if not (filled := _filled(folder)):
                raise
            return _checked(_kv(filled | quantized))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnknownModel(f"{file} is not as models' are: {error!r}; start vLLM and see its log") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"it has {size:,} B, too many for a model's configuration")
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownModel(f"{file} cannot be read: {error}; mend the file, or download it again") from error
    return found


def _checked(kv: ModelKv) -> ModelKv:
    """`kv`, if a model can be so. Raises ValueError."""
    if not kv.layers:
        raise ValueError("no layers")
    if kv.layers.get("window") and kv.window < 2:
        raise ValueError(f"a window of {kv.window} tokens")
    token: object = kv.full_bytes + kv.window_bytes
    if not isinstance(token, int) or token > MAX_TOKEN_BYTES or (token < 1 and not kv.odd and not kv.layers.get("state")):
        raise ValueError(f"{token} B a token, {kv.what}")
    return kv


def _kv(whole: Mapping[str, Any]) -> ModelKv:
    text = next(
        (whole[key] for key in ("text_config", "llm_config", "thinker_config") if isinstance(whole.get(key), dict)), whole
    )
    text = text.get("text_config", text) if text is not whole else text
    architecture = printable(str((whole.get("architectures") or ["an unnamed architecture"])[0]))
    layers = _layers(text)
    odd = ""
    if whole.get("is_encoder_decoder"):
        odd = "an encoder's output depends on the whole input"
    elif text.get("index_head_dim") or len({block.get("n_heads_in_group") for block in _attentions(text)}) > 1:
        odd = "layers of one block table have pages of several sizes"
    dtype = _dtype(whole, text)
    full, window, what = _token(text, dtype) if layers["full"] + layers["window"] and not odd else (0, 0, "")
    look, halves = int(text.get("sliding_window") or 0), dtype not in _SIXTEENTHS
    return ModelKv(architecture, layers, look, full * layers["full"], window * layers["window"], what, odd, halves)


def _token(text: Mapping[str, Any], dtype: str) -> tuple[int, int, str]:
    """Bytes of a token in a layer with full attention, in one with a window, and what these are in words."""
    size, named = _SIXTEENTHS.get(dtype, 32), dtype if dtype != "float32" else "16 bits (float32 in the file)"
    if text.get("kv_lora_rank"):
        row = text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)
        return row * size // 16, row * size // 16, f"one row of {row} numbers a token and layer (MLA), {named}"
    heads, dim = _kv_heads(text), _head_dim(text)
    wide, of_wide = text.get("num_global_key_value_heads") or heads, text.get("global_head_dim") or dim
    of_v, of_wide_v = dim, of_wide
    if text.get("hybrid_layer_pattern"):  # MiMo V2, whose K and V differ in size
        heads, dim = text.get("swa_num_key_value_heads") or heads, text.get("swa_head_dim") or dim
        of_v, of_wide_v = text.get("swa_v_head_dim") or dim, text.get("v_head_dim") or of_wide
    what = f"{heads} KV head{'s' * (heads > 1)} of {dim}, {named}"
    if (wide, of_wide) != (heads, dim):
        what = f"{what}; {wide} of {of_wide} in layers of full attention"
    return wide * (of_wide + of_wide_v) * size // 16, heads * (dim + of_v) * size // 16, what


_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num", "num_attention_groups"),
    *("num_attention_heads", "n_head", "n_heads"),
)


def _kv_heads(text: Mapping[str, Any]) -> int:
    grouped = next((block.get("n_heads_in_group") for block in _attentions(text)), None)
    if grouped:
        return int(text["num_attention_heads"]) // int(grouped)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon 7B and StarCoder, which may name more
        return 1
    return _number({**(text.get("attn_config") or {}), **text}, _KV_HEADS)  # DBRX has it inside


def _attentions(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The layers of Nemotron-NAS that have attention: in its models layers differ. Empty for others."""
    blocks = [block.get("attention") or {} for block in text.get("block_configs") or ()]
    return [block for block in blocks if not (block.get("no_op") or block.get("replace_with_linear"))]


def _layers(text: Mapping[str, Any]) -> Counter[str]:
    """How many layers there are of each kind of `_KINDS`."""
    named = next((text[key] for key in ("layer_types", "layers_block_type", "block_types") if text.get(key)), None)
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    unsaid = isinstance(named, list) and not any(text.get(name) for name in names)
    count = len(named or ()) if unsaid else _number(text, names)
    if text.get("model_type") == "longcat_flash" and text.get("num_layers"):
        count = 2 * _number(text, ("num_layers",))  # each has two attentions
    if isinstance(named, list):
        named = named[:count]  # layers for multi-token prediction may follow
        found = _named(named)
    elif isinstance(text.get("hybrid_layer_pattern"), list):
        pattern = text["hybrid_layer_pattern"][:count]
        found = Counter(full=pattern.count(0), window=pattern.count(1))
    elif text.get("block_configs"):
        found = Counter(full=len(_attentions(text)))
    elif isinstance(text.get("hybrid_override_pattern"), str):
        marks = Counter(text["hybrid_override_pattern"])
        found = Counter(full=marks["*"], state=marks["M"])
    elif text.get("model_type") in _BOTH:
        found = Counter(full=count, state=count)
    elif any(text.get(key) for key in _STATES):
        full = _attending(text, count)
        found = Counter(full=full, state=count - full)
    else:
        found = _windows(text, count)
    # In some models the last layers use the KV of earlier ones.
    shared = int(text.get("num_kv_shared_layers") or 0)
    if shared and isinstance(named, list):
        found -= _named(named[-shared:])
    return Counter({kind: found[kind] for kind in _KINDS if found[kind]})


def _named(layers: Sequence[object]) -> Counter[str]:
    return Counter(kind for name in layers for kind in _NAMES.get(str(name), ("state",)))


def _attending(text: Mapping[str, Any], count: int) -> int:
    """How many layers have full attention, in a model whose others keep a state. Raises UnknownModel."""
    if each := text.get("full_attention_interval") or text.get("layer_group_size"):
        return count // int(each)
    if text.get("attn_layer_period"):
        return len(range(int(text.get("attn_layer_offset") or 0), count, int(text["attn_layer_period"])))
    if text.get("attn_type_list"):
        return list(text["attn_type_list"]).count(1)
    beside = text.get("linear_attn_config") or {}
    listed = next((one[key] for one in (text, beside) for key in _ATTENDING if one.get(key)), None)
    if listed is not None:
        return len(listed)
    if any(text.get(key) for key in _KV_HEADS):
        raise UnknownModel(
            "its config.json does not say which layers keep a state; install transformers here, or start vLLM and see its log"
        )
    return 0


def _windows(text: Mapping[str, Any], count: int) -> Counter[str]:
    if not text.get("sliding_window") or not text.get("use_sliding_window", True):
        return Counter(full=count)
    each = text.get("sliding_window_pattern") or _PATTERNS.get(str(text.get("model_type")))
    each = len(each) if isinstance(each, str) else each  # as text, such as LLLG
    full = count // each if isinstance(each, int) else 0
    return Counter(full=full, window=count - full)


def _head_dim(text: Mapping[str, Any]) -> int:
    named = text.get("head_dim") or text.get("attention_head_dim")
    if named:
        return int(named)
    return _number(text, ("hidden_size", "n_embd", "d_model")) // _number(text, ("num_attention_heads", "n_head", "n_heads"))


def _number(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((text[name] for name in names if isinstance(text.get(name), int) and text[name] > 0), None)
    if found is None:
        raise UnknownModel(f"its config.json has no {names[0]}; install transformers here, or start vLLM and see its log")
    return int(found)


def _dtype(whole: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The KV cache's dtype with vLLM's `--kv-cache-dtype auto`."""
    dtype = next((str(one[key]) for one in (text, whole) for key in ("dtype", "torch_dtype") if one.get(key)), "bfloat16")
    quantized = whole.get("quantization_config") or {}
    quantized = quantized | (quantized.get("quantization") or {})
    scheme = quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo")
    bits = str(scheme.get("num_bits") if isinstance(scheme, dict) else scheme).lower()
    if bits in ("4", "nvfp4", "8", "fp8"):  # vLLM does not know others
        return "nvfp4" if bits in ("4", "nvfp4") else "fp8"
    return printable(dtype.removeprefix("torch."))
