"""Namespaces from what a model is, for whoever starts a creator and its workers and must name both alike."""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence

from ftd.config.offload import OffloadConfig
from ftd.errors import NamespaceError
from ftd.shm.names import check_namespace

Scalar = str | int | float | bool | None
ExtraKeys = Mapping[str, Scalar] | Sequence[Scalar]

#: The most that a namespace may have (`ftd.shm.names`).
_MOST = 64
#: 48 bits: among a thousand names of a host, two are equal with a chance of 2e-9.
_DIGEST = 12
#: With dash and digest 45 characters, so that the suffix of three ranks of three digits still fits whole.
_PREFIX = 32
_MOST_RANK = 10**9 - 1
#: What `apply_rank_suffix` appends.
_SUFFIX = re.compile(
    rf"-tp(?P<tp>\d{{1,9}})-pp(?P<pp>\d{{1,9}})(-ep(?P<ep>\d{{1,9}}))?(?P<digest>-[0-9a-f]{{{_DIGEST}}})?$", re.ASCII
)


class NamespaceArgumentError(NamespaceError, ValueError):
    """No namespace can be derived from what was given."""

    code = "namespace_argument"


def compute_shm_namespace(
    model_path: str | os.PathLike[str],
    config: OffloadConfig,
    extra_keys: ExtraKeys | None = None,
    manager_name: str = "default",
) -> str:
    """The namespace of a model: a readable prefix and a digest, the same in every process of a host.

        namespace = compute_shm_namespace("/models/llama-70b", config)        # llama-70b-1f0c27ab93de
        config = config.model_copy(update={"shm_enabled": True, "shm_namespace": namespace})

    Path, extra keys and manager decide it. No field of the configuration does, because none changes a byte of shared
    memory: the creator publishes the whole checkpoint, and what a worker streams, pins or keeps is its own affair, so
    workers configured differently share one copy. `shm_namespace` does not count either: deriving once more from the
    configuration that carries the result gives the result. A namespace chosen by hand needs no derivation.

    Args:
        model_path: what exists on this host counts by its real path (relative, absolute, through links, with `~` or a
            trailing slash: one namespace). What does not exist counts as text, as `meta-llama/Llama-3-70B` does; a
            directory of that very name in the working directory would be taken for it.
        config: of the workers.
        extra_keys: whatever else tells these weights from others of that path, such as a revision or quantization.
            The order of a mapping does not count, that of a sequence does; 1, 1.0, True and "1" are four values.
        manager_name: of the workers; managers of different names never share.

    Raises:
        NamespaceArgumentError: an argument is empty or of a type that has no stable text.
    """
    if not isinstance(config, OffloadConfig):
        raise NamespaceArgumentError(
            f"config is a {type(config).__name__}, expected an OffloadConfig", "pass the workers' configuration"
        )
    if not (isinstance(manager_name, str) and manager_name):
        raise NamespaceArgumentError(
            f"manager_name is {manager_name!r}, expected the name of a manager", 'leave it out for "default"'
        )
    kind, identity = _identity(model_path)
    return f"{_readable(identity)}-{_digest(kind, identity, _canonical(extra_keys), manager_name)}"


def apply_rank_suffix(base_namespace: str, tp_rank: int, pp_rank: int, ep_rank: int | None = None) -> str:
    """The namespace of one rank's shard: `base-tp0-pp1`, with experts spread over ranks `base-tp0-pp1-ep2`.

    Different arguments give different names. Where the whole name would be too long, its start stands for the base
    and a digest of all arguments follows the ranks; no name that is not shortened ends so.

    Args:
        tp_rank, pp_rank, ep_rank: of tensor, pipeline and expert parallelism, from 0.

    Raises:
        NamespaceError: the base is no namespace.
        NamespaceArgumentError: a rank is no whole number from 0.
    """
    check_namespace(base_namespace)
    ranks = {"tp": tp_rank, "pp": pp_rank} | ({} if ep_rank is None else {"ep": ep_rank})
    for name, rank in ranks.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= _MOST_RANK:
            raise NamespaceArgumentError(
                f"{name}_rank is {str(rank)[:32]}, expected a whole number from 0 to {_MOST_RANK}",
                "pass the rank's ordinal within its group",
            )
    suffix = "".join(f"-{name}{int(rank)}" for name, rank in ranks.items())
    if len(base_namespace) + len(suffix) <= _MOST:
        return base_namespace + suffix
    digest = _digest(base_namespace, suffix)
    return f"{base_namespace[: _MOST - len(suffix) - 1 - _DIGEST]}{suffix}-{digest}"


def ranks_in(namespace: str) -> dict[str, int]:
    """The ranks that `apply_rank_suffix` put into a name, by `tp`, `pp` and `ep`; empty where it put none."""
    found = _SUFFIX.search(namespace)
    # only a name that had no room for its base has a digest behind the ranks, and then has no room left
    if found is None or (found["digest"] is not None and len(namespace) != _MOST):
        return {}
    return {name: int(found[name]) for name in ("tp", "pp", "ep") if found[name] is not None}


def _identity(model_path: str | os.PathLike[str]) -> tuple[str, str]:
    """What a path is on this host (`path` or `text`), and the one text that stands for it."""
    try:
        given = os.fsdecode(model_path)
    except TypeError as error:
        raise NamespaceArgumentError(
            f"model_path is a {type(model_path).__name__}, expected a path or a model's identifier",
            "pass what names the checkpoint",
        ) from error
    if not given:
        raise NamespaceArgumentError("model_path is empty", "pass what names the checkpoint")
    path = os.path.expanduser(given)  # noqa: PTH111 - pathlib raises where there is no home
    if os.path.exists(path):  # noqa: PTH110 - pathlib raises on names that no file can have
        return "path", os.path.realpath(path)
    return "text", given.rstrip("/") or given


def _readable(identity: str) -> str:
    """The last component in the characters of a namespace, or `model` where nothing of it is left."""
    plain = unicodedata.normalize("NFKD", identity.rpartition("/")[2]).encode("ascii", "ignore").decode()
    dashed = re.sub(r"[^A-Za-z0-9._]+", "-", plain).lstrip("-._")
    return dashed[:_PREFIX].rstrip("-._") or "model"


def _canonical(extra_keys: ExtraKeys | None) -> list[object]:
    if extra_keys is None:
        return []
    if isinstance(extra_keys, Mapping):
        for name in extra_keys:
            if not isinstance(name, str):
                raise NamespaceArgumentError(
                    f"extra_keys has the key {name!r}, expected strings", "name each value by a string"
                )
        named = [[name, _scalar(extra_keys[name], name)] for name in sorted(extra_keys)]
        return ["mapping", named] if named else []
    # a string is a sequence of its characters, which nobody means
    if isinstance(extra_keys, Sequence) and not isinstance(extra_keys, str | bytes | bytearray):
        listed = [_scalar(value, str(at)) for at, value in enumerate(extra_keys)]
        return ["sequence", listed] if listed else []
    raise NamespaceArgumentError(
        f"extra_keys is a {type(extra_keys).__name__}, expected a mapping or a sequence", "put a single value in a list"
    )


def _scalar(value: object, where: str) -> Scalar:
    if value is None or isinstance(value, str | int | float):
        return value
    raise NamespaceArgumentError(
        f"extra_keys[{where}] is a {type(value).__name__}, expected a string, a number or None",
        "pass text that says the same in every process",
    )


def _digest(*parts: object) -> str:
    # JSON keeps strings, numbers and nesting apart; its ASCII form takes lone surrogates, which file names may have
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode("ascii")).hexdigest()[:_DIGEST]
