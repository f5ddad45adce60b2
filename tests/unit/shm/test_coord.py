import contextlib
import fcntl
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd._version import PROTOCOL
from ftd.clock import NS, monotonic_ns
from ftd.errors import (
    AccessError,
    FtdError,
    InternalError,
    MemoryShortError,
    ProtocolMismatchError,
    SegmentError,
    SourceError,
)
from ftd.owner import Owner
from ftd.packing import pack, unpack_map
from ftd.shm import coord
from ftd.shm.coord import (
    COORD_BYTES,
    CoordReader,
    CoordRecord,
    CoordWriter,
    Progress,
    decode_record,
    encode_record,
    observe,
)
from ftd.shm.lock import LockFile, _flock, exclusive_holder
from ftd.shm.names import Names
from ftd.shm.record import HEAD_BYTES, DoubleRecord, decode_copy
from ftd.shm.segment import Access, Segment, inode_of, path_of
from ftd.shm.state import NEXT, State
from tests.conftest import NOBODY, kill

pytestmark = pytest.mark.leaves_segments

InChild = Callable[..., Any]
Standing = Callable[[Callable[[], Any]], int]

PAYLOAD_BYTES = (COORD_BYTES - 64) // 2 - HEAD_BYTES

GOLDEN_RECORD = CoordRecord(
    owner=Owner(bytes(range(16)), 4026531836, 4711, 123456, 1000),
    state=State.READY,
    generation=3,
    heartbeat_ns=5_000_000_000,
    heartbeat_interval_ns=NS,
    hung_after_ns=30 * NS,
    started_ns=4_000_000_000,
    socket="/run/ftd/a.sock",
    manifest_bytes=1234,
    manifest_digest=bytes(range(16, 32)),
    progress=Progress(10, 20, 4_000_000_001, 4_500_000_000),
    failure=None,
    version="0.1.0",
)
#: The first 16 bytes of `coord`.
GOLDEN_HEADER = bytes.fromhex("667464636f6f7264 0100 0100 00100000")
#: `encode_record(GOLDEN_RECORD)`.
GOLDEN_PAYLOAD = bytes.fromhex(
    "8da56f776e657285a7626f6f745f6964c410000102030405060708090a0b0c0d0e0fad7069645f6e616d657370616365ceefffff"
    "fca3706964cd1267ab73746172745f7469636b73ce0001e240a3756964cd03e8a57374617465a57265616479aa67656e65726174"
    "696f6e03ac6865617274626561745f6e73cf000000012a05f200b56865617274626561745f696e74657276616c5f6e73ce3b9aca"
    "00ad68756e675f61667465725f6e73cf00000006fc23ac00aa737461727465645f6e73ceee6b2800a6736f636b6574c40f2f7275"
    "6e2f6674642f612e736f636bae6d616e69666573745f6279746573cd04d2af6d616e69666573745f646967657374c41010111213"
    "1415161718191a1b1c1d1e1fa870726f677265737384aa62797465735f646f6e650aab62797465735f746f74616c14aa73746172"
    "7465645f6e73ceee6b2801a8656e6465645f6e73cf000000010c388d00a76661696c757265c0a776657273696f6ea5302e312e30"
)


@pytest.fixture
def writer(names: Names, first: CoordRecord) -> Iterator[CoordWriter]:
    writer = CoordWriter(names, Access(), first)
    yield writer
    writer.close()


def _write_block(names: Names, record: CoordRecord) -> None:
    """A block that nobody holds."""
    CoordWriter(names, Access(), record).close()


# --- bytes -------------------------------------------------------------------------------------------------------


def test_golden_bytes(names: Names) -> None:
    assert encode_record(GOLDEN_RECORD) == GOLDEN_PAYLOAD
    assert decode_record(GOLDEN_PAYLOAD) == GOLDEN_RECORD
    _write_block(names, GOLDEN_RECORD)
    data = path_of(names.coord).read_bytes()
    assert len(data) == COORD_BYTES == 4096
    assert data[:64] == GOLDEN_HEADER.ljust(64, b"\0")
    assert data[64 : 64 + 2016] == bytes(2016)  # the first write has sequence 1 and goes to the second copy
    assert decode_copy(data[64 + 2016 :]) == (1, GOLDEN_PAYLOAD)


NUMBERS = st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=40)
RECORDS = st.builds(
    CoordRecord,
    owner=st.builds(Owner, st.binary(min_size=16, max_size=16), NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    state=st.sampled_from(State),
    generation=NUMBERS,
    heartbeat_ns=NUMBERS,
    heartbeat_interval_ns=NUMBERS,
    hung_after_ns=NUMBERS,
    started_ns=NUMBERS,
    socket=TEXTS,
    manifest_bytes=NUMBERS,
    manifest_digest=st.binary(min_size=16, max_size=16),
    progress=st.builds(Progress, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    failure=st.none()
    | st.fixed_dictionaries({"code": TEXTS, "message": TEXTS, "remedy": TEXTS, "exit_status": NUMBERS}),
    version=TEXTS,
)


@given(RECORDS)
def test_round_trip(record: CoordRecord) -> None:
    assert decode_record(encode_record(record)) == record


@given(
    st.text(alphabet=st.characters(exclude_categories=()), max_size=3000) | st.integers(0, 3000).map("é".__mul__),
    st.text(alphabet=st.characters(exclude_categories=()), max_size=3000)
    | st.integers(0, 3000).map("\U0001f525".__mul__),
)
def test_texts_that_are_too_long_are_cut_and_fit(message: str, remedy: str) -> None:
    failure = {"code": "follower_closed", "message": message, "remedy": remedy, "exit_status": 1}
    # as large as every other field can be: a socket path holds 107 bytes
    top = 2**64 - 1
    largest = CoordRecord(
        owner=Owner(bytes(16), top, top, top, top),
        state=State.DRAINING,
        generation=top,
        heartbeat_ns=top,
        heartbeat_interval_ns=top,
        hung_after_ns=top,
        started_ns=top,
        socket="s" * 107,
        manifest_bytes=top,
        manifest_digest=bytes(16),
        progress=Progress(top, top, top, top),
        failure=failure,
        version="100.100.100.dev1000+local",
    )
    payload = encode_record(largest)
    assert len(payload) <= PAYLOAD_BYTES
    cut = decode_record(payload).failure
    assert cut is not None
    for text, limit, read in ((message, 1000, cut["message"]), (remedy, 300, cut["remedy"])):
        whole = text.encode("utf-8", "replace")
        if len(whole) <= limit:
            assert read.encode() == whole
        else:
            assert read.endswith("…")
            assert len(read.encode()) <= limit
            assert whole.startswith(read[:-1].encode())


def test_a_record_that_cannot_fit_is_a_bug(first: CoordRecord) -> None:
    with pytest.raises(InternalError, match=r"coordination record of \d+ bytes: expected at most 1992"):
        encode_record(replace(first, socket="s" * 2000))


def test_fields_of_a_newer_minor_version_are_left_out(first: CoordRecord) -> None:
    values = unpack_map(encode_record(first))
    values["tomorrow"] = [1]
    values["owner"]["cgroup"] = "x"
    values["progress"]["bytes_pinned"] = 7
    assert decode_record(pack(values)) == first


@pytest.mark.parametrize("missing", ["owner", "state", "generation", "heartbeat_ns", "progress", "socket"])
def test_a_record_without_its_fields_is_none(first: CoordRecord, missing: str) -> None:
    values = unpack_map(encode_record(first))
    del values[missing]
    with pytest.raises(SegmentError, match="coordination record cannot be read"):
        decode_record(pack(values))


@pytest.mark.parametrize("state", ["", "READY", "gone", None, 3])
def test_an_unknown_state_is_no_record(first: CoordRecord, state: object) -> None:
    values = unpack_map(encode_record(first)) | {"state": state}
    with pytest.raises(SegmentError, match="coordination record cannot be read"):
        decode_record(pack(values))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("owner.pid", "1"), ("owner.pid", -1), ("owner.pid", True), ("owner.boot_id", "text"), ("owner", None),
        ("owner", [1]), ("generation", -1), ("generation", None), ("heartbeat_ns", 1.5), ("hung_after_ns", "30"),
        ("manifest_digest", "text"), ("progress.bytes_done", -1), ("progress", 7), ("socket", 7), ("version", b"1"),
        ("failure", {}), ("failure", "text"), ("failure", {"code": "x", "message": None, "remedy": ""}),
        ("state", []),
    ],
)  # fmt: skip
def test_a_forged_record_is_none(first: CoordRecord, path: str, value: object) -> None:
    """Anybody may make a block: whoever lists all namespaces must not stumble over one."""
    values = unpack_map(encode_record(first))
    place, _, key = path.rpartition(".")
    (values[place] if place else values)[key] = value
    with pytest.raises(SegmentError, match="coordination record cannot be read"):
        decode_record(pack(values))


@given(st.binary(max_size=100))
def test_garbage_is_no_record(data: bytes) -> None:
    with pytest.raises(SegmentError, match="coordination record cannot be read"):
        decode_record(data)


# --- writer and observer -----------------------------------------------------------------------------------------


def test_what_a_creator_says_is_what_others_see(names: Names, writer: CoordWriter, first: CoordRecord) -> None:
    seen = observe(names)
    assert (seen.state, seen.locked, seen.problem) == (State.LOADING, True, None)
    assert seen.record == first
    assert seen.inode == inode_of(names.coord)
    writer.beat(Progress(1, 2, 3, 4))
    record = observe(names).record
    assert record is not None
    assert record.heartbeat_ns > first.heartbeat_ns
    assert replace(record, heartbeat_ns=first.heartbeat_ns) == replace(first, progress=Progress(1, 2, 3, 4))
    writer.beat()
    record = observe(names).record
    assert record is not None and record.progress == Progress(1, 2, 3, 4)
    writer.publish(7, 4321, b"d" * 16)
    seen = observe(names)
    assert seen.state is State.READY
    assert seen.record is not None
    assert (seen.record.generation, seen.record.manifest_bytes, seen.record.manifest_digest) == (7, 4321, b"d" * 16)
    writer.drain()
    assert observe(names).state is State.DRAINING
    writer.stopped()
    assert observe(names).state is State.STOPPED
    assert observe(names).record == writer.record


def test_another_process_sees_it_too(names: Names, writer: CoordWriter, in_child: InChild) -> None:
    seen = in_child(lambda: observe(names))
    assert (seen.state, seen.locked, seen.record) == (State.LOADING, True, writer.record)


def test_a_namespace_that_is_not_there(names: Names) -> None:
    seen = observe(names)
    assert (seen.state, seen.locked, seen.record, seen.inode, seen.heartbeat_age_s) == (None, False, None, None, None)
    assert CoordReader.open(names) is None


def test_what_is_not_locked_is_stopped(names: Names, writer: CoordWriter) -> None:
    writer.publish(1, 10, bytes(16))
    writer.close()
    seen = observe(names)
    assert (seen.state, seen.locked) == (State.STOPPED, False)
    assert seen.record is not None and seen.record.state is State.READY  # what it said last


def test_a_killed_creator_is_stopped(names: Names, first: CoordRecord, standing: Standing) -> None:
    kept = []

    def create() -> None:
        kept.append(CoordWriter(names, Access(), first))
        kept[0].publish(1, 10, bytes(16))

    pid = standing(create)
    assert observe(names).state is State.READY
    kill(pid)
    assert observe(names).state is State.STOPPED


def test_a_creator_whose_heartbeat_is_late_is_hung_and_alive(names: Names, first: CoordRecord) -> None:
    late = replace(first, heartbeat_ns=monotonic_ns() - 61 * NS)
    writer = CoordWriter(names, Access(), late)
    seen = observe(names)
    assert (seen.state, seen.locked) == (State.HUNG, True)
    assert seen.heartbeat_age_s is not None and seen.heartbeat_age_s > 60
    writer.beat()
    assert observe(names).state is State.LOADING
    writer.close()
    assert observe(names).state is State.STOPPED


def test_a_heartbeat_from_the_future_is_no_age(names: Names, first: CoordRecord) -> None:
    _write_block(names, replace(first, heartbeat_ns=monotonic_ns() + 1000 * NS))
    assert observe(names).heartbeat_age_s == 0.0


MOVES: dict[State, Callable[[CoordWriter], None]] = {
    State.READY: lambda writer: writer.publish(1, 10, bytes(16)),
    State.DRAINING: CoordWriter.drain,
    State.FAILED: lambda writer: writer.fail(SourceError("x")),
    State.STOPPED: CoordWriter.stopped,
}
WAYS: dict[State, list[State]] = {
    State.LOADING: [],
    State.READY: [State.READY],
    State.DRAINING: [State.READY, State.DRAINING],
    State.FAILED: [State.FAILED],
    State.STOPPED: [State.DRAINING, State.STOPPED],
}


@pytest.mark.parametrize(("now", "then"), list(itertools.product(WAYS, MOVES)))
def test_a_creator_says_only_what_the_table_allows(names: Names, writer: CoordWriter, now: State, then: State) -> None:
    for step in WAYS[now]:
        MOVES[step](writer)
    if then in NEXT[now]:
        MOVES[then](writer)
        assert observe(names).state is then
    else:
        with pytest.raises(InternalError, match=f"a namespace that is {now} cannot become {then}"):
            MOVES[then](writer)
        assert observe(names).state is now


def test_a_move_is_judged_and_made_in_one_step(names: Names, writer: CoordWriter) -> None:
    """Else a load that ends while a stop arrives could publish after the drain."""
    real, entered = writer._mutex, list[bool]()

    class Interrupted:
        """At the first release, another thread gets the mutex and drains."""

        def __enter__(self) -> None:
            real.acquire()

        def __exit__(self, *_: object) -> None:
            real.release()
            if not entered:
                entered.append(True)
                other = threading.Thread(target=writer.drain)
                other.start()
                other.join()

    writer._mutex = Interrupted()  # type: ignore[assignment]
    writer.publish(1, 10, bytes(16))
    assert writer.record.state is State.DRAINING
    assert observe(names).state is State.DRAINING


def test_threads_report_while_the_loop_beats(names: Names, writer: CoordWriter) -> None:
    def report(done: int) -> None:
        for step in range(50):
            writer.beat(Progress(done * 100 + step, 1000))

    threads = [threading.Thread(target=report, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = observe(names).record
    assert record == writer.record
    assert record is not None and record.progress.bytes_done % 100 == 49


def test_the_reason_of_a_failure_outlives_the_name(names: Names, writer: CoordWriter) -> None:
    """Followers that wait hold the block open, and read the last words once more when its lock is gone."""
    reader = CoordReader.open(names)
    assert reader is not None
    assert reader.is_named()
    writer.fail(MemoryShortError("needs 10 bytes, 5 free", "enlarge it"))
    writer.unlink()
    writer.close()
    seen = reader.look()
    assert (seen.state, seen.locked, reader.is_named()) == (State.FAILED, False, False)
    assert seen.record is not None and seen.record.failure is not None
    assert seen.record.failure["exit_status"] == 6
    error = FtdError.from_dict(seen.record.failure)
    assert (type(error), error.message, error.remedy) == (MemoryShortError, "needs 10 bytes, 5 free", "enlarge it")
    assert observe(names).state is None
    reader.close()


def test_a_socket_whose_path_is_no_unicode_is_found_again(first: CoordRecord) -> None:
    record = replace(first, socket=os.fsdecode(b"/run/\xff\x80/a.sock"))
    assert decode_record(encode_record(record)) == record


def test_a_failure_whose_text_is_no_unicode_can_still_be_told(names: Names, writer: CoordWriter) -> None:
    """File names may hold any bytes; Python shows them as lone surrogates."""
    writer.fail(SourceError("/models/\udcff\udc80 is missing", "look \udcff"))
    record = observe(names).record
    assert record is not None and record.failure is not None
    assert record.failure["message"] == "/models/?? is missing"
    assert record.failure["remedy"] == "look ?"


# --- the block as a file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_the_block_has_its_mode_and_no_hole(names: Names, first: CoordRecord, mode: int) -> None:
    before = os.umask(0o077)
    writer = CoordWriter(names, Access(mode), first)
    os.umask(before)
    assert stat.S_IMODE(path_of(names.coord).stat().st_mode) == mode
    with Segment.open(names.coord) as segment:  # type: ignore[union-attr]
        assert segment.size == COORD_BYTES
        assert not segment.has_hole()
    writer.close()


def test_a_creator_replaces_the_block_of_the_one_before(names: Names, first: CoordRecord) -> None:
    """Whatever stands in the way of a lock on the old one, a stray shared lock for example."""
    _write_block(names, first)
    old = CoordReader.open(names)
    assert old is not None
    stray = os.open(path_of(names.coord), os.O_RDONLY)
    fcntl.fcntl(stray, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, 0, 0))
    writer = CoordWriter(names, Access(), first)
    os.close(stray)
    assert observe(names).locked
    assert not old.is_named()
    assert old.look().state is State.STOPPED
    assert writer.still_named()
    old.close()
    writer.close()


def test_a_block_that_is_not_ours_any_more_is_left_alone(names: Names, writer: CoordWriter, first: CoordRecord) -> None:
    path_of(names.coord).unlink()
    assert not writer.still_named()
    other = CoordWriter(names, Access(), first)
    writer.unlink()
    assert other.still_named()
    other.close()


def test_a_block_that_somebody_grabs_at_once_is_given_up(
    names: Names, first: CoordRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, grabbed = Segment.create, []

    def create(name: str, size: int, access: Access) -> Segment:
        segment = real(name, size, access)
        grabbed.append(LockFile(os.open(path_of(name), os.O_RDWR)))
        assert grabbed[0].try_exclusive()
        return segment

    monkeypatch.setattr(Segment, "create", staticmethod(create))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentError, match="coord was taken by somebody else the moment it was made"):
        CoordWriter(names, Access(), first)
    grabbed[0].close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert inode_of(names.coord) is None


def test_a_full_mount_is_an_error_with_numbers_and_leaves_nothing(
    names: Names, first: CoordRecord, in_child: InChild
) -> None:
    def fill() -> int | None:
        filler = Segment.create(names.weights(1, 0), 0, Access())
        with pytest.raises(MemoryShortError):
            filler.write(bytes(1 << 20))
        with pytest.raises(MemoryShortError, match=r"coord cannot be written: no space left on device \(0 B free"):
            CoordWriter(names, Access(), first)
        return inode_of(names.coord)

    assert in_child(fill, shm="size=64k") is None


def test_who_may_not_read_the_block_is_told_so(names: Names, writer: CoordWriter, in_child: InChild) -> None:
    with pytest.raises(AccessError, match=r"coord may not be opened by .* mode 0640"):
        in_child(lambda: observe(names), uid=NOBODY)


def test_who_may_only_read_sees_the_lock(names: Names, first: CoordRecord, in_child: InChild) -> None:
    writer = CoordWriter(names, Access(0o644), first)
    assert in_child(lambda: observe(names), uid=NOBODY).locked
    writer.close()
    assert not in_child(lambda: observe(names), uid=NOBODY).locked


def _half_made(names: Names, data: bytes, *, locked: bool) -> coord.Observation:
    with Segment.create(names.coord, 0, Access()) as segment:
        segment.write(data)
        with LockFile(os.open(path_of(names.coord), os.O_RDWR)) as lock:
            if locked:
                assert lock.try_exclusive()
            return observe(names)


@pytest.mark.parametrize("data", [b"", b"\0", bytes(63), bytes(64), bytes(4096)], ids=len)
def test_a_block_that_is_not_written_yet(names: Names, data: bytes) -> None:
    """SH-05: it exists before it is filled, and what is not locked then is left over from a death."""
    seen = _half_made(names, data, locked=True)
    assert (seen.state, seen.locked, seen.record, seen.problem) == (State.LOADING, True, None, None)
    path_of(names.coord).unlink()
    seen = _half_made(names, data, locked=False)
    assert (seen.state, seen.locked, seen.record, seen.problem) == (State.STOPPED, False, None, None)


def test_a_creator_that_never_says_a_word_is_hung(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between its lock and its first record: whoever waits as long as it progresses must not wait for ever."""
    with (
        Segment.create(names.coord, 0, Access()),
        LockFile(os.open(path_of(names.coord), os.O_RDWR)) as lock,
        contextlib.closing(CoordReader.open(names)) as reader,  # type: ignore[type-var]
    ):
        assert lock.try_exclusive() and reader is not None
        begun_ns = monotonic_ns()
        for seconds, expected in ((29, State.LOADING), (31, State.HUNG)):
            monkeypatch.setattr(coord, "monotonic_ns", lambda seconds=seconds: begun_ns + seconds * NS)
            seen = reader.look()
            assert (seen.state, seen.locked, seen.record, seen.heartbeat_age_s) == (expected, True, None, None)
        assert observe(names).state is State.LOADING  # as it was seen just now for the first time
        os.pwrite(lock.fileno(), b"x" * 64, 0)
        assert reader.look().state is State.LOADING  # it has said something, which is the problem


def test_whose_the_block_is(names: Names, first: CoordRecord, writer: CoordWriter, in_child: InChild) -> None:
    assert observe(names).owner_uid == os.geteuid()
    writer.unlink()
    in_child(lambda: _write_block(names, first), uid=NOBODY)
    assert observe(names).owner_uid == NOBODY
    assert observe(Names(names.namespace + "-none")).owner_uid is None


def test_a_creator_that_died_before_its_first_word_shows_no_record(names: Names) -> None:
    """The header comes last: what stands behind it is not believed before."""
    seen = _half_made(names, GOLDEN_HEADER.ljust(4096, b"\0"), locked=True)
    assert (seen.state, seen.record, seen.problem) == (State.LOADING, None, None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(0, 2**32), st.integers(64, 5000), st.booleans())
def test_a_block_of_garbage_is_a_problem_and_no_crash(names: Names, seed: int, length: int, locked: bool) -> None:
    seen = _half_made(names, b"x" + random.Random(seed).randbytes(length - 1), locked=locked)
    path_of(names.coord).unlink()
    assert (seen.state, seen.record) == (State.LOADING if locked else State.STOPPED, None)
    assert isinstance(seen.problem, SegmentError)
    assert "expected b'ftdcoord'" in seen.problem.message


def _poke(names: Names, data: bytes, at: int) -> None:
    with Segment.open(names.coord, writable=True) as segment:  # type: ignore[union-attr]
        os.pwrite(segment.fileno(), data, at)


def test_another_major_version_is_told_and_alive(names: Names, writer: CoordWriter) -> None:
    _poke(names, bytes([PROTOCOL[0] + 1]), 8)
    seen = observe(names)
    assert (seen.state, seen.locked, seen.record) == (State.LOADING, True, None)
    assert isinstance(seen.problem, ProtocolMismatchError)


def test_another_length_is_a_problem(names: Names, writer: CoordWriter) -> None:
    _poke(names, b"\xff", 12)
    assert isinstance(observe(names).problem, SegmentError)


def test_a_record_that_is_none_is_a_problem(names: Names, writer: CoordWriter) -> None:
    with Segment.open(names.coord, writable=True) as segment:  # type: ignore[union-attr]
        DoubleRecord(segment.fileno(), 64, 2016).write(b"\xc1")
    seen = observe(names)
    assert (seen.state, seen.record) == (State.LOADING, None)
    assert isinstance(seen.problem, SegmentError)


def test_the_last_words_are_read_although_the_lock_went_in_between(
    names: Names, writer: CoordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = CoordReader.open(names)
    assert reader is not None
    real = exclusive_holder

    def late(fd: int) -> tuple[int, int] | None:
        writer.fail(SourceError("the last words"))
        writer.close()
        return real(fd)

    monkeypatch.setattr(coord, "exclusive_holder", late)
    seen = reader.look()
    assert seen.state is State.FAILED
    assert seen.record is not None and seen.record.failure is not None
    assert seen.record.failure["message"] == "the last words"
    reader.close()


def test_every_field_of_the_record_is_documented_by_its_golden_bytes() -> None:
    assert list(unpack_map(GOLDEN_PAYLOAD)) == [field.name for field in fields(CoordRecord)]
