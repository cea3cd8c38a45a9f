"""The program `vcache`. Each command reads the configuration, calls one function and shows the
result.

A command imports what it needs in its body, so that `vcache --help` is quick and `serve` never
loads torch. `command` turns errors into one line on stderr."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vcache_backend import __version__, command, config, config_file, segment_commands, terminal
from vcache_backend.command import ConfigFile, Json, Socket
from vcache_backend.errors import ConfigError, ServerUnavailable, VCacheError

if TYPE_CHECKING:
    from vcache_backend.doctor.finding import Finding
    from vcache_backend.metadata_server.messages import ServerStats

STORE_BYTES = config.ByteSize(4 << 30)

app = command.group(
    "Share transformer KV caches among the inference processes of a node.", root=True
)
config_app = command.group("Write a configuration file, check one, or show what is in force.")
app.add_typer(segment_commands.app, name="segment")
app.add_typer(config_app, name="config")


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Share transformer KV caches among the inference processes of a node."""


def main() -> None:
    """The entry point `vcache`."""
    # The commands' own errors say what is wrong with the connection.
    logging.getLogger("vcache_backend.metadata_server.calls.channel").setLevel(logging.ERROR)
    with terminal.whatever_it_shows():
        app(prog_name="vcache")


# ---- the server


def _seconds(text: str) -> float:
    """The seconds of an age such as `5m`. Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise typer.BadParameter(f"Expected a number and s, m, h or d, as `5m`, got {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@app.command()
def serve(config_file: ConfigFile = None, socket: Socket = None) -> None:
    """Run the metadata server until SIGTERM or Ctrl-C. It holds the segments; it never touches a
    GPU.
    """
    from vcache_backend import log_format
    from vcache_backend.metadata_server.server import serve as run

    settings = command.load(config_file, socket).server
    log_format.begin(settings.log_format)
    try:
        run(settings)
    except VCacheError as error:
        if settings.log_format == "text":
            raise
        logging.error("%s", error)
        raise typer.Exit(1) from error
    except OSError as error:
        logging.exception("the server ends because of an unexpected error")
        raise typer.Exit(1) from error


@app.command()
def status(
    config_file: ConfigFile = None,
    socket: Socket = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Stay and refresh, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="How often --watch refreshes."),
    ] = 1.0,
    since: Annotated[
        float | None,
        typer.Option(
            metavar="AGE",
            parser=_seconds,
            help="Show all reports of the last `90s`, `5m`, `2h` or `1d`, and no older ones.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", "-a", help="Show counters, latencies and who has read what, too."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether sharing works: who shares, what is wrong, the hit rate and the pool."""
    from vcache_backend.status import SHOWN_REPORTS, lately, render, summary

    before: ServerStats | None = None
    with (
        command.client(config_file, socket, reconnect=watch) as client,
        suppress(KeyboardInterrupt),
    ):
        while True:
            try:
                stats = (
                    client.stats() if since is None else lately(client.stats(), time.time() - since)
                )
            except ServerUnavailable as error:
                if not watch:
                    raise
                typer.secho(f"{error}\ntrying again", fg="red", err=True)
            else:
                if as_json:
                    terminal.print_json(summary(stats), indent=None if watch else 2)
                else:
                    reports = SHOWN_REPORTS if since is None else None
                    terminal.show(render(stats, before, every, reports, everything), anew=watch)
                before = stats
            if not watch:
                break
            terminal.pause(every)


@app.command()
def clear(
    namespace: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only this namespace, as `vcache status --all` names it."),
    ] = None,
    offloaded: Annotated[
        bool,
        typer.Option(
            "--offload",
            help=(
                "Also clear the offload tier, which other nodes may share: a reset, see "
                "docs/mooncake.md."
            ),
        ),
    ] = False,
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Forget every chunk, or those of one namespace. Segments stay."""
    from vcache_backend.metadata_server.messages import NAMESPACE_BYTES

    try:
        prefix = bytes.fromhex(namespace or "")
    except ValueError:
        prefix = b"?"
    # An empty HEX, of a variable that is not set, is not every namespace.
    if namespace is not None and len(prefix) != NAMESPACE_BYTES:
        wanted = f"Expected {2 * NAMESPACE_BYTES} hexadecimal digits"
        raise typer.BadParameter(f"{wanted}, got {namespace!r}", param_hint="--namespace")
    offload = config.load(config_file).offload
    if offloaded and offload.policy == "off":
        raise ConfigError(
            "no offload tier: offload.policy is off; name the file that sets it with --config"
        )
    with command.client(config_file, socket) as client:
        count = client.clear(prefix, reset=offloaded)
    if namespace and not count:
        typer.echo(
            f"no chunks of namespace {namespace} are in the pool; `vcache status --all` lists "
            "the namespaces"
        )
    else:
        typer.echo(f"{count:,} chunks forgotten")
    if offloaded:
        from vcache_backend.offload import objects
        from vcache_backend.offload.client import remove_under

        removed = remove_under(offload.mooncake, objects.start(prefix))
        typer.echo(f"{removed:,} objects removed from the offload tier")
    elif offload.policy != "off":
        typer.echo(
            "chunks in the offload tier stay and are found again; --offload removes them, too"
        )


# ---- configuration


@config_app.command("init")
def config_init(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="The new file; nothing is overwritten. -: show it."),
    ] = Path("vcache.yaml"),
    like: Annotated[
        str, typer.Option(metavar="NAME", help="Which file; an unknown name lists them.")
    ] = "vcache",
) -> None:
    """Write a commented configuration file: every key with its default and the reason to change it,
    or a short one.
    """
    package = Path(__file__).resolve().parent
    folder = next(
        place for place in (package / "configs", package.parent / "configs") if place.is_dir()
    )
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if like not in files:
        raise typer.BadParameter(
            f"Expected one of {', '.join(files)}, got {like!r}", param_hint="--like"
        )
    if str(path) == "-":
        return typer.echo(files[like].read_text("utf-8"), nl=False)
    try:
        with path.open("xb") as made:
            made.write(files[like].read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; nothing was written") from error
    typer.echo(f"{path}: written; its first lines say how it is used")


@config_app.command("check")
def config_check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The YAML file.")],
) -> None:
    """Check a file strictly: an unknown key or an impossible value is an error that names it, its
    line, and what is possible there.
    """
    from vcache_backend.doctor.server import check_socket

    values, source, lines = config.read(path)
    loaded = config.from_dict(values, source, lines)
    if (values.get("server") or {}).get("socket") != loaded.server.socket:
        lines.pop(".server.socket", None)  # the path is VCACHE_SOCKET's, not of this line
    at = f"{path}: {config_file.line(lines, '.server.socket')}server.socket: "
    if not loaded.server.path.is_absolute():
        raise ConfigError(
            f"{at}{loaded.server.path} depends on the folder that vcache is started in; write "
            "the whole path"
        )
    for finding in check_socket(loaded):
        if finding.status == "fail":
            raise ConfigError(f"{at}{finding.detail}; {finding.advice}")
    if loaded.server.path.exists() and not loaded.server.path.is_socket():
        raise ConfigError(
            f"{at}{loaded.server.path} is there and is no socket; remove it, or name another path"
        )
    typer.echo(f"{path}: ok")


@config_app.command("show")
def config_show(
    config_file: ConfigFile = None, socket: Socket = None, as_json: Json = False
) -> None:
    """Show the configuration in force, with all defaults."""
    values = config.dump(command.load(config_file, socket))
    terminal.print_json(values) if as_json else typer.echo(
        msgspec.yaml.encode(values).decode().rstrip()
    )


# ---- the machine


@app.command()
def doctor(
    config_file: ConfigFile = None,
    socket: Socket = None,
    as_json: Json = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_FOLDER", help="Say only whether vLLM's connector caches this model."
        ),
    ] = "",
) -> None:
    """Check GPUs, peer access, driver, packages and the socket: what is wrong, and what to do. Exit
    code 1 on a failure.
    """
    from vcache_backend.doctor import diagnose

    if model:
        _say_that_vllm_is_asked()
    _show_findings(diagnose(command.load(config_file, socket), model), as_json)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_FOLDER",
            help=(
                "A folder with a config.json, or a model in Hugging Face's cache; vLLM is "
                "asked about it."
            ),
        ),
    ],
    gpus: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, metavar="N", help="GPUs that lend memory to the pool."),
    ] = 1,
    tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            parser=command.tokens_of,
            help="Prompt tokens that the pool should hold, such as 500k. 0: say how many it holds.",
        ),
    ] = 0,
    gpu_memory: Annotated[
        config.ByteSize | None,
        typer.Option(
            metavar="SIZE",
            parser=command.nbytes_of,
            help="Memory of one GPU, such as 80GiB: say what is left for vLLM.",
        ),
    ] = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """How much memory GPUs must lend for a pool of so many tokens of a model, or how many tokens a
    pool holds.
    """
    from vcache_backend.doctor.plan import plan

    _say_that_vllm_is_asked()
    _show_findings(
        list(plan(model, config.load(config_file), gpus, tokens, gpu_memory or 0)),
        as_json,
        as_they_are=True,
    )


def _say_that_vllm_is_asked() -> None:
    if sys.stderr.isatty():
        typer.echo("asking vLLM about the model, which takes some 20 s", err=True)


def _show_findings(findings: Sequence[Finding], as_json: bool, as_they_are: bool = False) -> None:
    """Print findings, the worst first, or in their own order. Exits with code 1 if one is a
    failure.
    """
    from vcache_backend.status import level, plain, table

    if as_json:
        terminal.print_json(plain(findings))
    else:
        worst = sorted(findings, key=lambda finding: ("fail", "warn", "ok").index(finding.status))
        shown = findings if as_they_are else worst
        rows = [
            (level(one.status), one.check, "\n→ ".join(filter(None, (one.detail, one.advice))))
            for one in shown
        ]
        terminal.show(table(None, ("", "check", "~finding → what to do"), rows))
        failed, warned = (
            sum(finding.status == status for finding in findings) for status in ("fail", "warn")
        )
        typer.echo(f"{len(findings)} findings: {failed} fail, {warned} warn")
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(ctx: typer.Context) -> None:
    """Measure this machine, from a checkout; `vcache bench --help` lists the cases."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "the benchmarks are not part of the package: in a checkout of vcache run `python -m "
            "benchmarks`"
        )
    sys.path.insert(0, str(checkout))
    raise typer.Exit(int(import_module("benchmarks.__main__").main(ctx.args) or 0))


@app.command()
def demo(as_json: Json = False) -> None:
    """Let a server and two workers share KV on this machine, and check every byte. Exit code 1 if
    one is wrong.
    """
    from vcache_backend.demo import run

    raise typer.Exit(run(as_json))


@app.command()
def mooncake(
    nbytes: Annotated[
        config.ByteSize,
        typer.Option(
            "--segment",
            metavar="SIZE",
            parser=command.nbytes_of,
            help="Host memory that the provider lends.",
        ),
    ] = STORE_BYTES,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="This node's address, as other nodes reach it.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="The master's port. 0: 50051, or the next free one.",
        ),
    ] = 0,
    master: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Use this master, and start none.")
    ] = "",
    logs: Annotated[
        str, typer.Option(metavar="FOLDER", help="Write both logs into this folder.")
    ] = "",
) -> None:
    """Run a Mooncake store for the offload tier, a master and a provider of host memory, until
    Ctrl-C. Mooncake has no passwords and no encryption: whoever reaches its ports reads and
    writes."""
    script, programs = (
        Path(__file__).parent / "offload" / "mooncake.sh",
        Path(sys.executable).parent,
    )
    os.execvp(
        "bash",
        ["bash", str(script), str(programs), str(int(nbytes)), host, str(port or ""), master, logs],
    )


@app.command()
def version(as_json: Json = False) -> None:
    """Show the version of this package and of its protocol."""
    from vcache_backend.metadata_server.messages import PROTOCOL_VERSION

    if as_json:
        return terminal.print_json({"version": __version__, "protocol": PROTOCOL_VERSION})
    typer.echo(f"vcache {__version__}, protocol {PROTOCOL_VERSION}")


if __name__ == "__main__":
    main()
