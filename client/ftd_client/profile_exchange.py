"""Profiles kept by the daemon of a namespace: what another worker measured, to start from, and what this one did.

A profile is a hint. So nothing here raises or waits long, whatever the daemon does, and what comes from it is checked
as a file from anybody would be: it may be of another user, and any follower may have stored it.
"""

from __future__ import annotations

import logging
from typing import Any

from ftd.clock import Deadline
from ftd.errors import ControlError, FtdError, NoAnswerError, NotRunningError, os_reason
from ftd.plan.profile import MAX_PROFILE_BYTES, Identity, Profile, decode, encode, refuse
from ftd.wire import profiles as wire
from ftd_client.creator import Creator

log = logging.getLogger("ftd_client")

#: A daemon that is well answers within milliseconds; a plan without its hint is better than a worker that waits.
TIMEOUT_S = 2.0


def fetch(namespace: str, expected: Identity, timeout_s: float = TIMEOUT_S) -> Profile | None:
    """The profile that the namespace's daemon keeps of exactly this; None where it has none or gives none.

    Args:
        timeout_s: seconds for all of it, at most `TIMEOUT_S`.
    """
    try:
        result = _ask(namespace, wire.GET, wire.get_args(expected.to_map()), timeout_s)
        data = wire.profile_got(result, MAX_PROFILE_BYTES)
        if data is None:
            return None
        profile = decode(data)
        refuse(profile, expected, f"the profile that the daemon of {namespace!r} gave")
    except (FtdError, OSError) as error:
        _say("fetched from", namespace, error)
        return None
    return profile


def offer(namespace: str, profile: Profile, timeout_s: float = TIMEOUT_S) -> bool:
    """Gives the namespace's daemon a profile to keep; whether it does.

    Args:
        timeout_s: seconds for all of it, at most `TIMEOUT_S`. A daemon that was too slow may have kept it.
    """
    try:
        _ask(namespace, wire.PUT, wire.put_args(encode(profile)), timeout_s)
    except (FtdError, OSError) as error:
        _say("stored with", namespace, error)
        return False
    return True


def _ask(namespace: str, op: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    return Creator.find(namespace).ask(op, args, Deadline.after(min(timeout_s, TIMEOUT_S)))


def _say(what: str, namespace: str, error: FtdError | OSError) -> None:
    reason = error.message if isinstance(error, FtdError) else os_reason(error)
    # gone, busy or older than this operation is ordinary; that it refuses, or answers nonsense, is not
    ordinary = type(error) in (NotRunningError, ControlError, NoAnswerError)
    log.log(logging.DEBUG if ordinary else logging.WARNING, "no profile was %s %r: %s", what, namespace, reason)
