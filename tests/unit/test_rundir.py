"""Runtime directories: which one a daemon takes, and which ones a client searches."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftd import rundir
from ftd.errors import RuntimeDirError
from tests.conftest import mode_of

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


# --- looking without touching ------------------------------------------------------------------------------------


def test_a_survey_names_every_candidate_and_makes_none(places: Path) -> None:
    environ = {"FTD_RUNTIME_DIR": str(places / "given"), "XDG_RUNTIME_DIR": str(places / "session")}
    expected = [places / "given", places / "run" / "ftd", places / "session" / "ftd", private_dir(places)]
    assert rundir.survey(environ) == [(path, None) for path in expected]
    assert not any(path.exists() for path in expected)


def test_a_survey_says_why_one_is_not_taken(places: Path, ordinary: Path) -> None:
    (ordinary / "open").mkdir()
    (ordinary / "open").chmod(0o777)
    problems = {
        given: dict(rundir.survey({"FTD_RUNTIME_DIR": given}))[Path(given)]
        for given in ("relative", f"{ordinary}/open", f"{ordinary}/far/below", "/etc/passwd/below", "/proc/new")
    }
    assert problems["relative"] == "relative"
    assert problems[f"{ordinary}/open"] == "writable by others than its owner (mode 0777)"
    for given in (f"{ordinary}/far/below", "/etc/passwd/below", "/proc/new"):
        assert problems[given] == (
            f"missing, and {Path(given).parent} is missing or not writable for uid {os.geteuid()}"
        )


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_survey_and_a_daemon_agree(places: Path, mode: int) -> None:
    private_dir(places).mkdir()
    private_dir(places).chmod(mode)
    (_, problem), *_ = [row for row in rundir.survey({}) if row[0] == private_dir(places)]
    (places / "run" / "ftd").touch()  # the other candidate is no directory
    if problem is None:
        assert rundir.daemon_dir({}) == private_dir(places)
    else:
        with pytest.raises(RuntimeDirError, match=problem.split(" and")[0]):
            rundir.daemon_dir({})
