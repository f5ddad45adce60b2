"""Warnings about names in /dev/shm: what a daemon that is gone left, and what others put beside a namespace."""

from __future__ import annotations

from collections.abc import Sequence

from ftd.owner import user_name
from ftd.shm.coord import CoordRecord
from ftd.shm.names import Names, present
from ftd.shm.segment import held_bytes
from ftd.shm.slots import Holder, generations_in_use
from ftd.units import format_bytes

#: Names of others in a warning: anybody may make any number of files.
_SHOWN = 5


def of_the_dead(names: Names, record: CoordRecord | None, held: Sequence[Holder]) -> list[str]:
    """What a daemon that does not run left, and what becomes of it; nothing where it left nothing.

    Args:
        record: what it said last.
        held: leases that followers still hold.
    """
    there = present(names)
    if not there.ours:
        return []
    who = f" by pid {record.owner.pid}, which is gone" if record else ""
    size = format_bytes(sum(held_bytes(name.name) for name in there.ours))
    used = generations_in_use(list(held))
    kept = there.published if used is None else there.generations & used
    fate = "the next start reclaims them"
    if kept:
        pids = sorted({holder.record.owner.pid for holder in held if holder.record})
        whose = f"pid {', '.join(map(str, pids))}" if pids else "unknown"
        which = ", ".join(map(str, sorted(kept)))
        fate = f"generation {which} is kept until its followers ({whose}) are gone, the next start reclaims the rest"
    return [
        f"left{who}: {', '.join(name.name for name in there.ours)} ({size}); {fate},"
        f" ftd stop --namespace {names.namespace} --force removes them all"
    ]


def of_others(names: Names) -> list[str]:
    """Files that are named like segments of the namespace and are none; nothing where there are none."""
    foreign = present(names).foreign
    if not foreign:
        return []
    shown = [f"{name} of {user_name(uid)}" for name, uid in list(foreign.items())[:_SHOWN]]
    more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
    return [f"not of this namespace, though named like it: {', '.join(shown)}{more}; left alone, remove them by hand"]
