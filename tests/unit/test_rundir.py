"""Runtime directories: which one a daemon takes, which ones a client searches, and the records of failed starts."""

import contextlib
import json
import logging
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ftd import clock, owner, rundir
from ftd.errors import MemoryShortError, RuntimeDirError
from ftd.rundir import Failure

NOBODY = 65534


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of its own for the fixed candidates: `<places>/run/ftd` and `<places>/tmp/ftd-<uid>`."""
    monkeypatch.setattr(rundir, "SYSTEM_DIR", tmp_path / "run" / "ftd")
    monkeypatch.setattr(rundir, "TMP_DIR", tmp_path / "tmp")
    for name in ("run", "tmp", "session"):
        (tmp_path / name).mkdir(mode=0o755)
    return tmp_path


@pytest.fixture
def ordinary() -> Iterator[Path]:
    """Runs the test without root's powers, which see no modes; gives a directory of that user."""
    home = Path(tempfile.mkdtemp(prefix="ftd-test-", dir="/tmp"))
    home.chmod(0o755)
    root = os.geteuid() == 0
    try:
        if root:
            os.chown(home, NOBODY, NOBODY)
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
        yield home
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)
        shutil.rmtree(home)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def private_dir(places: Path) -> Path:
    return places / "tmp" / f"ftd-{os.geteuid()}"


# --- the daemon's directory ------------------------------------------------------------------------------------------


def test_the_system_directory_comes_first(places: Path, umask: None) -> None:
    environ = {"XDG_RUNTIME_DIR": str(places / "session")}
    assert rundir.daemon_dir(environ) == places / "run" / "ftd"
    assert mode_of(places / "run" / "ftd") == 0o755


def test_the_sessions_directory_comes_second(places: Path, umask: None) -> None:
    (places / "run").rmdir()
    assert rundir.daemon_dir({"XDG_RUNTIME_DIR": str(places / "session")}) == places / "session" / "ftd"
    assert mode_of(places / "session" / "ftd") == 0o755


@pytest.mark.parametrize("session", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "session"}])
def test_the_private_directory_comes_last(
    places: Path, session: dict[str, str], umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places)  # a relative XDG_RUNTIME_DIR would exist from here
    (places / "run").rmdir()
    assert rundir.daemon_dir(session) == private_dir(places)
    assert mode_of(private_dir(places)) == 0o700
    assert rundir.daemon_dir(session) == private_dir(places)  # it exists now


def test_what_is_given_is_taken_before_all_others(places: Path, umask: None) -> None:
    given = places / "given"
    assert rundir.daemon_dir({"FTD_RUNTIME_DIR": str(given)}) == given
    assert mode_of(given) == 0o755
    assert not (places / "run" / "ftd").exists()


def test_an_empty_setting_is_none(places: Path) -> None:
    assert rundir.daemon_dir({"FTD_RUNTIME_DIR": ""}) == places / "run" / "ftd"


def _missing_parent(path: Path) -> None:
    path.rmdir()
    path.parent.rmdir()


def _regular(path: Path) -> None:
    path.rmdir()
    path.touch()


def _dangling(path: Path) -> None:
    path.rmdir()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_missing_parent, "cannot be made or read: no such file or directory"),
        (_regular, "is no directory"),
        (_dangling, "cannot be made or read: no such file or directory"),
        (lambda path: path.chmod(0o775), r"is writable by others than its owner \(mode 0775\)"),
        (lambda path: path.chmod(0o757), r"is writable by others than its owner \(mode 0757\)"),
        (lambda path: path.chmod(0o1777), r"is writable by others than its owner \(mode 1777\)"),
    ],
)
def test_a_given_directory_that_is_unusable_is_an_error_and_never_another(
    places: Path, spoil: object, found: str
) -> None:
    given = places / "above" / "given"
    given.mkdir(parents=True)
    spoil(given)
    with pytest.raises(RuntimeDirError, match=f"{given} {found}") as caught:
        rundir.daemon_dir({"FTD_RUNTIME_DIR": str(given)})
    assert caught.value.exit_status == 2
    assert "FTD_RUNTIME_DIR" in caught.value.remedy
    assert not (places / "run" / "ftd").exists()


def test_a_relative_setting_is_an_error(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places)
    with pytest.raises(RuntimeDirError, match="runtime directory session is relative: expected an absolute path"):
        rundir.daemon_dir({"FTD_RUNTIME_DIR": "session"})


def test_a_given_directory_that_this_user_may_not_write_is_an_error(ordinary: Path) -> None:
    (ordinary / "given").mkdir(mode=0o555)
    with pytest.raises(RuntimeDirError, match=f"given is not writable for uid {os.geteuid()}"):
        rundir.daemon_dir({"FTD_RUNTIME_DIR": str(ordinary / "given")})


def test_a_given_directory_behind_a_link_is_taken(places: Path) -> None:
    (places / "link").symlink_to(places / "session")
    assert rundir.daemon_dir({"FTD_RUNTIME_DIR": str(places / "link")}) == places / "link"


def test_candidates_that_this_user_may_not_write_are_passed_over(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "SYSTEM_DIR", ordinary / "run" / "ftd")
    monkeypatch.setattr(rundir, "TMP_DIR", ordinary)
    (ordinary / "run" / "ftd").mkdir(parents=True, mode=0o555)
    (ordinary / "session").mkdir(mode=0o000)  # another user's, kept by su
    session = {"XDG_RUNTIME_DIR": str(ordinary / "session")}
    assert rundir.daemon_dir(session) == ordinary / f"ftd-{os.geteuid()}"
    assert rundir.client_dirs(session) == [ordinary / "run" / "ftd", ordinary / f"ftd-{os.geteuid()}"]


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse.sshfs"])
def test_a_directory_that_hosts_may_share_is_refused(
    places: Path, filesystem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "filesystem_of", lambda path: filesystem)
    with pytest.raises(RuntimeDirError, match=f"session is on {filesystem}, which hosts may share"):
        rundir.daemon_dir({"FTD_RUNTIME_DIR": str(places / "session")})


@pytest.mark.parametrize(("path", "filesystem"), [("/proc", "proc"), ("/dev/shm", "tmpfs"), ("/sys", "sysfs")])
def test_the_filesystem_is_what_the_kernel_says(path: str, filesystem: str) -> None:
    assert rundir.filesystem_of(Path(path)) == filesystem


# --- /tmp/ftd-<uid>, which anybody may make ---------------------------------------------------------------------------


def _private_symlink(path: Path, places: Path) -> None:
    (places / "session").chmod(0o700)
    path.symlink_to(places / "session")


def _private_file(path: Path, places: Path) -> None:
    path.touch(0o700)


def _private_open(path: Path, places: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


PRIVATE_TRAPS = [
    (_private_symlink, "is no real directory"),
    (_private_file, "is no real directory"),
    (_private_open, "is of mode 0755 and not 0700"),
]


@pytest.mark.parametrize(("trap", "found"), PRIVATE_TRAPS)
def test_a_private_directory_that_is_a_trap_is_refused(places: Path, trap: object, found: str) -> None:
    (places / "run").rmdir()
    trap(private_dir(places), places)
    before = private_dir(places).lstat()
    with pytest.raises(RuntimeDirError, match=f"no runtime directory is usable: .*{private_dir(places)} {found}"):
        rundir.daemon_dir({})
    assert private_dir(places).lstat() == before
    assert rundir.client_dirs({}) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_private_directory_of_another_user_is_refused(places: Path) -> None:
    (places / "run").rmdir()
    private_dir(places).mkdir(mode=0o700)
    os.chown(private_dir(places), NOBODY, NOBODY)
    with pytest.raises(RuntimeDirError, match=f"is a directory of uid {NOBODY}"):
        rundir.daemon_dir({})
    assert rundir.client_dirs({}) == []


def test_every_reason_is_named_when_no_candidate_is_usable(places: Path) -> None:
    for name in ("run", "session"):
        (places / name / "ftd").touch()
    private_dir(places).touch()
    with pytest.raises(RuntimeDirError) as caught:
        rundir.daemon_dir({"XDG_RUNTIME_DIR": str(places / "session")})
    for path in (places / "run" / "ftd", places / "session" / "ftd", private_dir(places)):
        assert str(path) in caught.value.message


# --- the clients' directories -----------------------------------------------------------------------------------------


def test_clients_search_all_that_exist_in_order(places: Path) -> None:
    environ = {"FTD_RUNTIME_DIR": str(places / "given"), "XDG_RUNTIME_DIR": str(places / "session")}
    assert rundir.client_dirs(environ) == []
    wanted = [places / "given", places / "run" / "ftd", places / "session" / "ftd", private_dir(places)]
    for path in reversed(wanted):
        path.mkdir(mode=0o700)
    assert rundir.client_dirs(environ) == wanted
    assert rundir.client_dirs({"FTD_RUNTIME_DIR": str(places / "run" / "ftd")}) == [wanted[1], wanted[3]]


def test_clients_make_nothing(places: Path) -> None:
    rundir.client_dirs({"FTD_RUNTIME_DIR": str(places / "given"), "XDG_RUNTIME_DIR": str(places / "session")})
    assert [*places.glob("*/ftd*"), *places.glob("given")] == []


def test_clients_skip_what_they_may_not_search(ordinary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "SYSTEM_DIR", ordinary / "closed")
    monkeypatch.setattr(rundir, "TMP_DIR", ordinary / "closed")
    (ordinary / "closed").mkdir(mode=0o000)
    (ordinary / "open").mkdir()
    assert rundir.client_dirs({"FTD_RUNTIME_DIR": str(ordinary / "open")}) == [ordinary / "open"]


# --- socket paths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [90, 107, 108, 200])
@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_socket_path_fits_the_kernel_or_is_refused_with_the_numbers(length: int, letter: str) -> None:
    # the directory is as long as it takes for the whole path to have `length` bytes, counted as bytes
    room = length - len("//llama70b.sock")
    directory = Path("/" + letter * (room // len(letter.encode())) + "y" * (room % len(letter.encode())))
    if length <= 107:
        assert rundir.socket_path(directory, "llama70b") == directory / "llama70b.sock"
        return
    with pytest.raises(RuntimeDirError, match=f"has {length} bytes: expected at most 107") as caught:
        rundir.socket_path(directory, "llama70b")
    assert "FTD_RUNTIME_DIR" in caught.value.remedy


# --- failure records --------------------------------------------------------------------------------------------------


def failure(namespace: str = "ns", **changes: object) -> Failure:
    made = Failure.of(namespace, MemoryShortError("8 GiB needed, 1 GiB free in /dev/shm", "free some"))
    return replace(made, **changes)


def test_a_failure_is_of_this_process_and_now() -> None:
    begun_ns = clock.monotonic_ns()
    made = failure()
    assert made.to_dict() == {
        "code": "memory",
        "message": "8 GiB needed, 1 GiB free in /dev/shm",
        "remedy": "free some",
    }
    assert (made.exit_status, made.pid, made.boot_id) == (6, os.getpid(), owner.boot_id().hex())
    assert made.is_after(begun_ns)
    assert not made.is_after(clock.monotonic_ns())
    assert not replace(made, boot_id="00" * 16).is_after(begun_ns)


def test_a_record_round_trips_and_is_removed(tmp_path: Path, umask: None) -> None:
    made = failure(message="cannot read /models/\udcff.bin")
    assert rundir.write_failure(tmp_path, made)
    assert [path.name for path in tmp_path.iterdir()] == ["ns.failed.json"]
    assert mode_of(tmp_path / "ns.failed.json") == 0o644
    assert rundir.read_failure([tmp_path], "ns") == made
    rundir.remove_failure([tmp_path, tmp_path / "missing"], "ns")
    assert list(tmp_path.iterdir()) == []
    assert rundir.read_failure([tmp_path], "ns") is None


def test_a_record_replaces_the_one_before(tmp_path: Path) -> None:
    rundir.write_failure(tmp_path, failure(message="first"))
    rundir.write_failure(tmp_path, failure(message="second"))
    found = rundir.read_failure([tmp_path], "ns")
    assert found is not None
    assert found.message == "second"


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_the_latest_of_this_boot_wins_whatever_the_wall_clock_says(tmp_path: Path, newest: int) -> None:
    directories = [tmp_path / str(index) for index in range(3)]
    for index, directory in enumerate(directories):
        directory.mkdir()
        at_ns = 2_000 if index == newest else 1_000
        rundir.write_failure(directory, failure(message=str(index), failed_at_ns=at_ns, wall_s=9e9 - at_ns))
    (tmp_path / "old").mkdir()
    old = failure(message="of another boot", boot_id="00" * 16, failed_at_ns=10**18, wall_s=9e9)
    rundir.write_failure(tmp_path / "old", old)
    found = rundir.read_failure([*directories, tmp_path / "old", tmp_path / "missing"], "ns")
    assert found is not None
    assert found.message == str(newest)


def test_earlier_boots_are_ordered_by_the_wall_clock(tmp_path: Path) -> None:
    for name, at_ns, wall_s in (("a", 10, 2_000.0), ("b", 20, 1_000.0)):
        (tmp_path / name).mkdir()
        old = failure(message=name, boot_id=name * 32, failed_at_ns=at_ns, wall_s=wall_s)
        rundir.write_failure(tmp_path / name, old)
    found = rundir.read_failure([tmp_path / "a", tmp_path / "b"], "ns")
    assert found is not None
    assert found.message == "a"


def test_a_record_of_a_newer_release_may_say_more(tmp_path: Path) -> None:
    made = failure()
    (tmp_path / "ns.failed.json").write_text(json.dumps(asdict(made) | {"generation": 3}))
    assert rundir.read_failure([tmp_path], "ns") == made


def _whole() -> str:
    return json.dumps(asdict(failure()))


BROKEN = {
    "empty": "",
    "half": _whole()[:40],
    "list": "[]",
    "text": "gone wrong",
    "missing-field": json.dumps({**asdict(failure()), "remedy": None}),
    "boolean-status": json.dumps({**asdict(failure()), "exit_status": True}),
    "no-finite-time": json.dumps({**asdict(failure()), "wall_s": float("nan")}),
    "other-namespace": json.dumps(asdict(failure("other"))),
    "too-large": json.dumps(asdict(failure(message="x" * rundir.MAX_FAILURE_BYTES))),
    "deep": "[" * 60_000,
    "no-utf8": "\udcff",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_record_is_skipped_with_a_log_line_and_overwritten(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ns.failed.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert rundir.read_failure([tmp_path], "ns") is None
    assert "ns.failed.json is no failure record and is ignored" in caplog.text
    assert rundir.failed_namespaces([tmp_path]) == []
    made = failure()
    assert rundir.write_failure(tmp_path, made)
    assert rundir.read_failure([tmp_path], "ns") == made


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.with_name("elsewhere").write_text(_whole())
    path.symlink_to(path.with_name("elsewhere"))


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_fifo, _link, _directory])
def test_what_is_no_file_is_skipped_at_once(tmp_path: Path, make: object) -> None:
    make(tmp_path / "ns.failed.json")
    assert rundir.read_failure([tmp_path], "ns") is None


def test_what_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ns.failed.json").mkdir()
    rundir.remove_failure([tmp_path], "ns")
    assert "ns.failed.json cannot be removed: is a directory" in caplog.text


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes: what write(2) meets at the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = failure(message="before")
    rundir.write_failure(tmp_path, before)
    with full_disk():
        written = rundir.write_failure(tmp_path, failure(message="after"))
    assert not written
    assert "ns.failed.json cannot be written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["ns.failed.json"]
    assert rundir.read_failure([tmp_path], "ns") == before


def test_a_missing_directory_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    assert not rundir.write_failure(tmp_path / "missing", failure())


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f".ns.failed.json.{os.getpid()}").symlink_to("precious")
    assert rundir.write_failure(tmp_path, failure())
    assert (tmp_path / "precious").read_text() == "precious"


def test_namespaces_with_a_record_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for name in ("a", "b", "tmp"):
        (tmp_path / name).mkdir()
    for directory, namespace in (("a", "x-1"), ("b", "x-1"), ("b", "a.b")):
        rundir.write_failure(tmp_path / directory, failure(namespace))
    (tmp_path / "a" / "half.failed.json").write_text("{")
    (tmp_path / "a" / "renamed.failed.json").write_text(_whole())
    (tmp_path / "a" / "x-1.sock.lock").touch()
    directories = [tmp_path / "a", tmp_path / "missing", tmp_path / "b"]
    assert rundir.failed_namespaces(directories) == ["a.b", "x-1"]
