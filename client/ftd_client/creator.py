"""The creator of a namespace, as a follower asks it something: found, believed by its owner, asked within a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftd import rundir
from ftd.clock import Deadline
from ftd.errors import ControlError, NotRunningError
from ftd.owner import Owner
from ftd.shm.coord import observe
from ftd.shm.names import Names
from ftd.shm.state import State
from ftd.wire.client import Asked, call
from ftd_client.trust import check_owner


@dataclass(frozen=True, slots=True)
class Creator:
    """A living creator.

    Attributes:
        socket: where it answers.
        owner: which process it is.
    """

    socket: Path
    owner: Owner

    @staticmethod
    def find(namespace: str) -> Creator:
        """
        Raises:
            NotRunningError: there is none.
            ControlError: it is not loading or ready.
            AccessError: it is of a user whom this process has no reason to believe.
        """
        seen = observe(Names(namespace))
        if seen.record is None or not seen.locked:
            raise NotRunningError(f"no daemon serves {namespace!r}", f"ftd start --namespace {namespace}")
        if seen.owner_uid is not None:
            check_owner(namespace, seen.owner_uid, os.environ)
        if seen.state not in (State.LOADING, State.READY):
            raise ControlError(f"the daemon of {namespace!r} is {seen.state}: expected it ready", "see its log")
        return Creator(rundir.find_socket(Path(seen.record.socket), os.environ), seen.record.owner)

    def ask(self, op: str, args: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The result of an operation; raises as `ftd.wire.client.call`."""
        return call(self.socket, op, args, deadline)

    def asked(self, op: str, args: Mapping[str, Any], deadline: Deadline) -> Asked:
        """The same, to be waited for later; raises as `ftd.wire.client.Asked`."""
        return Asked(self.socket, op, args, deadline)
