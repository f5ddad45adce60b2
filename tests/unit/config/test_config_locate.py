"""Which file is read, and what becomes of files that cannot be."""

import os
from pathlib import Path

import pytest

from ftd.config import locate
from ftd.config.locate import expand, search_paths
from ftd.errors import ConfigError


def test_order_of_the_standard_places(monkeypatch):
    environ = {"HOME": "/home/u"}
    assert search_paths("ns", None, environ).paths == (Path("/etc/ftd/ns.yaml"), Path("/home/u/.config/ftd/ns.yaml"))
    absolute = search_paths("ns", None, environ | {"XDG_CONFIG_HOME": "/x"})
    assert absolute.paths == (Path("/etc/ftd/ns.yaml"), Path("/x/ftd/ns.yaml"))
    for ignored in ("", "relative/dir"):
        found = search_paths("ns", None, environ | {"XDG_CONFIG_HOME": ignored})
        assert found.paths[1] == Path("/home/u/.config/ftd/ns.yaml")
    monkeypatch.setattr(locate.pwd, "getpwuid", {}.__getitem__)
    assert search_paths("ns", None, {}).paths == (Path("/etc/ftd/ns.yaml"),)


def test_named_files_stand_alone_and_the_flag_wins():
    environ = {"FTD_CONFIG": "/env.yaml", "HOME": "/home/u"}
    assert search_paths("ns", Path("/flag.yaml"), environ) == locate.Search((Path("/flag.yaml"),), "--config")
    assert search_paths("ns", None, environ) == locate.Search((Path("/env.yaml"),), "$FTD_CONFIG")
    assert search_paths("ns", None, environ | {"FTD_CONFIG": ""}).named_by == ""
    assert search_paths("ns", None, environ | {"FTD_CONFIG": "~/f.yaml"}).paths == (Path("/home/u/f.yaml"),)


def test_expand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": "/home/u"}
    assert expand("m", None, environ) == tmp_path / "m"
    assert expand("m/x", Path("/base"), environ) == Path("/base/m/x")
    assert expand("/m", Path("/base"), environ) == Path("/m")
    assert expand("~", Path("/base"), environ) == Path("/home/u")
    assert expand("~/m", Path("/base"), environ) == Path("/home/u/m")
    assert expand("~root/m", None, environ) == Path("/root/m")
    assert expand("./~/m", None, environ) == tmp_path / "~/m"
    assert expand("x/~", None, environ) == tmp_path / "x/~"
    with pytest.raises(ConfigError, match="no home directory for ~no-such-user"):
        expand("~no-such-user/m", None, environ)


def test_a_working_directory_that_is_gone_is_explained(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="'m' is relative to the working directory: no such file or directory"):
        expand("m", None, {})
    assert expand("/m", None, {}) == Path("/m")


def test_no_file_is_fine_and_the_first_that_exists_is_read(load, tmp_path):
    assert load().file is None
    user = tmp_path / "home/.config/ftd/ns.yaml"
    user.parent.mkdir(parents=True)
    user.write_text("pin: mlock")
    loaded = load()
    assert (loaded.file, loaded.config.pin, loaded.origins["pin"]) == (user, "mlock", f"file {user}")
    loaded = load("pin: cuda")
    assert (loaded.file, loaded.config.pin) == (tmp_path / "etc/ns.yaml", "cuda")
    named = tmp_path / "named.yaml"
    named.write_text("pin: none")
    assert load(environ={"FTD_CONFIG": str(named)}).config.pin == "none"
    # relative to the working directory
    loaded = load(config_file=Path("named.yaml"), environ={"FTD_CONFIG": "/nowhere"})
    assert (loaded.file, loaded.origins["pin"]) == (named, f"file {named}")


@pytest.mark.parametrize("how", ["config", "environ"])
def test_a_named_file_must_exist(load, how):
    arguments = {"config_file": Path("/no/x.yaml")} if how == "config" else {"environ": {"FTD_CONFIG": "/no/x.yaml"}}
    named_by = "--config" if how == "config" else "$FTD_CONFIG"
    with pytest.raises(ConfigError) as caught:
        load(**arguments)
    assert caught.value.message == (
        f"configuration file /no/x.yaml ({named_by}): no such file or directory, expected a readable YAML file"
    )
    assert caught.value.remedy == f"correct {named_by}"
    assert caught.value.exit_status == 2


def test_files_that_are_no_text(load, tmp_path):
    with pytest.raises(ConfigError, match="found no UTF-8 text at byte 5"):
        load(b"pin: \xff\xfe")
    with pytest.raises(ConfigError, match="found more than 1048576 bytes"):
        load(b"#" * (locate.MAX_FILE_BYTES + 1))
    assert load(b"#" * locate.MAX_FILE_BYTES).origins["pin"] == "default"
    assert load(b"\xef\xbb\xbfpin: cuda").config.pin == "cuda"
    with pytest.raises(ConfigError, match="found a directory"):
        load(config_file=tmp_path)
    with pytest.raises(ConfigError, match="found a device or pipe"):
        load(config_file=Path("/dev/zero"))


def test_a_pipe_without_a_writer_does_not_hang(load, tmp_path):
    os.mkfifo(tmp_path / "etc/ns.yaml")
    with pytest.raises(ConfigError, match="found a device or pipe"):
        load()


def test_refused_files_leave_no_descriptor(load, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError):
            load(config_file=path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def deny(monkeypatch):
    """Refuses one path as the kernel would a user that is not root (the tests may run as root)."""

    def install(path, *, also_stat):
        def refuse(of):
            def call(target, *args, **kwargs):
                if os.fspath(target) == str(path):
                    raise PermissionError(13, "Permission denied", str(path))
                return of(target, *args, **kwargs)

            return call

        monkeypatch.setattr(os, "open", refuse(os.open))
        if also_stat:
            monkeypatch.setattr(os, "stat", refuse(os.stat))

    return install


def test_a_file_that_may_not_be_read_is_an_error(load, tmp_path, deny):
    deny(tmp_path / "etc/ns.yaml", also_stat=False)
    with pytest.raises(ConfigError) as caught:
        load("pin: cuda")
    assert caught.value.message == (
        f"configuration file {tmp_path}/etc/ns.yaml: permission denied for uid {os.geteuid()}, "
        "expected a readable YAML file"
    )
    assert caught.value.remedy == f"let uid {os.geteuid()} read {tmp_path}/etc/ns.yaml"


def test_a_home_directory_that_may_not_be_entered_is_a_warning(load, tmp_path, deny):
    path = tmp_path / "home/.config/ftd/ns.yaml"
    deny(path, also_stat=True)
    assert load().warnings == (f"{path} was not looked for: permission denied",)
    with pytest.raises(ConfigError, match=r"\(\$FTD_CONFIG\): permission denied for uid"):
        load(environ={"FTD_CONFIG": str(path)})
