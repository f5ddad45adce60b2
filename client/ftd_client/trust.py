"""Whose weights a worker believes.

Names in /dev/shm are first come, first served: any local user may publish under a namespace that is free. So the
owner of the coordination block must be this process's own user, root, or the owner of a runtime directory that this
process looks into, which is how a daemon of a system user (`/run/ftd`) is known to everybody. The rest follows from
the block: the manifest by its digest, the segments by their inodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ftd import rundir
from ftd.errors import AccessError
from ftd.owner import user_name


def check_owner(namespace: str, uid: int, environ: Mapping[str, str]) -> None:
    """Raises AccessError where the namespace belongs to a user that this process has no reason to believe.

    Args:
        uid: owner of the namespace's coordination block, as the kernel says.
    """
    if uid in (os.geteuid(), 0):
        return
    folders = rundir.client_dirs(environ)
    if uid not in {folder.stat().st_uid for folder in folders}:
        raise AccessError(
            f"namespace {namespace!r} belongs to {user_name(uid)}: expected {user_name(os.geteuid())}, root, or the"
            f" owner of a runtime directory ({', '.join(map(str, folders)) or 'none found'})",
            "set FTD_RUNTIME_DIR to the daemon's runtime directory (in a container, mount it) if that user is meant",
        )
