"""The command line: words in, exit statuses out. Everything it does is done elsewhere.

Imports of a command stay inside it: `ftd status` runs in health checks and loads neither torch nor the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from ftd import __version__
from ftd.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, FtdError, InternalError, NotBuiltError, UsageError

_NAMESPACE = click.option("-n", "--namespace", required=True, metavar="NS", help="Name of the set of weights.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, errors too.")
_LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, message="ftd %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """One copy of a model's weights per host, for every worker."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(EXIT_USAGE)


@cli.command()
@_NAMESPACE
@click.option("--model", type=click.Path(), help="A checkpoint, or org/name in the hub's cache.")
@click.option("--receive", is_flag=True, help="Wait for a process that publishes; short for --set receive=true.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration file (YAML).")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Overrides one value of the configuration.")
@click.option("--detach", is_flag=True, help="Return once the namespace is ready, or waits for a publisher.")
@click.option("--replace", is_flag=True, help="Stop a running daemon of the namespace first, by force if need be.")
@click.option("--log-level", type=_LOG_LEVELS, default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def start(
    namespace: str,
    model: str | None,
    config_file: Path | None,
    sets: tuple[str, ...],
    *,
    receive: bool,
    detach: bool,
    replace: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Publish a model's weights and serve them until stopped."""
    from ftd.daemon.signals import StopSignals

    with StopSignals(for_good=True) as signals:
        from ftd.shm.names import check_namespace

        check_namespace(namespace)
        if model == "":  # what an unset variable leaves, and to pathlib the working directory
            raise UsageError("--model: found '', expected the path of a checkpoint", "ftd start -n NS --model PATH")
        if replace:
            _stop_if_running(namespace)
        if detach:
            from ftd.daemon.detach import start_detached

            start_detached(_foreground_arguments(), namespace, os.environ, signals)
            return
        from ftd.daemon.app import StartOptions, run
        from ftd.daemon.logs import configure

        configure(log_level, log_format)
        sets += ("receive=true",) * receive
        run(StartOptions(namespace, None if model is None else Path(model), config_file, sets), os.environ, signals)


@cli.command()
@click.option("-n", "--namespace", metavar="NS", help="One namespace; all of the host without it.")
@_JSON
@click.option("--wait-ready", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait so long for it to be ready.")
def status(namespace: str | None, *, as_json: bool, wait_ready: float | None) -> None:
    """Say how a namespace is; the exit status is the health check."""
    from ftd.daemon import status as reports

    if namespace is None:
        if wait_ready is not None:
            raise UsageError("--wait-ready needs a namespace", "ftd status --namespace NS --wait-ready SECONDS")
        found = reports.report_all(os.environ)
        if as_json:
            click.echo(json.dumps(found, indent=2))
        else:
            from ftd.daemon.table import print_list

            print_list(found)
        sys.exit(reports.exit_status(found, one=False))
    shown = reports.report_when_ready(namespace, os.environ, wait_ready)
    if as_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        from ftd.daemon.table import print_one

        print_one(shown)
    sys.exit(reports.exit_status([shown], one=True))


@cli.command()
@_NAMESPACE
@click.option("--timeout", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="SECONDS")
@click.option("--force", is_flag=True, help="Then kill the daemon, and remove what it left.")
def stop(namespace: str, *, timeout: float, force: bool) -> None:
    """End the daemon; followers keep their mappings."""
    from ftd.daemon.stop import stop as stop_daemon

    click.echo(stop_daemon(namespace, os.environ, timeout_s=timeout, force=force))


@cli.command()
@_NAMESPACE
@_JSON
@click.option("--source", is_flag=True, help="Read the checkpoint's files again, too.")
def verify(namespace: str, *, as_json: bool, source: bool) -> None:
    """Check live weights against the digests of what was loaded."""
    from ftd.daemon.verify import report
    from ftd.daemon.verify_table import bar, print_report

    told = report(namespace, source=source, show=bar)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        print_report(told)
    sys.exit(EXIT_OK if told["ok"] else EXIT_FAILED)


@cli.command()
@_JSON
def doctor(*, as_json: bool) -> None:
    """Check whether this host suits ftd; say what to change."""
    from ftd.doctor.probe import look
    from ftd.doctor.report import report, show

    shown = report(look(os.environ))
    if as_json:
        click.echo(json.dumps(shown, indent=2))
    else:
        show(shown)
    sys.exit(EXIT_OK if shown["ok"] else EXIT_FAILED)


@cli.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> NoReturn:
    """Show it all on a real model: `ftd demo --help`."""
    # a process of its own: the daemon's package may not import the client's
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ftd_client.demo", *arguments])


def _not_built(name: str, purpose: str) -> None:
    @cli.command(
        name,
        help=f"{purpose} (not built yet)",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def refuse(**_arguments: object) -> NoReturn:
        raise NotBuiltError(f"`ftd {name}` is not built yet in ftd {__version__}", "see `ftd --help` for what is")


for _name, _purpose in {
    "reload": "Publish a new generation of a running namespace.",
    "sweep": "Remove what dead daemons left.",
    "top": "Watch namespaces and followers.",
}.items():
    _not_built(_name, _purpose)


def _stop_if_running(namespace: str) -> None:
    from ftd.daemon.stop import stop as stop_daemon
    from ftd.errors import NotRunningError

    with contextlib.suppress(NotRunningError):
        click.echo(stop_daemon(namespace, os.environ, timeout_s=30.0, force=True), err=True)


def _foreground_arguments() -> list[str]:
    """This very command line without the flags that the parent acts on."""
    return [argument for argument in sys.argv[1:] if argument not in ("--detach", "--replace")]


def main() -> NoReturn:
    """Entry point of the console script."""
    as_json = "--json" in sys.argv[1:]
    try:
        result = cli.main(prog_name="ftd", standalone_mode=False)
    except FtdError as error:
        _die(error, as_json=as_json)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "ftd"
        _die(UsageError(error.format_message(), f"{command} --help"), as_json=as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        sys.exit(EXIT_OK)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        _die(InternalError(f"unexpected {type(error).__name__}: {error}", "please report this"), as_json=as_json)
    sys.exit(result if isinstance(result, int) else EXIT_OK)


def _die(error: FtdError, *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"error": error.to_dict()}))
    else:
        click.echo(f"ftd: {error}", err=True)
    sys.exit(error.exit_status)
