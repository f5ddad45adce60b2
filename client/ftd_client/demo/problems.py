"""What can go wrong in the demo alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from ftd.errors import EXIT_USAGE, FtdError


class DemoError(FtdError):
    """A step of the demo failed, or its proof did."""

    code = "demo"


class MissingExtraError(DemoError):
    """A package that only the demo needs is not installed."""

    code = "missing_extra"
    exit_status = EXIT_USAGE


class CommandFailedError(DemoError):
    """A command of ftd ended with an error that it has printed itself."""

    code = "demo_command"

    def __init__(self, command: str, status: int) -> None:
        super().__init__(f"{command} ended with status {status}")
        self.args = (command, status)
        self.status = status


class InterruptedDemoError(DemoError):
    """A signal ended the demo.

    Attributes:
        signal_number: which one.
    """

    code: ClassVar[str] = "interrupted"

    def __init__(self, signal_number: int, name: str) -> None:
        super().__init__(f"the demo was ended by {name}: its workers and its daemon are stopped")
        self.args = (signal_number, name)
        self.signal_number = signal_number


@contextmanager
def step(doing: str, remedy: str) -> Iterator[None]:
    """Turns what foreign code raises inside into one error: `doing` reads "BertModel can't be built"."""
    try:
        yield
    except FtdError:
        raise
    except Exception as error:  # libraries and model code may raise anything
        said = " ".join(str(error).split())
        shown = said if len(said) <= 300 else f"{said[:300]} …"
        raise DemoError(f"{doing}: {type(error).__name__}: {shown}", remedy) from error
