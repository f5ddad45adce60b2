"""The client of ftd: attach a worker to a namespace's weights, bind them to a model, load them to a device.

Importing this initialises no CUDA, so that a server may import it before it forks its workers.
"""

from ftd import __version__
from ftd.errors import (
    AttachTimeoutError,
    BindError,
    CreatorDiedError,
    CreatorFailedError,
    CreatorHungError,
    FtdError,
    NoCreatorError,
    ProtocolMismatchError,
)
from ftd.errors import CreatorDiedError as ShmCreatorDiedError
from ftd.errors import CreatorFailedError as ShmCreatorFailedError
from ftd_client.bind import BindReport
from ftd_client.follower import Follower, attach
from ftd_client.meta import meta_parameters
from ftd_client.move import MoveReport

__all__ = [
    "AttachTimeoutError",
    "BindError",
    "BindReport",
    "CreatorDiedError",
    "CreatorFailedError",
    "CreatorHungError",
    "Follower",
    "FtdError",
    "MoveReport",
    "NoCreatorError",
    "ProtocolMismatchError",
    "ShmCreatorDiedError",
    "ShmCreatorFailedError",
    "__version__",
    "attach",
    "meta_parameters",
]
