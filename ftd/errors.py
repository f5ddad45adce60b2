"""Every error a user can meet: a stable code, an exit status, a message and a one-sentence remedy.

An error is data: it crosses the control socket and the coordination block by its code, pickles, and prints as
two lines (`ftd: message` and `  → remedy`). Exit statuses are those of the command line's contract.
"""

from __future__ import annotations

import errno
import os
from typing import Any, ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_RUNNING = 3
EXIT_NOT_READY = 4
EXIT_ALREADY_RUNNING = 5
EXIT_MEMORY = 6


class FtdError(Exception):
    """Root of all errors of ftd.

    Args:
        message: what failed, with what was found and what was expected; one line.
        remedy: what to do about it; one sentence, may be empty.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = EXIT_FAILED
    _by_code: ClassVar[dict[str, type[FtdError]]] = {}

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = " ".join(message.split())
        self.remedy = " ".join(remedy.split())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            # setdefault: the first class of a code is the one that `from_dict` restores
            FtdError._by_code.setdefault(cls.code, cls)

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.remedy}" if self.remedy else self.message

    def to_dict(self) -> dict[str, str]:
        """The error as the contract prints it: `{"code", "message", "remedy"}`."""
        return {"code": self.code, "message": self.message, "remedy": self.remedy}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> FtdError:
        """The error that `to_dict` described; a code of a newer peer becomes a plain `FtdError`."""
        cls = FtdError._by_code.get(str(fields.get("code")), FtdError)
        return cls.restore(str(fields.get("message", "")), str(fields.get("remedy", "")))

    @classmethod
    def restore(cls, message: str, remedy: str) -> FtdError:
        """An instance from its text alone, as it crosses a border; fields beyond it have their class's defaults."""
        error = cls.__new__(cls)
        FtdError.__init__(error, message, remedy)  # a subclass may make its text from other arguments
        return error


# --- what the user asked for -------------------------------------------------------------------------------------


class UsageError(FtdError):
    """The command line makes no sense."""

    code = "usage"
    exit_status = EXIT_USAGE


class ConfigError(FtdError):
    """A configuration value is unknown, malformed, or points to nothing."""

    code = "config"
    exit_status = EXIT_USAGE


class OffloadConfigError(ConfigError, ValueError):
    """A value of OffloadConfig, or a file or variable that gives one, is wrong; a ValueError as its callers expect."""

    code = "offload_config"


class MissingFileError(FtdError, FileNotFoundError):
    """Base of errors about a file that is not there.

    Attributes:
        errno, strerror, filename: as of any FileNotFoundError; `filename` is None where none was named.
    """

    code = "file_missing"

    def __init__(self, message: str, remedy: str = "", filename: str | None = None) -> None:
        super().__init__(message, remedy)
        # OSError has taken the two texts for number and reason
        self.errno, self.strerror, self.filename = errno.ENOENT, os.strerror(errno.ENOENT), filename


class ConfigMissingError(ConfigError, MissingFileError):
    """A configuration file that was named does not exist, or none was named where one has to be."""

    code = "config_missing"


class NotBuiltError(FtdError):
    """A command, flag or value of the contract that this release does not build yet."""

    code = "not_built"
    exit_status = EXIT_USAGE


class NamespaceError(FtdError):
    """A namespace breaks the naming rule."""

    code = "namespace"
    exit_status = EXIT_USAGE


class RuntimeDirError(FtdError):
    """No runtime directory can hold the control socket."""

    code = "runtime_dir"
    exit_status = EXIT_USAGE


# --- the checkpoint ----------------------------------------------------------------------------------------------


class SourceError(FtdError):
    """A checkpoint is broken, incomplete, or not one."""

    code = "source"


class SourceChangedError(SourceError):
    """A file of the checkpoint changed while it was read."""

    code = "source_changed"


class SourceDamagedError(SourceError):
    """A file of the checkpoint is not what its publisher says."""

    code = "source_damaged"


# --- memory and shared memory ------------------------------------------------------------------------------------


class MemoryShortError(FtdError):
    """/dev/shm, the cgroup, available memory or the budget cannot hold the weights."""

    code = "memory"
    exit_status = EXIT_MEMORY


class SegmentError(FtdError):
    """A segment is missing, of another inode or length, or its contents do not check."""

    code = "segment"


class AccessError(FtdError):
    """The operating system denies access to a segment, socket or directory."""

    code = "access"


# --- the daemon's life -------------------------------------------------------------------------------------------


class AlreadyRunningError(FtdError):
    """Another creator holds the namespace."""

    code = "already_running"
    exit_status = EXIT_ALREADY_RUNNING


class NotRunningError(FtdError):
    """No creator holds the namespace."""

    code = "not_running"
    exit_status = EXIT_NOT_RUNNING


class NotReadyError(FtdError):
    """The namespace has not published yet, or ends."""

    code = "not_ready"
    exit_status = EXIT_NOT_READY


class StopTimeoutError(FtdError):
    """The daemon did not end in the given time."""

    code = "stop_timeout"


class ControlError(FtdError):
    """The control socket gave no usable answer."""

    code = "control"


class NoAnswerError(ControlError):
    """A request was sent and no answer came: what the daemon did of it, and still does, is unknown."""

    code = "no_answer"


class FrameError(ControlError):
    """Bytes on the control socket are no frame: too large, cut short, or no msgpack map."""

    code = "frame"


class PushRefusedError(FtdError):
    """The daemon does not copy into a follower's GPU memory; the follower has another way."""

    code = "push_refused"


class PublishRefusedError(FtdError):
    """The daemon takes no weights of this process, or not now."""

    code = "publish_refused"


class PublishDamagedError(FtdError):
    """What arrived at the daemon is not what was sent; nothing of it is published."""

    code = "publish_damaged"


class ProtocolMismatchError(FtdError):
    """A participant speaks another major version of the protocol."""

    code = "protocol_mismatch"


class InternalError(FtdError):
    """A bug of ftd: the one error that a user cannot cause."""

    code = "internal"


# --- attach and bind ---------------------------------------------------------------------------------------------


class NoCreatorError(FtdError):
    """No creator lives in the namespace."""

    code = "no_creator"
    exit_status = EXIT_NOT_RUNNING


class CreatorFailedError(FtdError):
    """The creator could not publish; its own message is in this error's."""

    code = "creator_failed"


class CreatorDiedError(FtdError):
    """The creator was killed while it loaded: its lock is gone, and it left no reason."""

    code = "creator_died"


class CreatorHungError(FtdError):
    """The creator lives but its heartbeat is late."""

    code = "creator_hung"


class AttachTimeoutError(FtdError):
    """The namespace was not ready in the given time."""

    code = "attach_timeout"
    exit_status = EXIT_NOT_READY


class NoLeaseError(FtdError):
    """Every slot of the namespace is taken."""

    code = "no_lease"


class FollowerClosedError(FtdError):
    """The follower was closed, or belongs to another process."""

    code = "follower_closed"


class BindError(FtdError):
    """A model and the weights do not fit; every difference is listed at once.

    Attributes:
        problems: one line per difference; the text shows the first `SHOWN` of them.
    """

    code = "bind"
    problems: tuple[str, ...] = ()
    SHOWN: ClassVar[int] = 20

    def __init__(self, message: str, remedy: str = "", problems: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [self.message, *(f"  · {problem}" for problem in self.problems[: self.SHOWN])]
        if len(self.problems) > self.SHOWN:
            lines.append(f"  · … and {len(self.problems) - self.SHOWN} more")
        return "\n".join([*lines, f"  → {self.remedy}"] if self.remedy else lines)


def os_reason(error: OSError) -> str:
    """`strerror` in lower case, for the middle of a sentence."""
    return (error.strerror or str(error)).lower()
