"""`vcache`: the commands for people. Thin: each reads the configuration, calls one thing and shows what it answered.

What a command needs beyond the configuration is imported inside it, so that `vcache --help` is quick and `serve` never
loads torch. An error of ours is one line on stderr and exit code 1; wrong usage is 2.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from vcache_backend import __version__, config, terminal
from vcache_backend.errors import ConfigError, SegmentError, ServerUnavailable, VCacheError

if TYPE_CHECKING:
    from vcache_backend.doctor.finding import Finding
    from vcache_backend.metadata_server.client import Client
    from vcache_backend.metadata_server.messages import SegmentInfo, ServerStats


EXIT_CODES = "Exit codes: 0 done; 1 it failed, and one line on stderr, or a finding, says why; 2 wrong usage."
ENGINE = ("torch", "numpy", "triton")
"""What the base install does not bring."""


class _Group(TyperGroup):
    """Turns our errors into one line, and what the base install lacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VCacheError as error:
            trouble: Exception = error
            line = str(error)
        except ModuleNotFoundError as error:
            if error.name not in ENGINE:
                raise
            trouble, line = error, f"this needs {error.name}, of the extra `engine`: pip install '/path/to/vcache[engine]'"
        typer.secho(f"vcache: {line}", fg="red", err=True)
        raise typer.Exit(1) from trouble


def _app(text: str, root: bool = False) -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=root,
        epilog=EXIT_CODES if root else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _app("A node-wide pool of GPU memory for transformer KV caches.", root=True)
segment_app = _app("Lend memory to the pool, look at what it has, take it back.")
config_app = _app("Check a configuration file, or show the one in force.")
app.add_typer(segment_app, name="segment")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="PATH", help="YAML file; without it VCACHE_CONFIG, without that the defaults."),
]
Socket = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="The server's socket, whatever the file says.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="As `vcache version`.")
    ] = False,
) -> None:
    """A node-wide pool of GPU memory for transformer KV caches."""


def main() -> None:
    """The entry point `vcache`."""
    with terminal.whatever_it_shows():
        app(prog_name="vcache")


def _load(path: Path | None, socket: Path | None) -> config.Config:
    loaded = config.load(path)
    return loaded if socket is None else config.with_socket(loaded, str(socket), "--socket")


def _client(path: Path | None, socket: Path | None, reconnect: bool = False) -> Client:
    """A connection for one command. Raises ServerUnavailable, with the reason, if there is none."""
    from vcache_backend.metadata_server.client import Client

    loaded = _load(path, socket)
    client = Client(loaded.server.path, loaded.client, reconnect=reconnect)
    if not client.connected:
        client.close()
        raise ServerUnavailable(client.trouble)
    return client


# ---- the server


def _seconds(text: str) -> float:
    """Of an age such as `5m`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise typer.BadParameter(f"Expected a number and s, m, h or d, as `5m`, got {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@app.command()
def serve(config_file: ConfigFile = None, socket: Socket = None) -> None:
    """Run the metadata server until SIGTERM or Ctrl-C. It holds the segments; it never touches a GPU."""
    import logging

    from vcache_backend import log_format
    from vcache_backend.metadata_server.server import serve as run

    settings = _load(config_file, socket).server
    log_format.begin(settings.log_format)
    try:
        run(settings)
    except VCacheError as error:
        if settings.log_format == "text":
            raise
        logging.error("%s", error)
        raise typer.Exit(1) from error
    except OSError as error:
        logging.exception("the server ends by what it did not expect")
        raise typer.Exit(1) from error


@app.command()
def status(
    config_file: ConfigFile = None,
    socket: Socket = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and refresh, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often --watch refreshes.")] = 1.0,
    since: Annotated[
        float | None,
        typer.Option(metavar="AGE", parser=_seconds, help="Only reports of the last `90s`, `5m`, `2h` or `1d`, all of them."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Segments, occupancy, hit rates, latencies and counters of the running server."""
    from vcache_backend.status import SHOWN_REPORTS, lately, render, summary

    before: ServerStats | None = None
    with _client(config_file, socket, reconnect=watch) as client, suppress(KeyboardInterrupt):
        while True:
            try:
                stats = client.stats() if since is None else lately(client.stats(), time.time() - since)
            except ServerUnavailable as error:
                if not watch:
                    raise
                typer.secho(f"{error}\ntrying again", fg="red", err=True)
            else:
                if as_json:
                    terminal.print_json(summary(stats), indent=None if watch else 2)
                else:
                    terminal.show(render(stats, before, every, reports=SHOWN_REPORTS if since is None else None), anew=watch)
                before = stats
            if not watch:
                break
            terminal.pause(every)


@app.command()
def clear(
    namespace: Annotated[str, typer.Option(metavar="HEX", help="Only this namespace, as `vcache status` names it.")] = "",
    offloaded: Annotated[
        bool,
        typer.Option("--offload", help="Also in the offload tier, which other nodes may share; a reset, see docs/mooncake.md."),
    ] = False,
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Forget every chunk, or those of one namespace. Segments stay."""
    from vcache_backend.metadata_server.messages import NAMESPACE_BYTES

    try:
        prefix = bytes.fromhex(namespace)
    except ValueError:
        prefix = b"?"
    if len(prefix) not in (0, NAMESPACE_BYTES):
        wanted = f"Expected {2 * NAMESPACE_BYTES} hexadecimal digits"
        raise typer.BadParameter(f"{wanted}, got {namespace!r}", param_hint="--namespace")
    offload = config.load(config_file).offload
    if offloaded and offload.policy == "off":
        raise ConfigError("no offload tier: offload.policy is off; name the file that sets it with --config")
    with _client(config_file, socket) as client:
        count = client.clear(prefix, reset=offloaded)
    typer.echo(f"{count:,} chunks forgotten")
    if offloaded:
        from vcache_backend.offload import objects
        from vcache_backend.offload.client import remove_under

        removed = remove_under(offload.mooncake, objects.start(prefix))
        typer.echo(f"{removed:,} objects removed from the offload tier")
    elif offload.policy != "off":
        typer.echo("what the offload tier has of them is found again; --offload removes that, too")


# ---- segments


def _bytes(text: str) -> config.ByteSize:
    try:
        nbytes = config.ByteSize.parse(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nbytes <= 0:
        raise typer.BadParameter("Expected more than 0 bytes")
    return nbytes


@segment_app.command("add")
def segment_add(
    device: Annotated[str, typer.Option(metavar="DEVICE", help="`cuda:N`, a GPU's UUID, `host` or `host:NAME`.")],
    nbytes: Annotated[config.ByteSize, typer.Option("--bytes", metavar="SIZE", parser=_bytes, help="For example `64GiB`.")],
    config_file: ConfigFile = None,
    socket: Socket = None,
    as_json: Json = False,
) -> None:
    """Lend memory of a device, an idle GPU's for example. The server keeps it; this command ends at once."""
    from vcache_backend.status import plain
    from vcache_backend.vram_pool import devices, segment

    try:
        place = devices.resolve(device)
    except ConfigError as error:
        raise ConfigError(str(error).replace("pool.device:", "--device", 1)) from error
    # Pages are taken when they are first written: too many would be missing late, to whoever writes them.
    if place.medium == "host" and nbytes > (available := config.ByteSize(devices.host_available())):
        raise SegmentError(f"--bytes {nbytes}: {available.about} of host memory are available; lend less")
    with _client(config_file, socket) as client, segment.create(place, int(nbytes)) as owned:
        client.add_segment(owned.info, owned.fd)
        info = owned.info
    if as_json:
        return terminal.print_json(plain(info))
    typer.echo(f"{info.id}: {config.ByteSize(info.nbytes).about} of {info.device} lent")


@segment_app.command("list")
def segment_list(config_file: ConfigFile = None, socket: Socket = None, as_json: Json = False) -> None:
    """The segments of the pool."""
    from vcache_backend.status import plain, segments_table

    with _client(config_file, socket) as client:
        segments = client.list_segments()
    return terminal.print_json(plain(segments)) if as_json else terminal.show(segments_table(segments))


@segment_app.command("drop")
def segment_drop(
    segment: Annotated[str, typer.Argument(metavar="ID", help="The segment's id, as `vcache segment list` names it.")],
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Wait so long for its last readers and writers.")] = 0.0,
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Take a segment back: its chunks are forgotten, its memory is free once nobody reads or writes there."""
    from vcache_backend.metadata_server.messages import SegmentId

    with _client(config_file, socket) as client:
        dropped = client.drop_segment(SegmentId(segment))
        typer.echo(f"{segment}: {dropped.chunks:,} chunks forgotten")
        gone = dropped.gone
        deadline = time.monotonic() + wait
        while not gone and time.monotonic() < deadline:
            time.sleep(0.05)
            gone = all(info.id != segment for info in client.list_segments())
    if not gone and wait:
        raise SegmentError(f"{segment} is still being read or written after {wait:g} s; it goes when that ends")
    typer.echo(f"{segment}: gone" if gone else f"{segment}: goes when its last readers and writers end")


@segment_app.command("resize")
def segment_resize(
    segment: Annotated[str, typer.Argument(metavar="ID", help="The segment's id, as `vcache segment list` names it.")],
    nbytes: Annotated[config.ByteSize, typer.Argument(metavar="SIZE", parser=_bytes, help="What it keeps, as `8GiB`.")],
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Wait so long for its last readers and writers.")] = 60.0,
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Take memory back from a segment while requests are served. Chunks that lie behind SIZE are forgotten; the offload tier keeps its
    own. A segment on a GPU is one allocation: it goes with all its chunks, and a smaller one is lent in its place."""
    from vcache_backend.metadata_server.messages import SegmentId

    with _client(config_file, socket) as client:
        info = _segment(client, segment)
        before, deadline = info, time.monotonic() + wait
        if info is not None and info.medium == "cuda":
            return _replace(client, info, int(nbytes), deadline)
        info = client.resize_segment(SegmentId(segment), int(nbytes))
        while info is not None and (left := info.nbytes - info.given_back - int(nbytes)) > 0 and time.monotonic() < deadline:
            time.sleep(0.05)
            info = _segment(client, segment)
    if info is None or before is None:
        raise SegmentError(f"{segment} was dropped meanwhile")
    chunks = f"{max(before.chunks - info.chunks, 0):,} chunks forgotten"
    if left > 0:
        typer.echo(f"{segment}: {chunks}")
        raise SegmentError(
            f"{segment}: {config.ByteSize(left).about} are still being read or written; they are freed when that ends"
        )
    has = config.ByteSize(info.nbytes - info.given_back).about
    typer.echo(f"{segment}: {config.ByteSize(info.given_back).about} given back, {has} left, {chunks}")


def _segment(client: Client, id_: str) -> SegmentInfo | None:
    return next((info for info in client.list_segments() if info.id == id_), None)


def _replace(client: Client, info: SegmentInfo, nbytes: int, deadline: float) -> None:
    """A smaller segment on the same GPU. Nothing of the old one is given back before all processes have unmapped it."""
    from vcache_backend.vram_pool import devices, segment

    if nbytes > info.nbytes:
        raise SegmentError(f"{info.id} has {info.nbytes:,} B; to lend more, use `vcache segment add`")
    place = devices.resolve(info.device)
    chunks = client.drop_segment(info.id).chunks
    while _segment(client, info.id) is not None:
        if time.monotonic() > deadline:
            raise SegmentError(f"{info.id} goes when its last readers and writers end; then lend less with `vcache segment add`")
        time.sleep(0.05)
    with segment.create(place, nbytes) as owned:
        client.add_segment(owned.info, owned.fd)
    typer.echo(
        f"{info.id}: gone, {chunks:,} chunks forgotten; {owned.info.id} of {config.ByteSize(owned.nbytes).about} in its place"
    )


# ---- configuration


@config_app.command("init")
def config_init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="The new file; nothing is overwritten.")] = Path("vcache.yaml"),
    like: Annotated[str, typer.Option(metavar="NAME", help="Which file; an unknown name lists them.")] = "vcache",
) -> None:
    """Write a commented configuration file: every key with its default and the reason to change it, or a short one."""
    package = Path(__file__).resolve().parent
    folder = next(place for place in (package / "configs", package.parent / "configs") if place.is_dir())
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if like not in files:
        raise typer.BadParameter(f"Expected one of {', '.join(files)}, got {like!r}", param_hint="--like")
    try:
        with path.open("xb") as made:
            made.write(files[like].read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; nothing was written") from error
    typer.echo(f"{path}: written; its first lines say how it is used")


@config_app.command("check")
def config_check(path: Annotated[Path, typer.Argument(help="The YAML file.")]) -> None:
    """Read a file strictly: an unknown key or an impossible value is an error that names it, its line, and what could stand there."""
    from vcache_backend.doctor.server import check_socket
    from vcache_backend.vram_pool import devices

    loaded = config.load(path)
    try:
        devices.check(loaded.pool.device)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for finding in check_socket(loaded):
        if finding.status == "fail":
            raise ConfigError(f"{path}: server.socket: {finding.detail}; {finding.advice}")
    typer.echo(f"{path}: ok")


@config_app.command("show")
def config_show(config_file: ConfigFile = None, socket: Socket = None, as_json: Json = False) -> None:
    """The configuration in force, every default written out."""
    values = config.dump(_load(config_file, socket))
    terminal.print_json(values) if as_json else typer.echo(msgspec.yaml.encode(values).decode().rstrip())


# ---- the machine


@app.command()
def doctor(
    config_file: ConfigFile = None,
    socket: Socket = None,
    as_json: Json = False,
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_FOLDER", help="Say of this model whether vLLM's connector caches it.")
    ] = "",
) -> None:
    """Check GPUs, peer access, driver, packages and the socket: what is wrong, and what to do. Exit code 1 on a failure."""
    from vcache_backend.doctor import diagnose

    _show_findings(diagnose(_load(config_file, socket), model), as_json)


@app.command()
def plan(
    model: Annotated[str, typer.Option(metavar="NAME_OR_FOLDER", help="A folder with a config.json, or a model in the cache.")],
    gpus: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="GPUs that lend memory to the pool.")] = 1,
    tokens: Annotated[int, typer.Option(min=0, max=1 << 50, metavar="TOKENS", help="What the pool shall hold of prompts.")] = 0,
    gpu_memory: Annotated[
        config.ByteSize | None,
        typer.Option(metavar="SIZE", parser=_bytes, help="Of one GPU, such as 80GiB: what is left for vLLM?"),
    ] = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """How much memory a pool for a model takes: what GPUs lend for so many tokens, or how many tokens what they lend holds."""
    from vcache_backend.doctor.plan import plan

    _show_findings(list(plan(model, config.load(config_file), gpus, tokens, gpu_memory or 0)), as_json)


def _show_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """What is worst first. Exit code 1 with a failure among them."""
    from vcache_backend.status import level, plain, table

    if as_json:
        terminal.print_json(plain(findings))
    else:
        worst = sorted(findings, key=lambda finding: ("fail", "warn", "ok").index(finding.status))
        rows = [(level(one.status), one.check, "\n→ ".join(filter(None, (one.detail, one.advice)))) for one in worst]
        terminal.show(table(None, ("", "check", "~finding → what to do"), rows))
        failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
        typer.echo(f"{len(findings)} findings: {failed} to put right (fail), {warned} to know of (warn)")
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(ctx: typer.Context) -> None:
    """Measure this machine, from a checkout; `vcache bench --help` lists the cases."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise ConfigError("the benchmarks are not part of the package: in a checkout of vcache run `python -m benchmarks`")
    sys.path.insert(0, str(checkout))
    raise typer.Exit(int(import_module("benchmarks.__main__").main(ctx.args) or 0))


@app.command()
def demo(
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """A server and two workers share real KV bytes on this machine; every byte is checked. Exit code 1 on a wrong one."""
    from vcache_backend.demo import run

    raise typer.Exit(run(config.load(config_file), as_json))


@app.command()
def version(as_json: Json = False) -> None:
    """The version of this package and of its protocol."""
    from vcache_backend.metadata_server.messages import PROTOCOL_VERSION

    if as_json:
        return terminal.print_json({"version": __version__, "protocol": PROTOCOL_VERSION})
    typer.echo(f"vcache {__version__}, protocol {PROTOCOL_VERSION}")


if __name__ == "__main__":
    main()
