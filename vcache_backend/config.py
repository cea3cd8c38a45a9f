"""The configuration: frozen values, read once. No other module reads settings from the environment.

`load(path)` reads a YAML file strictly: an unknown key is an error. Without a path, `load` reads
the file `VCACHE_CONFIG`, or takes the defaults. `VCACHE_SOCKET` overrides `server.socket`.
configs/vcache.yaml explains every key. Times are in seconds."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from vcache_backend import config_file
from vcache_backend.errors import MAX_LINE_CHARS, ConfigError, printable

_LARGEST_FIRST = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{binary}{b}": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary in ("", "I")
    for b in ("", "B")
}
"""Bytes by unit, in capitals: G and GB are 10^9, Gi and GiB are 2^30, as in Kubernetes."""
MAX_SOCKET_PATH = 107
"""Bytes that Linux allows in a socket's address."""
HOST_DEVICE = re.compile(r"host(:[A-Za-z0-9_.-]{1,64})?")
_GPU_DEVICE = re.compile(r"cuda(:\d{1,4})?|(?i:GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})")
DEVICE_FORMS = (
    "auto, host, host:NAME (letters, digits, _ . -), cuda, cuda:N or a GPU's UUID (nvidia-smi -L)"
)

KV_AXES = ("part", "block", "token", "head", "dim")
"""Names of a KV tensor's axes: K or V; block; token in the block; KV head; elements of a head (of K
and V if packed)."""

# Seconds: eleven days at most, since poll() takes at most 24.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 2)]
"""A uid or gid. 2^32 - 1 means none to the kernel."""


class ByteSize(int):
    """A number of bytes. In YAML a number with a unit: `8 GiB`, `8Gi`, `4GB`; or an integer, 0 or
    at least 1 MiB: `80` never means 80 bytes."""

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Read an integer, or text such as `8 GiB`. Raises ValueError."""
        if isinstance(value, ByteSize):
            return value
        text = value if isinstance(value, str) else ""
        if isinstance(value, int) and not isinstance(value, bool):
            text = str(value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS:
            examples = "1073741824, '8 GiB' or '512MiB'"
            raise ValueError(f"Expected bytes such as {examples}, got {value!r}")
        nbytes = float(match[1]) * _UNITS[match[2].upper()]
        if not match[2] and 0 < nbytes < 1 << 20:
            wanted = f"write the unit, such as {match[1]}GiB or {match[1]}B"
            raise ValueError(f"{match[1]} without a unit is {int(nbytes)} B: {wanted}")
        if nbytes > 1 << 48:
            raise ValueError("Expected at most 256 TiB")
        return cls(nbytes)

    def __str__(self) -> str:
        """In the largest binary unit without a remainder: `parse` reads the same number back."""
        for unit, size in _LARGEST_FIRST:
            if self and self % size == 0:
                return f"{self // size} {unit}"
        return f"{int(self)} B"

    @property
    def about(self) -> str:
        """For people: rounded to four digits."""
        for unit, size in _LARGEST_FIRST:
            if self >= size:
                return f"{self / size:.4g} {unit}"
        return f"{int(self)} B"


def split_address(address: str, name: str, absent: str = "127.0.0.1") -> tuple[str, int]:
    """Host and port of `address`; without a host, `absent`. name: the setting, for errors. Raises
    ValueError."""
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]*)):([0-9]{1,5})", address)
    if parts is None or int(parts[3]) > 65535:
        alone = absent and address.isdecimal()
        hint = f'; write ":{address}" for this machine alone' if alone else ""
        raise ValueError(f"{name} must be HOST:PORT, got {address!r}{hint}")
    return parts[1] or parts[2] or absent, int(parts[3])


def is_device(spec: str) -> bool:
    """Whether `spec` has one of the `DEVICE_FORMS`. The device may be missing on this machine."""
    return spec == "auto" or any(form.fullmatch(spec) for form in (HOST_DEVICE, _GPU_DEVICE))


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: unknown keys are errors."""


class ServerConfig(_Section, frozen=True, kw_only=True):
    socket: str = ""
    reservation_seconds: Positive = 30.0
    spin_seconds: NotNegative | None = None
    allow_uids: list[Id] = []
    metrics: str = ""

    def __post_init__(self) -> None:
        given = self.socket
        file = given.startswith("/") and not given.endswith("/")  # programs start in any folder
        fits = given.isprintable() and len(given.encode()) <= MAX_SOCKET_PATH
        if given and not (file and fits):
            wanted = f"the absolute path of a file, {MAX_SOCKET_PATH} printable bytes at most"
            raise ValueError(f"socket must be {wanted}, got {given!r}")
        if self.metrics:
            split_address(self.metrics, "metrics")

    @property
    def path(self) -> Path:
        """The socket's path: `socket`, or the default."""
        return Path(self.socket) if self.socket else default_socket()


class ClientConfig(_Section, frozen=True, kw_only=True):
    """A connection to the metadata server: deadlines, and pauses before reconnections."""

    connect_seconds: Positive = 0.5
    request_seconds: Positive = 0.25
    control_seconds: Positive = 5.0
    heartbeat_seconds: Positive = 1.0
    retry_seconds: Positive = 0.1
    server_uid: Id | None = None


class PoolConfig(_Section, frozen=True, kw_only=True):
    """This worker's part of the pool."""

    device: str = "auto"
    segment_bytes: ByteSize | None = None
    max_ctas: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0

    def __post_init__(self) -> None:
        if not is_device(self.device):
            raise ValueError(f"device must be {DEVICE_FORMS}, got {self.device!r}")

    @property
    def lent(self) -> ByteSize:
        """Bytes that a worker lends to a pool: `segment_bytes`, or the default."""
        return ByteSize(8 << 30) if self.segment_bytes is None else self.segment_bytes


class EngineConfig(_Section, frozen=True, kw_only=True):
    """Chunks, and the KV caches from which and to which they are copied."""

    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256
    kv_axes: str = ""


class ConnectorConfig(_Section, frozen=True, kw_only=True):
    """Our connector in vLLM. Token counts leave out tokens in vLLM's prefix cache. share:
    `from_dict` turns `auto` into `pool` if another setting needs a pool; otherwise the connector
    decides by vLLM's version and settings and the model. start_server: `from_dict` turns None into
    whether the socket is the default one. A socket that somebody names is somebody's service."""

    share: Literal["auto", "in_place", "pool"] = "auto"
    min_hit_tokens: PositiveInt = 256
    wait_factor: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.5
    store: Literal["all", "prompt"] = "all"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    model: str = ""
    weights: str = ""
    unproved: bool = False
    start_server: bool | None = None


class MooncakeConfig(_Section, frozen=True, kw_only=True):
    master: str = "127.0.0.1:50051"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    hostname: str = ""
    rpc_seconds: Positive = 1.0

    def __post_init__(self) -> None:
        if not all(split_address(self.master, "master", absent="")):
            raise ValueError(f"master must be HOST:PORT, got {self.master!r}")
        if self.protocol == "tcp" and self.devices:
            raise ValueError(f"devices ({self.devices!r}) are for protocol: rdma")


class OffloadConfig(_Section, frozen=True, kw_only=True):
    policy: Literal["off", "write_through"] = "off"
    promote: bool = True
    min_bandwidth: ByteSize | None = None
    staging_bytes: ByteSize = ByteSize(1 << 30)
    lookup_seconds: Positive = 0.05
    get_seconds: Positive = 2.0
    call_seconds: Positive = 10.0
    failures: PositiveInt = 3
    retry_seconds: Positive = 1.0
    mooncake: MooncakeConfig = MooncakeConfig()

    def __post_init__(self) -> None:
        if not self.staging_bytes:
            raise ValueError("staging_bytes must be more than 0")

    @property
    def longest_pause(self) -> float:
        """The longest pause between two trials. The first pause is `retry_seconds`."""
        return 15 * self.retry_seconds

    def least_bandwidth(self, on_gpu: bool) -> ByteSize:
        """`min_bandwidth` in bytes a second, or the default: 5 GB/s for GPUs over TCP, the rate at
        which an H200 computes KV of an 8B model; otherwise 0. on_gpu: whether the KV caches are on
        GPUs."""
        if self.min_bandwidth is not None:
            return self.min_bandwidth
        return ByteSize(5 * 10**9) if on_gpu and self.mooncake.protocol == "tcp" else ByteSize(0)


class Config(_Section, frozen=True, kw_only=True):
    server: ServerConfig = ServerConfig()
    client: ClientConfig = ClientConfig()
    pool: PoolConfig = PoolConfig()
    engine: EngineConfig = EngineConfig()
    connector: ConnectorConfig = ConnectorConfig()
    offload: OffloadConfig = OffloadConfig()


def default_socket() -> Path:
    """`$XDG_RUNTIME_DIR/vcache/vcache.sock` if that is a whole, short path of printable characters,
    otherwise `/tmp/vcache-UID/vcache.sock`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = f"{runtime}/vcache/vcache.sock"
    fits = path.isprintable() and len(os.fsencode(path)) <= MAX_SOCKET_PATH
    whole = runtime.startswith("/") and fits
    return Path(path if whole else f"/tmp/vcache-{os.getuid()}/vcache.sock")


def state_folder() -> Path:
    """`$XDG_STATE_HOME/vcache` if that is a whole path, otherwise `~/.local/state/vcache`.
    ConfigError for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        return Path(state if state.startswith("/") else Path.home() / ".local/state", "vcache")
    except RuntimeError as error:
        raise ConfigError(f"set XDG_STATE_HOME or HOME: {error}") from error


def hash_seed() -> str | None:
    """`PYTHONHASHSEED`, the beginning of vLLM's and LMCache's block hashes; None if not set."""
    return os.environ.get("PYTHONHASHSEED")


def left_out() -> str:
    """What to change if `VLLM_PLUGINS` keeps vLLM from loading the plugin `vcache`, or empty."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or "vcache" in named.split(","):
        return ""
    wanted = ",".join(filter(None, [*named.split(","), "vcache"]))
    advice = f"set VLLM_PLUGINS={wanted}, or unset it"
    return printable(f"VLLM_PLUGINS leaves out vLLM's plugin `vcache`: {advice}", MAX_LINE_CHARS)


def expandable_segments() -> bool:
    """Whether `expandable_segments` is on for torch's CUDA allocator. As in torch, the first of two
    variables that is set counts."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return bool(re.search(r"(^|,)\s*expandable_segments\s*:\s*(true|1)\s*(,|$)", given.lower()))


def mooncake_environment(section: MooncakeConfig) -> dict[str, str]:
    """Set the environment variables of Mooncake's library that the user has not set. Returns the
    values in force. Call before the library is loaded.

    The library's defaults wait too long: 80 s for a missing master, 30 s for a hanging master or
    provider."""
    wanted = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": str(max(1, round(1000 * section.rpc_seconds))),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(1 + math.ceil(section.rpc_seconds)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(1 + math.ceil(section.rpc_seconds)),
        "MC_TCP_LANES_PER_PEER": "16",
        "MC_LOG_LEVEL": "ERROR",
    }
    if section.hostname:
        wanted["MC_TCP_BIND_ADDRESS"] = section.hostname
    if section.master.startswith("[") or ":" in section.hostname:
        wanted["MC_USE_IPV6"] = "1"
    return {name: os.environ.setdefault(name, value) for name, value in wanted.items()}


def _decode(kind: type, value: object) -> object:
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise NotImplementedError(kind)


def _encode(value: object) -> object:
    if isinstance(value, ByteSize):
        return str(value)
    raise NotImplementedError(type(value))


def from_dict(
    values: dict[str, Any], source: str = "configuration", lines: dict[str, int] | None = None
) -> Config:
    """Check `values`, and apply `VCACHE_SOCKET`.

    ConfigError names `source`, the key, and the key's line if `lines` has it: see
    `config_file.parse`."""
    offload = values.get("offload")
    if isinstance(offload, dict) and offload.get("policy") is False:
        # YAML reads a plain `off` as false.
        values = values | {"offload": offload | {"policy": "off"}}
    try:
        config = msgspec.convert(values, Config, dec_hook=_decode)
    except msgspec.ValidationError as error:
        said = config_file.explained(str(error), Config, lines or {})
        raise ConfigError(f"{source}: {printable(said, MAX_LINE_CHARS)}") from error
    if socket := os.environ.get("VCACHE_SOCKET"):
        config = with_socket(config, socket, "VCACHE_SOCKET")
    if config.connector.start_server is None:
        starts = msgspec.structs.replace(config.connector, start_server=not config.server.socket)
        config = msgspec.structs.replace(config, connector=starts)
    return config


def with_socket(config: Config, socket: str, source: str) -> Config:
    """Set `server.socket`. source: the setting's origin, for errors. Raises ConfigError."""
    try:
        server = msgspec.structs.replace(config.server, socket=socket)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    return msgspec.structs.replace(config, server=server)


def load(path: str | Path | None = None) -> Config:
    """Read and check the configuration; see the module's docstring. Raises ConfigError."""
    return from_dict(*read(path))


def over_file(
    sections: Mapping[str, Any],
    source: str = "kv_connector_extra_config",
    defaults: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> Config:
    """Read settings that are written beside an engine's own: `sections` such as `server` or `pool`,
    over those of the file that the key `config` names, or of `load`'s. source: the errors' name for
    `sections`. defaults: sections with values for missing settings. Raises ConfigError."""
    values, file, lines = read(sections.get("config"))
    from_dict(values, file, lines)
    for name, section in defaults.items():
        values[name] = {**section, **values.get(name, {})}
    for name, section in sections.items():
        if name in Config.__struct_fields__ and not isinstance(section, Mapping):
            said = f"{source}: {name}: Expected a section of settings, got {section!r:.80}"
            raise ConfigError(said)
        if name in Config.__struct_fields__:
            values[name] = {**values.get(name, {}), **section}
        elif name != "config":
            values[name] = section
    return from_dict(values, source)


def read(path: object = None) -> tuple[dict[str, Any], str, dict[str, int]]:
    """Read the file of `load`, without checking keys and values. Returns the values, the file's
    name, and the keys' lines. Raises ConfigError."""
    named = ""
    if path in (None, ""):
        path, named = os.environ.get("VCACHE_CONFIG", ""), "VCACHE_CONFIG: "
    if path == "":
        return {}, "defaults", {}
    if not isinstance(path, str | Path):
        raise ConfigError(f"config: Expected the path of a YAML file, got {path!r}")
    try:
        with open(path, "rb") as file:
            text = file.read((1 << 20) + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with NUL in it
        raise ConfigError(f"{named}{path}: {getattr(error, 'strerror', error)}") from error
    if len(text) > 1 << 20:
        raise ConfigError(f"{path}: more than 1 MiB, too large for a configuration")
    values, lines = config_file.parse(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict):
        wanted = f"sections ({', '.join(Config.__struct_fields__)})"
        raise ConfigError(f"{path}: Expected {wanted}, got {type(values).__name__}")
    return values, str(path), lines


def dump(config: Config) -> dict[str, Any]:
    """`config` as plain values, with the socket's path and all defaults."""
    plain: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_encode)
    plain["server"]["socket"] = str(config.server.path)
    return plain
