import contextlib
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd._version import PROTOCOL
from ftd.clock import NS, Deadline, monotonic_ns
from ftd.errors import AccessError, MemoryShortError, NoLeaseError, ProtocolMismatchError, SegmentError
from ftd.owner import Owner
from ftd.packing import pack
from ftd.shm import slots
from ftd.shm.lock import LockFile
from ftd.shm.names import Names
from ftd.shm.record import DoubleRecord, encode_copy
from ftd.shm.segment import Access, Segment, inode_of, path_of
from ftd.shm.slots import (
    SLOT_COUNT,
    SLOTS_BYTES,
    Holder,
    Lease,
    SlotRecord,
    Turns,
    decode_slot,
    encode_slot,
    generations_in_use,
    holders,
    prepare,
)
from tests.conftest import NOBODY, kill

pytestmark = pytest.mark.leaves_segments

InChild = Callable[..., Any]
Standing = Callable[[Callable[[], Any]], int]

OWNER = Owner(bytes(range(16)), 4026531836, 4711, 123456, 1000)
RECORD = SlotRecord(OWNER, "busy", "cuda:0", 3, 10**12, 10**12 + 5, 100, 60, 40, 40, "staged")

#: The first 16 bytes of `slots`.
GOLDEN_HEADER = bytes.fromhex("667464736c6f7473 0100 0100 00101000")
#: `encode_slot(RECORD)` as slot 5 holds it after the first write, without the zeros behind it.
GOLDEN_SLOT_AT = 4096 + 5 * 512 + 256
GOLDEN_SLOT = bytes.fromhex(
    "0100000000000000 4d000000 00000000 85cebea55fd31970"  # sequence, length, zero, digest
    "9fc410000102030405060708090a0b0c0d0e0fceeffffffccd1267ce0001e240cd03e8a462757379a6637564613a3003"
    "cf000000e8d4a51000cf000000e8d4a51005643c2828a6737461676564"
)

NUMBERS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    SlotRecord,
    st.builds(Owner, st.binary(min_size=16, max_size=16), NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(["attached", "busy"]),
    st.sampled_from(["cpu", "cuda:0", "cuda:15"]),
    *[NUMBERS] * 7,
    st.sampled_from(["cuda", "staged", "none"]),
)


@pytest.fixture
def prepared(names: Names, monkeypatch: pytest.MonkeyPatch) -> Names:
    """Followers take the first slot that is free."""
    monkeypatch.setattr(slots, "_any_order", lambda: iter(range(SLOT_COUNT)))
    prepare(names, Access(0o640))
    return names


def _mode(name: str) -> int:
    return stat.S_IMODE(path_of(name).stat().st_mode)


@contextlib.contextmanager
def _fds_are_closed() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def test_golden_bytes(prepared: Names) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.callback(Lease.acquire(prepared).release)
        lease = Lease.acquire(prepared)
        stack.callback(lease.release)
        lease.write(RECORD)
        data = path_of(prepared.slots).read_bytes()
    assert len(data) == SLOTS_BYTES == 4096 + 2048 * 512
    assert data[:16] == GOLDEN_HEADER
    assert data[GOLDEN_SLOT_AT : GOLDEN_SLOT_AT + 256].rstrip(b"\0") == GOLDEN_SLOT
    assert not any(data[16:GOLDEN_SLOT_AT])
    assert not any(data[GOLDEN_SLOT_AT + 256 :])


@given(RECORDS)
def test_a_record_survives_and_fits_its_slot(record: SlotRecord) -> None:
    payload = encode_slot(record)
    assert decode_slot(payload) == record
    encode_copy(2**64 - 1, payload, 256)


@given(st.binary(max_size=80))
def test_garbage_is_no_record(data: bytes) -> None:
    assert decode_slot(data) is None


VALUES = [*(getattr(OWNER, f.name) for f in fields(OWNER)), *(getattr(RECORD, f.name) for f in fields(RECORD)[1:])]
HOSTILE: list[object] = [
    None,
    True,
    -1,
    1.5,
    float("inf"),
    float("nan"),
    "text",
    b"bytes",
    [],
    {},
    2**64 - 1,
    10**11,
    [[0] * 9],
]


@pytest.mark.parametrize("field", range(len(VALUES)))
def test_a_field_that_somebody_forged_is_refused_or_harmless(field: int) -> None:
    """Slots are not trusted: no bytes in them may raise, or cost memory, in whoever reads them."""
    for value in HOSTILE:
        record = decode_slot(pack([*VALUES[:field], value, *VALUES[field + 1 :]]))
        if record is not None:
            assert type(value) is type(VALUES[field])
            encode_slot(record)


@pytest.mark.parametrize("text", ["\x1b[2J", "cpu\n", "cpu\0", "é", "\x7f"])
@pytest.mark.parametrize("field", [5, 6, 14])
def test_text_that_would_move_a_terminals_cursor_is_refused(field: int, text: str) -> None:
    assert decode_slot(pack([*VALUES[:field], text, *VALUES[field + 1 :]])) is None


@pytest.mark.parametrize(
    "value", [{}, {"a": 1}, [], [1, 2], VALUES[:6], "0123456789abcdef", b"0123456789abcdef", 7, None]
)
def test_another_shape_is_no_record(value: object) -> None:
    assert decode_slot(pack(value)) is None


def test_fields_of_a_newer_minor_version_are_left_out() -> None:
    assert decode_slot(pack([*VALUES, "tomorrow", 7])) == RECORD


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o600, 0o600), (0o640, 0o660), (0o644, 0o666), (0o440, 0o660), (0o604, 0o606)]
)
def test_slots_can_be_written_wherever_weights_can_be_read(names: Names, mode: int, expected: int) -> None:
    before = os.umask(0o077)
    try:
        prepare(names, Access(mode))
        assert _mode(names.slots) == expected
        prepare(names, Access(0o600))  # kept, and still what the configuration says now
        assert _mode(names.slots) == 0o600
    finally:
        os.umask(before)


def test_new_slots_have_no_hole_and_no_holder(prepared: Names) -> None:
    with Segment.open(prepared.slots) as segment:  # type: ignore[union-attr]
        assert segment.size == SLOTS_BYTES
        assert not segment.has_hole()
    assert holders(prepared) == []
    assert generations_in_use([]) == set()


def test_a_full_mount_leaves_no_half_made_slots(names: Names, in_child: InChild) -> None:
    def fill() -> int | None:
        with pytest.raises(MemoryShortError, match="cannot be written"):
            prepare(names, Access())
        return inode_of(names.slots)

    assert in_child(fill, shm="size=512k") is None


def test_leases_of_earlier_generations_live_on(prepared: Names) -> None:
    lease = Lease.acquire(prepared)
    lease.write(RECORD)
    inode = inode_of(prepared.slots)
    prepare(prepared, Access(0o644))
    assert inode_of(prepared.slots) == inode
    assert holders(prepared) == [Holder(0, RECORD)]
    lease.release()


@pytest.mark.parametrize(
    "damage",
    [
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.ftruncate(fd, SLOTS_BYTES - 1),
        lambda fd: os.ftruncate(fd, SLOTS_BYTES + 1),
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.pwrite(fd, b"\xff", 8),
        lambda fd: os.pwrite(fd, b"\xff", 12),
    ],
    ids=["empty", "short", "long", "magic", "major", "length"],
)
def test_damaged_slots_are_replaced(prepared: Names, damage: Callable[[int], Any]) -> None:
    lease = Lease.acquire(prepared)
    with Segment.open(prepared.slots, writable=True) as segment:  # type: ignore[union-attr]
        damage(segment.fileno())
        inode = segment.inode
        prepare(prepared, Access())
        assert inode_of(prepared.slots) != inode
    assert holders(prepared) == []
    assert lease.held  # what its holder maps is still its own
    fresh = Lease.acquire(prepared)
    assert [holder.index for holder in holders(prepared)] == [0]
    fresh.release()
    lease.release()


def test_slots_of_another_user_are_an_error_with_its_name(names: Names, in_child: InChild) -> None:
    prepare(names, Access(0o666))
    with pytest.raises(AccessError, match=r"slots may not be given a mode by .*: it belongs to"):
        in_child(lambda: prepare(names, Access(0o640)), uid=NOBODY)


def test_a_lease_is_seen_by_all_and_gone_when_released(prepared: Names, in_child: InChild) -> None:
    lease = Lease.acquire(prepared)
    assert (lease.index, lease.held) == (0, True)
    assert holders(prepared) == [Holder(0, None)]
    lease.write(RECORD)
    assert in_child(lambda: holders(prepared)) == [Holder(0, RECORD)]
    assert generations_in_use(holders(prepared)) == {3}
    lease.release()
    assert not lease.held
    assert in_child(lambda: holders(prepared)) == []
    lease.release()
    lease.write(RECORD)  # of nobody any more
    assert holders(prepared) == []


def test_hundreds_of_leases_have_slots_of_their_own(prepared: Names) -> None:
    with contextlib.ExitStack() as stack:
        taken = []
        for number in range(200):
            lease = Lease.acquire(prepared)
            stack.callback(lease.release)
            lease.write(replace(RECORD, generation=number + 1))
            taken.append(lease)
        assert [lease.index for lease in taken] == list(range(200))
        assert [holder.record.generation for holder in holders(prepared) if holder.record] == list(range(1, 201))
        for lease in taken[50:150:2]:
            lease.release()
        left = {holder.index for holder in holders(prepared)}
        assert left == set(range(200)) - set(range(50, 150, 2))
        again = Lease.acquire(prepared)
        stack.callback(again.release)
        assert again.index == 50
    assert holders(prepared) == []


@given(st.binary(min_size=4, max_size=4))
def test_every_slot_is_tried_once_whatever_the_order(drawn: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: drawn[:count])
        assert sorted(slots._any_order()) == list(range(SLOT_COUNT))


def test_a_free_slot_is_found_behind_hundreds_that_are_taken(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """One try costs the kernel a walk along all of them, while nobody else may."""
    prepare(names, Access())
    tries = []
    real = LockFile.try_exclusive

    def count(lock: LockFile, start: int = 0, length: int = 0) -> bool:
        tries.append(start)
        return real(lock, start, length)

    monkeypatch.setattr(os, "urandom", random.Random(0).randbytes)
    with _lock_slots(names, 0, SLOT_COUNT // 2), contextlib.ExitStack() as stack:
        monkeypatch.setattr(LockFile, "try_exclusive", count)
        for _ in range(64):
            stack.callback(Lease.acquire(names).release)
    assert len(tries) < 64 * 8


def _lock_slots(names: Names, start: int, length: int) -> LockFile:
    segment = Segment.open(names.slots, writable=True)
    assert segment is not None
    lock = LockFile(segment.detach())
    assert lock.try_exclusive(start, length)
    return lock


def test_the_last_slot_is_as_good_as_the_first(prepared: Names) -> None:
    with _lock_slots(prepared, 0, SLOT_COUNT - 1):
        lease = Lease.acquire(prepared)
        lease.write(RECORD)
        assert lease.index == SLOT_COUNT - 1
        assert holders(prepared)[-1] == Holder(SLOT_COUNT - 1, RECORD)
        lease.release()


def test_when_all_are_taken_the_number_is_told(prepared: Names) -> None:
    with _lock_slots(prepared, 0, SLOT_COUNT), _fds_are_closed():
        with pytest.raises(NoLeaseError, match="all 2048 leases are taken"):
            Lease.acquire(prepared)
        assert len(holders(prepared)) == SLOT_COUNT
    Lease.acquire(prepared).release()


def test_locks_behind_the_leases_are_no_leases(prepared: Names) -> None:
    with _lock_slots(prepared, SLOT_COUNT, 1):
        assert holders(prepared) == []


def test_a_namespace_without_slots_has_no_lease(names: Names) -> None:
    """Whoever meets that under a living daemon cannot do anything but restart it."""
    assert holders(names) == []
    with pytest.raises(SegmentError, match="slots is missing: expected the leases of the namespace") as raised:
        Lease.acquire(names)
    assert raised.value.remedy == "restart the daemon"


def test_slots_that_cannot_be_read_tell_nothing(prepared: Names, in_child: InChild) -> None:
    """Their name was taken from a living daemon, and is somebody else's file now: no reason to end."""
    lease = Lease.acquire(prepared)
    assert len(holders(prepared)) == 1
    assert in_child(lambda: holders(prepared), uid=NOBODY) == []
    path_of(prepared.slots).unlink()
    path_of(prepared.slots).symlink_to("nowhere")
    assert holders(prepared) == []
    lease.release()


def test_damaged_slots_are_refused_and_leak_nothing(prepared: Names) -> None:
    with Segment.open(prepared.slots, writable=True) as segment:  # type: ignore[union-attr]
        os.pwrite(segment.fileno(), bytes([PROTOCOL[0] + 1]), 8)
        with _fds_are_closed(), pytest.raises(ProtocolMismatchError):
            Lease.acquire(prepared)
        os.pwrite(segment.fileno(), b"x", 0)
        with _fds_are_closed(), pytest.raises(SegmentError, match="no segment of ftd"):
            Lease.acquire(prepared)


def test_slots_that_are_replaced_meanwhile_are_refused_and_leak_nothing(
    prepared: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LockFile.try_exclusive

    def replace_them(lock: LockFile, start: int = 0, length: int = 0) -> bool:
        path_of(prepared.slots).unlink()
        prepare(prepared, Access())
        return real(lock, start, length)

    monkeypatch.setattr(LockFile, "try_exclusive", replace_them)
    with _fds_are_closed(), pytest.raises(SegmentError, match="slots was replaced during attach"):
        Lease.acquire(prepared)
    monkeypatch.undo()
    assert holders(prepared) == []


def test_who_may_not_write_slots_gets_no_lease(prepared: Names, in_child: InChild) -> None:
    with pytest.raises(AccessError, match=r"slots may not be opened by .* mode 0660"):
        in_child(lambda: Lease.acquire(prepared), uid=NOBODY)


def test_a_killed_follower_holds_nothing(prepared: Names, standing: Standing) -> None:
    kept = []

    def attach() -> None:
        kept.append(Lease.acquire(prepared))
        kept[0].write(RECORD)

    pid = standing(attach)
    assert holders(prepared) == [Holder(0, RECORD)]
    kill(pid)
    assert holders(prepared) == []


def test_the_next_holder_is_never_taken_for_the_one_that_was_killed(prepared: Names, standing: Standing) -> None:
    """Else its generation would be that of the dead, and its own could be reclaimed."""
    kept = []

    def attach() -> None:
        kept.append(Lease.acquire(prepared))
        kept[0].write(RECORD)

    kill(standing(attach))
    lease = Lease.acquire(prepared)
    assert holders(prepared) == [Holder(0, None)]
    assert generations_in_use(holders(prepared)) is None
    lease.release()


def test_whatever_stands_in_a_slot_its_next_holder_gets_over_it(prepared: Names) -> None:
    with Segment.open(prepared.slots, writable=True) as segment:  # type: ignore[union-attr]
        last = encode_copy(2**64 - 1, encode_slot(RECORD), 256)
        os.pwrite(segment.fileno(), last + last, 4096)
    lease = Lease.acquire(prepared)
    lease.write(replace(RECORD, generation=9))
    assert generations_in_use(holders(prepared)) == {9}
    lease.release()


def test_a_released_slot_says_nothing_of_its_holder(prepared: Names) -> None:
    lease = Lease.acquire(prepared)
    lease.write(RECORD)
    lease.release()
    with _lock_slots(prepared, 0, 1):  # somebody who never says a word
        assert holders(prepared) == [Holder(0, None)]


def test_a_holder_that_cannot_be_read_may_use_every_generation(prepared: Names) -> None:
    known, unknown = Lease.acquire(prepared), Lease.acquire(prepared)
    known.write(RECORD)
    with Segment.open(prepared.slots, writable=True) as segment:  # type: ignore[union-attr]
        DoubleRecord(segment.fileno(), 4096 + 512, 256).write(b"\xc1 no record")
    assert holders(prepared) == [Holder(0, RECORD), Holder(1, None)]
    assert generations_in_use(holders(prepared)) is None
    assert holders(prepared)[1].age_s() is None
    unknown.release()
    assert generations_in_use(holders(prepared)) == {3}
    known.release()


def test_truncated_slots_make_their_holders_unknown(prepared: Names) -> None:
    lease = Lease.acquire(prepared)
    lease.write(RECORD)
    os.truncate(path_of(prepared.slots), 0)
    assert generations_in_use(holders(prepared)) is None
    lease.release()


def test_a_forked_child_has_no_lease_and_cannot_give_its_parents_away(prepared: Names, in_child: InChild) -> None:
    lease = Lease.acquire(prepared)
    lease.write(RECORD)

    def misuse() -> bool:
        held = lease.held
        lease.write(replace(RECORD, generation=99))
        lease.release()
        return held

    assert in_child(misuse) is False
    assert lease.held
    assert holders(prepared) == [Holder(0, RECORD)]
    lease.release()


@pytest.mark.parametrize("moment", ["opened", "closed"])
def test_a_child_that_another_thread_forks_the_moment_a_lease_comes_or_goes_does_not_keep_it(
    prepared: Names, standing: Standing, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    forking = threading.Thread(target=standing, args=(lambda: None,))

    def fork_beside() -> None:
        if not forking.ident:
            forking.start()
            forking.join(0.2)  # it has forked by then, unless it has to wait for us

    def opened(name: str, *, writable: bool = False) -> Segment | None:
        segment = Segment.open(name, writable=writable)
        fork_beside()
        return segment

    def closed(fd: int) -> None:
        if fd == held:
            fork_beside()
        close(fd)

    close = os.close
    with monkeypatch.context() as patch:
        if moment == "opened":
            patch.setattr(slots, "Segment", SimpleNamespace(open=opened))
        lease = Lease.acquire(prepared)
        held = lease._lock.fileno()
        if moment == "closed":
            patch.setattr(os, "close", closed)
        lease.release()
    forking.join(BOUND_S)
    assert holders(prepared) == []


def test_the_age_of_a_heartbeat() -> None:
    now = monotonic_ns()
    age = Holder(0, replace(RECORD, heartbeat_ns=now - 5 * NS)).age_s()
    assert age is not None and 5.0 <= age < 65.0
    assert Holder(0, replace(RECORD, heartbeat_ns=now + 60 * NS)).age_s() == 0.0


def test_a_slot_holds_two_copies_of_256_bytes() -> None:
    assert slots._SLOT_BYTES == 2 * 256
    assert slots._SLOTS_AT == 4096


# --- turns -------------------------------------------------------------------------------------------------------

BOUND_S = 20


def _turns(names: Names) -> Turns:
    made = Turns.of(names)
    assert made is not None
    return made


def test_one_has_the_turn_and_others_go_on_without_when_it_takes_too_long(names: Names) -> None:
    prepare(names, Access())
    with _turns(names) as one, _turns(names) as other:
        with one.turn(Deadline.after(0)) as mine:
            assert mine
            for _ in range(2):
                with other.turn(Deadline.after(0.01)) as yours:
                    assert not yours
            assert holders(names) == [], "a turn is no lease"
        with other.turn(Deadline.after(0)) as yours:
            assert yours


def test_waiting_for_a_turn_ends_when_it_is_cancelled(names: Names) -> None:
    prepare(names, Access())
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 3

    with (
        _turns(names) as one,
        _turns(names) as other,
        one.turn(Deadline.after(0)),
        other.turn(Deadline.after(None), cancelled) as yours,
    ):
        assert not yours


def test_whoever_had_a_turn_does_not_have_the_next_before_one_that_waits(names: Names) -> None:
    prepare(names, Access())
    order: list[str] = []
    with _turns(names) as one, _turns(names) as other:
        waits = threading.Event()

        def asked() -> bool:
            waits.set()
            return False

        def wait() -> None:
            with other.turn(Deadline.after(BOUND_S), asked) as yours:
                order.append(f"other {yours}")

        thread = threading.Thread(target=wait)
        with one.turn(Deadline.after(0)):
            thread.start()
            assert waits.wait(BOUND_S)
        with one.turn(Deadline.after(BOUND_S)) as mine:
            order.append(f"one {mine}")
        thread.join(BOUND_S)
    assert order == ["other True", "one True"]


def test_a_turn_ends_with_its_process(names: Names, standing: Standing) -> None:
    prepare(names, Access())
    context: list[Any] = []

    def take() -> bool:
        context.append(_turns(names).turn(Deadline.after(0)))
        return bool(context[0].__enter__())

    pid = standing(take)
    with _turns(names) as turns:
        with turns.turn(Deadline.after(0)) as mine:
            assert not mine
        kill(pid)
        with turns.turn(Deadline.after(BOUND_S)) as mine:
            assert mine


def test_a_forked_child_has_no_turns_and_does_not_end_its_parents(names: Names, in_child: InChild) -> None:
    prepare(names, Access())

    def child(turns: Turns) -> bool:
        with turns.turn(Deadline.after(None)) as mine:
            return mine

    with _turns(names) as turns, _turns(names) as other, turns.turn(Deadline.after(0)):
        assert in_child(lambda: child(turns)) is False
        with other.turn(Deadline.after(0)) as yours:
            assert not yours


def test_without_slots_there_are_no_turns(names: Names) -> None:
    assert Turns.of(names) is None
