"""The program `vcache`. Each command reads the configuration, calls one function and shows the
result.

Commands import modules in their bodies, so that `vcache --help` is quick and `serve` never loads
torch. `_Group` turns errors into one line on stderr."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from typer.core import TyperGroup

from vcache_backend import __version__, config
from vcache_backend.errors import (
    MAX_LINE_CHARS,
    ConfigError,
    SegmentError,
    ServerUnavailable,
    VCacheError,
    printable,
)

if TYPE_CHECKING:
    from vcache_backend.protocol.client import Client

# ---- what commands share


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, **more)


_FILE = "YAML file. Without it: the one that VCACHE_CONFIG names, or the defaults."
# readable=False: using it raises an error of one line.
ConfigFile = Annotated[Path | None, option("PATH", _FILE, "--config", "-c", readable=False)]
_SOCKET = "The server's socket, in place of the configured one."
Socket = Annotated[Path | None, option("PATH", _SOCKET, "--socket", readable=False)]
Json = Annotated[bool, option(None, "Print JSON instead of tables.", "--json")]
_EXIT_CODES = "Exit codes: 0 success; 1 failure, and why; 2 wrong usage."


class _Group(TyperGroup):
    """Commands that end with one line on stderr, and exit code 1, if a VCacheError is raised or a
    module is missing that the base install lacks."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for subcommand in self.commands.values():
            first = " ".join((subcommand.help or "").split()).partition(". ")[0]
            subcommand.short_help = first.removesuffix(".")  # else the list of commands cuts it off

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VCacheError as error:
            line = str(error)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "numpy", "triton"):
                raise
            line = f"{error.name} is not installed: pip install '/path/to/vcache[engine]'"
        typer.secho(f"vcache: {printable(line, MAX_LINE_CHARS)}", fg="red", err=True)
        raise typer.Exit(1)


def group(text: str, root: bool = False) -> typer.Typer:
    """An empty group of commands. text: the help. root: with completion and exit codes."""
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=root,
        epilog=_EXIT_CODES if root else None,
        pretty_exceptions_enable=False,
        # rich's boxes show `<bool>` behind flags, and squeeze texts beside wide columns
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def load(path: Path | None, socket: Path | None) -> config.Config:
    """The configuration of file `path`, with `socket` in place of `server.socket`; either may be
    None. A relative socket starts at the working folder. Raises ConfigError."""
    loaded = config.load(path)
    if socket is None:
        return loaded
    if not socket.name:
        given = "" if socket == Path() else str(socket)
        raise ConfigError(f"--socket: socket must be the path of a file, got {given!r}")
    return config.with_socket(loaded, str(socket.absolute()), "--socket")


def _is_watched() -> bool:
    """Whether stderr is a terminal. A shell's `2>&-` leaves none at all."""
    return sys.stderr is not None and sys.stderr.isatty()


def connected(path: Path | None, socket: Path | None, reconnect: bool = False) -> Client:
    """Connect to the server, for one command. reconnect: again, whenever the connection is lost.
    A terminal is told after a second. Raises ServerUnavailable with the reason.

    Every call may take `client.control_seconds`: people can wait, and a busy machine should not end
    a command early."""
    from vcache_backend.protocol.client import Client

    loaded = load(path, socket)
    waits = max(loaded.client.control_seconds, loaded.client.request_seconds)
    patient = msgspec.structs.replace(loaded.client, connect_seconds=waits, request_seconds=waits)
    said = f"waiting for the server at {loaded.server.path}"
    waiting = threading.Timer(1.0, typer.echo, (said,), {"err": True})
    if _is_watched():
        waiting.start()
    try:
        made = Client(loaded.server.path, patient, reconnect=reconnect)
    finally:
        waiting.cancel()
    if not made.connected:
        made.close()
        raise ServerUnavailable(made.trouble)
    return made


def clean_up_if_ended() -> None:
    """From now on Ctrl-C and SIGTERM raise KeyboardInterrupt: exit code 130."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def nbytes_of(text: str | config.ByteSize) -> config.ByteSize:
    """An option's value in bytes. Typer passes the default, too. Raises BadParameter."""
    try:
        nbytes = config.ByteSize.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nbytes <= 0:
        raise typer.BadParameter("Expected more than 0 bytes")
    return nbytes


# ---- the program

app = group("Share transformer KV caches among the inference processes of a node.", root=True)
config_app = group("Write a configuration file, or check one and show what is in force.")
segment_app = group("Lend memory to the pool, take it back.")
app.add_typer(segment_app, name="segment")
app.add_typer(config_app, name="config")


def main() -> None:
    # The commands' own errors say what is wrong with the connection.
    logging.getLogger("vcache_backend.protocol.channel").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters the encoding cannot represent
    try:
        app(prog_name="vcache")
    except OSError as error:  # such as a full disk
        sys.exit(f"vcache: {error}")


def _print_version(asked: bool) -> None:
    if asked:
        from vcache_backend.protocol.messages import PROTOCOL_VERSION

        typer.echo(f"vcache {__version__}, protocol {PROTOCOL_VERSION}")
        raise typer.Exit


_VERSION = "Show the versions of the package and of its protocol, and exit."
Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help=_VERSION)
]


@app.callback()
def _root(version: Version = False) -> None:
    """Share transformer KV caches among the inference processes of a node."""


# ---- the server


Arguments = typer.Argument(metavar="ARGUMENT", help="Of `vllm`, such as `serve MODEL`.")
Log = Annotated[Path | None, typer.Option(hidden=True)]
"""Of `start`: a log of bounded size in place of stderr."""


@app.command()
def serve(config_file: ConfigFile = None, socket: Socket = None, log: Log = None) -> None:
    """Run the metadata server until SIGTERM or Ctrl-C. It holds the segments, and uses no GPU."""
    from vcache_backend import log_format
    from vcache_backend.metadata_server.main import serve as run

    settings = load(config_file, socket).server
    log_format.begin(log)
    run(settings)


# As vLLM gets them: options of this command come before the first word.
@app.command("vllm", context_settings={"allow_interspersed_args": False})
def run_vllm(arguments: Annotated[list[str], Arguments]) -> None:
    """Run `vllm serve MODEL …`, or another command of vLLM that loads a model, with vcache.

    The arguments go to vLLM, and `--kv-transfer-config` with our connector after them. The settings
    are those of VCACHE_CONFIG."""
    from vcache_backend.supported import VLLM

    if wrong := config.left_out():
        raise ConfigError(wrong)
    flag, program = "--kv-transfer-config", "vllm.entrypoints.cli.main"
    if any(one.replace("_", "-").startswith(flag) for one in arguments):
        raise ConfigError(f"`vcache vllm` sets {flag}: run `vllm` itself with yours")
    if find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed in {sys.prefix}, where vcache is: install vcache beside vLLM"
        )
    ours = '{"kv_connector":"VCacheConnector","kv_role":"kv_both"}'
    if (name := VLLM.installed()[0]) != VLLM.name:
        raise ConfigError(
            f"`vllm` does not run from the package {name}: start `python -m "
            f"vllm.entrypoints.openai.api_server` with {flag} '{ours}'"
        )
    # The vLLM beside our plugin: another one on PATH may not know it.
    command_line = [sys.executable, "-P", "-m", program, *arguments, flag, ours]
    os.execv(command_line[0], command_line)


@app.command()
def status(config_file: ConfigFile = None, socket: Socket = None, as_json: Json = False) -> None:
    """Say whether sharing works: who shares, what is wrong, the hit rate, who read from whom,
    the pool. JSON also has counters and latencies."""
    from vcache_backend import tables
    from vcache_backend.status import summary

    with connected(config_file, socket) as client:
        stats = client.stats()
    tables.print_json(summary(stats)) if as_json else tables.show(*tables.status(stats))


@app.command()
def top(config_file: ConfigFile = None, socket: Socket = None) -> None:
    """Show the status live, on one screen, until Ctrl-C."""
    from vcache_backend import tables

    with connected(config_file, socket, reconnect=True) as client:
        tables.live(client)


_OFFLOAD = "Also clear the offload tier, which other nodes may share: see docs/mooncake.md."
Offloaded = Annotated[bool, typer.Option("--offload", help=_OFFLOAD)]


@app.command()
def clear(
    offloaded: Offloaded = False, config_file: ConfigFile = None, socket: Socket = None
) -> None:
    """Forget every chunk. Segments stay."""
    offload = config.load(config_file).offload
    if offloaded and offload.policy == "off":
        raise ConfigError(
            "no offload tier: offload.policy is off; name the file that sets it with --config"
        )
    with connected(config_file, socket) as client:
        typer.echo(f"{client.clear(reset=offloaded):,} chunks and blocks forgotten")
    if offloaded:
        from vcache_backend.offload import objects
        from vcache_backend.offload.process import remove_under

        removed = remove_under(offload.mooncake, objects.NAME_PREFIX)
        typer.echo(f"{removed:,} objects removed from the offload tier")
    elif offload.policy != "off":
        typer.echo("chunks in the offload tier stay and are found again; --offload removes them")


# ---- segments


Device = option("DEVICE", "`cuda:N`, a GPU's UUID, `host` or `host:NAME`.", "--device")
Size = option("SIZE", "For example `64GiB`.", "--bytes", parser=nbytes_of)
Segment = typer.Argument(metavar="ID", help="The segment's id, as `vcache status` names it.")


@segment_app.command("add")
def add_segment(
    device: Annotated[str, Device],
    nbytes: Annotated[Any, Size],
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Lend memory of a device, such as an idle GPU. The server keeps it when this command ends."""
    from vcache_backend.vram_pool import devices, regions

    if not config.is_device(device):
        wanted = f"Expected {config.DEVICE_FORMS}, got {device!r}"
        raise typer.BadParameter(wanted, param_hint="'--device'")
    place = devices.resolve(device)
    # Pages are allocated on first write: without this check a lack of memory would hit a later
    # writer.
    if place.medium == "host" and nbytes > (free := config.ByteSize(devices.host_available())):
        raise SegmentError(f"--bytes {nbytes}: {free.about} of host memory are free; lend less")
    with connected(config_file, socket) as client, regions.create(place, int(nbytes)) as owned:
        os.close(client.add_segment(owned.info, owned.fd)[1])
        info = owned.info
    typer.echo(f"{info.id}: {config.ByteSize(info.nbytes).about} of {info.device} lent")


@segment_app.command("drop")
def drop_segment(
    segment: Annotated[str, Segment], config_file: ConfigFile = None, socket: Socket = None
) -> None:
    """Take a segment back. Its chunks are forgotten. Its memory is freed once nobody uses it."""
    from vcache_backend.protocol.messages import SegmentId

    with connected(config_file, socket) as client:
        chunks = client.drop_segment(SegmentId(segment))
    typer.echo(f"{segment}: {chunks:,} chunks forgotten")


# ---- configuration


NewFile = typer.Argument(metavar="PATH", help="The new file; must not exist. -: print it.")


@config_app.command("init")
def config_init(path: Annotated[Path, NewFile] = Path("vcache.yaml")) -> None:
    """Write a commented configuration file: every key, its default and the reason to change it."""
    package = Path(__file__).resolve().parent
    folders = (package / "configs", package.parent / "configs")
    whole = next(folder for folder in folders if folder.is_dir()) / "vcache.yaml"
    text = whole.read_text("utf-8")
    if str(path) == "-":
        return typer.echo(text, nl=False)
    text = text.replace("configs/vcache.yaml", shlex.quote(str(path.absolute())))
    with ExitStack() as undo:
        try:
            file = path.open("xb")
            undo.callback(path.unlink)
            with file:
                file.write(text.encode(errors="replace"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        undo.pop_all()
    typer.echo(f"{path}: written; its second line says how it is used")


@config_app.command("show")
def config_show(config_file: ConfigFile = None, socket: Socket = None) -> None:
    """Show the configuration in force, with all defaults.

    A file is checked strictly: an unknown key or an impossible value is an error that names it, its
    line, and what is possible there."""
    values = config.dump(load(config_file, socket))
    typer.echo(msgspec.yaml.encode(values).decode().rstrip())


# ---- the machine


Model = option("NAME_OR_FOLDER", "Only say whether the vLLM connector caches this model.")


@app.command()
def doctor(
    config_file: ConfigFile = None,
    socket: Socket = None,
    as_json: Json = False,
    model: Annotated[str, Model] = "",
) -> None:
    """Check GPUs, peer access, driver, packages, server and offload tier: what is wrong, and what
    to do. Exit code 1 if a check fails."""
    from vcache_backend import tables
    from vcache_backend.doctor import diagnose
    from vcache_backend.status import plain

    if model and _is_watched():
        typer.echo("asking vLLM about the model, which takes some 20 s", err=True)
    findings = diagnose(load(config_file, socket), model)
    counts = Counter(finding.status for finding in findings)
    if as_json:
        tables.print_json(plain(findings))
    else:
        tables.show(tables.findings(findings))
        total = f"{len(findings)} finding{'s' * (len(findings) > 1)}"
        typer.echo(f"{total}: {counts['fail']} fail, {counts['warn']} warn")
    if counts["fail"]:
        raise typer.Exit(1)


Proved = typer.Argument(metavar="MODEL", help="As `vllm serve` takes it. Default: generated.")
Seconds = option("SECONDS", "Of work under load.", "--seconds", min=0.0, max=3600.0)
Share = option("WAY", "How instances share: in_place or pool.", "--share")


@app.command()
def prove(
    model: Annotated[str, Proved] = "",
    seconds: Annotated[float, Seconds] = 60.0,
    share: Annotated[Literal["in_place", "pool"], Share] = "in_place",
    as_json: Json = False,
) -> None:
    """Show that the installed vLLM and vcache give right hits on this machine, and keep the proof.

    Starts two instances. With a vLLM newer than those that vcache was tested with, instances share
    only behind a proof. Exit code 1 if something is wrong."""
    from vcache_backend import proofs, tables
    from vcache_backend import prove as proving
    from vcache_backend.status import plain

    clean_up_if_ended()
    proofs.room()
    asked = proving.Settings(model, share, seconds)
    proof, shown = proving.run(asked, lambda line: typer.echo(line, err=True))
    good, where, failed = all(one.status == "ok" for one in shown), "", None
    try:
        where = str(proofs.write(proof)) if good else ""
    except VCacheError as error:
        failed = error
    if as_json:
        tables.print_json(
            {"ok": bool(where), "file": where, "proof": plain(proof), "shown": plain(shown)}
        )
    else:
        tables.show(tables.findings(shown), *tables.proved(proof, where))
    if failed is not None:
        raise failed
    raise typer.Exit(0 if good else 1)


Lent = option("SIZE", "Host memory that the provider lends.", "--segment", parser=nbytes_of)
Host = option("ADDRESS", "This node's address, as other nodes reach it.")
Port = option("PORT", "The master's port. 0: 50051, or the next free one.", min=0, max=65535)
Master = option("HOST:PORT", "Use this master, and start none.")
Logs = option("FOLDER", "Write both logs into this folder.")


@app.command()
def mooncake(
    nbytes: Annotated[Any, Lent] = "4GiB",
    host: Annotated[str, Host] = "127.0.0.1",
    port: Annotated[int, Port] = 0,
    master: Annotated[str, Master] = "",
    logs: Annotated[str, Logs] = "",
) -> None:
    """Run a Mooncake store for the offload tier, a master and a provider of host memory, until
    Ctrl-C. Mooncake has no passwords and no encryption: whoever reaches its ports reads and
    writes."""
    if not host:  # with which the master would listen everywhere
        raise typer.BadParameter("Expected an address", param_hint="'--host'")
    script = str(Path(__file__).parent / "offload" / "mooncake.sh")
    programs = str(Path(sys.executable).parent)
    given = [programs, str(int(nbytes)), host, str(port or ""), master, logs]
    os.execvp("bash", ["bash", script, *given])
