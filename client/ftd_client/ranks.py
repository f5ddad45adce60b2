"""Which of several parallel workers a follower is, and which weights it will take."""

from __future__ import annotations

from dataclasses import dataclass

from ftd.errors import FtdError, UsageError


class OtherWeightsError(FtdError):
    """A namespace holds other weights than the follower expects: those of another rank, or of another fingerprint."""

    code = "other_weights"


@dataclass(frozen=True, slots=True)
class Rank:
    """A place among the workers that share a model by tensor parallelism, from 0.

    Raises:
        UsageError: it is none.
    """

    rank: int
    world: int

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.rank, self.world))
        if not whole or not 0 <= self.rank < self.world:
            raise UsageError(
                f"attach: found rank={self.rank!r}, world={self.world!r}, expected whole numbers, 0 <= rank < world",
                "attach(..., rank=0, world=2)",
            )


def rank_of(rank: int | None, world: int | None) -> Rank | None:
    """None without either.

    Raises:
        UsageError: one of them alone, or no place among workers.
    """
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        raise UsageError(f"attach: found rank={rank}, world={world}, expected both", "attach(..., rank=0, world=2)")
    return Rank(rank, world)


def expect_rank(namespace: str, rank: Rank | None) -> None:
    """Refuses a namespace that says by its name that it holds the weights of another rank.

    Raises:
        OtherWeightsError: it does.
    """
    if rank is None:
        return
    from ftd_client.shm import ranks_in  # loads pydantic, which other followers do without

    held = ranks_in(namespace).get("tp", rank.rank)
    if held != rank.rank:
        raise OtherWeightsError(
            f"namespace {namespace!r} holds the weights of tensor parallel rank {held}, rank {rank.rank} expected",
            "attach to ftd_client.shm.apply_rank_suffix(base, tp_rank, pp_rank) of this worker's own ranks",
        )


def expect_fingerprint(namespace: str, found: str, expected: str | None) -> None:
    """Refuses weights of another fingerprint.

    Raises:
        OtherWeightsError: they are.
    """
    if expected is not None and found != expected:
        raise OtherWeightsError(
            f"namespace {namespace!r} holds weights of fingerprint {found}, {expected} expected",
            "start the daemon with the model that this worker is for, or expect the new fingerprint",
        )
