"""`python -m ftd_client.demo`, which is what `ftd demo` runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from ftd.errors import EXIT_FAILED, EXIT_OK, FtdError, InternalError, UsageError
from ftd_client.demo.interrupts import Interrupts
from ftd_client.demo.problems import CommandFailedError, InterruptedDemoError
from ftd_client.demo.run import Options, run


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(path_type=Path), help="Another model directory that transformers can build.")
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="Worker processes.")
@click.option("--sentence", "sentences", multiple=True, metavar="TEXT", help="A sentence to embed; repeatable.")
def demo(model: Path | None, workers: int, sentences: tuple[str, ...]) -> None:
    """Start a daemon, attach workers, embed sentences, measure, compare with from_pretrained, and clean up."""
    with Interrupts() as interrupts:
        run(Options(model, workers, sentences), interrupts)


def main() -> NoReturn:
    """Exit statuses are those of `ftd`; a signal gives 128 and its number, as a shell reports it."""
    status = EXIT_OK
    try:
        demo.main(prog_name="ftd demo", standalone_mode=False)
    except CommandFailedError as error:
        status = error.status  # the command has said why
    except InterruptedDemoError as error:
        status = _say(error, 128 + error.signal_number)
    except FtdError as error:
        status = _say(error, error.exit_status)
    except click.ClickException as error:
        usage = UsageError(error.format_message(), "ftd demo --help")
        status = _say(usage, usage.exit_status)
    except BrokenPipeError:
        # the reader left before the proof was done; rich ends in the same way where it finds that out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except OSError as error:
        internal = InternalError(f"unexpected {type(error).__name__}: {error}", "please report this")
        status = _say(internal, internal.exit_status)
    sys.exit(status)


def _say(error: FtdError, status: int) -> int:
    click.echo(f"ftd: {error}", err=True)
    return status


if __name__ == "__main__":
    main()
