import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import NamespaceError, SegmentError
from ftd.shm import names
from ftd.shm.names import MAX_GENERATION, NAMESPACE_RULE, Names, ParsedName, check_namespace, listed, parse, present
from tests.conftest import NOBODY

#: Namespaces that look like tails of other names are as valid as any.
TRICKY = [
    "a",
    "a.b",
    "a.g1",
    "a.lock",
    "a.g1.0",
    "a.g1.manifest",
    "lock",
    "g1",
    "a.",
    "a..g1",
    "0",
    "a_b",
    "a-b",
    "A" * 64,
]
NAMESPACES = st.sampled_from(TRICKY) | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
GENERATIONS = st.integers(1, MAX_GENERATION)
INDEXES = st.integers(0, 10**9 - 1)


def _all_names(namespace: str, generation: int, index: int) -> dict[str, ParsedName]:
    of = Names(namespace)
    rows = [
        (of.lock, None, "lock"),
        (of.coord, None, "coord"),
        (of.slots, None, "slots"),
        (of.weights(generation, index), generation, str(index)),
        (of.manifest(generation), generation, "manifest"),
        (of.files(generation), generation, "files"),
        (of.staging(generation), generation, "staging"),
    ]
    return {name: ParsedName(name, namespace, number, part) for name, number, part in rows}


@given(NAMESPACES, GENERATIONS, INDEXES)
def test_parse_is_the_inverse_of_names(namespace: str, generation: int, index: int) -> None:
    for name, expected in _all_names(namespace, generation, index).items():
        assert parse(name.removeprefix("/")) == expected


@given(NAMESPACES, NAMESPACES, GENERATIONS, INDEXES)
def test_two_namespaces_never_share_a_name(one: str, other: str, generation: int, index: int) -> None:
    if one != other:
        assert not _all_names(one, generation, index).keys() & _all_names(other, generation, index).keys()


def test_the_names_are_the_contracts() -> None:
    assert sorted(_all_names("llama70b", 3, 0)) == [
        "/ftd.llama70b.coord",
        "/ftd.llama70b.g3.0",
        "/ftd.llama70b.g3.files",
        "/ftd.llama70b.g3.manifest",
        "/ftd.llama70b.g3.staging",
        "/ftd.llama70b.lock",
        "/ftd.llama70b.slots",
    ]


def test_the_longest_name_fits_a_directory_entry() -> None:
    assert max(map(len, _all_names("A" * 64, 10**18 - 1, 10**9 - 1))) <= 255


@pytest.mark.parametrize(
    "file_name",
    [
        "", "ftd", "ftd.a", "ftd..lock", "ftd.a.Lock", "ftd.a.lock ", "ftd.a.lock\n", "/ftd.a.lock", "xftd.a.lock",
        "ftd.a.g0.0", "ftd.a.g01.0", "ftd.a.g1.00", "ftd.a.g1.01", "ftd.a.g1.-1", "ftd.a.g1.", "ftd.a.g.0",
        "ftd.a.g-1.0", "ftd.-a.lock", "ftd.é.lock", "ftd.a.g١.0", f"ftd.{'a' * 65}.lock", "sem.ftd.a", "ftd.a.g1.0.tmp",
    ],
)  # fmt: skip
def test_files_of_others_are_left_alone(file_name: str) -> None:
    assert parse(file_name) is None


def test_a_namespace_may_look_like_a_tail() -> None:
    assert parse("ftd.a.g1.lock") == ParsedName("/ftd.a.g1.lock", "a.g1", None, "lock")


@given(st.text(max_size=80) | st.builds("ftd.{}".format, st.text("ftd.gabs01locrmnie", max_size=30)))
def test_whatever_parses_is_what_its_parts_name(file_name: str) -> None:
    parsed = parse(file_name)
    if parsed is not None:
        generation = parsed.generation or 1
        index = int(parsed.part) if parsed.part.isdigit() else 0
        assert _all_names(parsed.namespace, generation, index)["/" + file_name] == parsed


@pytest.mark.parametrize("namespace", TRICKY)
def test_namespaces_that_are_accepted(namespace: str) -> None:
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize(
    "namespace",
    [
        "", ".", "..", ".a", "-a", "_a", "a/b", "/a", "../a", "a b", " a", "a ", "a\n", "\na", "a\0", "é", "a١",
        "a" * 65, "a" * 250, "a:b", "a*", None, 7, b"a",
    ],
)  # fmt: skip
def test_namespaces_that_are_refused(namespace: object) -> None:
    for check in (check_namespace, Names):
        with pytest.raises(NamespaceError) as raised:
            check(namespace)  # type: ignore[arg-type]
        assert NAMESPACE_RULE in raised.value.message
        assert raised.value.message.startswith(f"namespace {namespace!r} is not valid")


def test_a_listing_never_takes_a_namespace_for_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SH-10: what is done to all names of `a` must not touch `a_b`, nor `a.b`, nor `a.g1`."""
    monkeypatch.setattr(names, "SHM_DIR", tmp_path)
    spaces = ["a", "a_b", "a.b", "a.g1", "a.lock", "aa"]
    for namespace in spaces:
        for name in _all_names(namespace, 2, 1):
            (tmp_path / name.removeprefix("/")).touch()
    for stranger in ("ftd.a", "sem.x", "ftd.a.tmp", "psm_1234"):
        (tmp_path / stranger).touch()
    for namespace in spaces:
        assert [parsed.name for parsed in listed(namespace)] == sorted(_all_names(namespace, 2, 1))
    assert len(listed()) == 7 * len(spaces)
    assert listed("b") == []


@pytest.mark.parametrize("generation", [-1, 0, MAX_GENERATION + 1, 2**64 - 1])
def test_a_name_that_nobody_could_parse_is_never_made(generation: int) -> None:
    """A segment of such a name would be found by nobody, and so removed by nobody."""
    for make in (lambda: Names("a").weights(generation, 0), lambda: Names("a").manifest(generation),
                 lambda: Names("a").files(generation), lambda: Names("a").weights(1, 10**9)):  # fmt: skip
        with pytest.raises(SegmentError, match="expected 1 to 999999999999999999"):
            make()


# --- what is whose -----------------------------------------------------------------------------------------------


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(names, "SHM_DIR", tmp_path)
    return tmp_path


def _tails(found: tuple[ParsedName, ...]) -> list[str]:
    return [parsed.name.removeprefix("/ftd.a.") for parsed in found]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to others")
def test_what_others_put_there_is_not_ours(shm: Path) -> None:
    """Its keeper is whoever owns `lock`, `coord` and `slots`; root may have been its creator too."""
    for tail, uid in {
        "lock": NOBODY, "coord": NOBODY, "slots": NOBODY, "g1.0": NOBODY, "g1.manifest": NOBODY, "g2.0": 0,
        "g99.0": 4711, "g1.1": 4711,
    }.items():  # fmt: skip
        (shm / f"ftd.a.{tail}").touch()
        os.chown(shm / f"ftd.a.{tail}", uid, -1)
    found = present(Names("a"))
    assert _tails(found.ours) == ["coord", "g1.0", "g1.manifest", "g2.0", "lock", "slots"]
    assert found.foreign == {"/ftd.a.g99.0": 4711, "/ftd.a.g1.1": 4711}
    assert (found.generations, found.published) == ({1, 2}, {1})


def test_what_is_no_file_is_not_ours(shm: Path) -> None:
    (shm / "ftd.a.lock").touch()
    (shm / "ftd.a.g1.0").mkdir()
    os.mkfifo(shm / "ftd.a.g2.0")
    (shm / "ftd.a.g3.0").symlink_to(shm / "ftd.a.lock")
    (shm / "ftd.a.g4.0").symlink_to("nowhere")
    found = present(Names("a"))
    assert _tails(found.ours) == ["lock"]
    assert sorted(found.foreign) == [f"/ftd.a.g{number}.0" for number in (1, 2, 3, 4)]
    assert found.generations == set()


def test_what_vanishes_meanwhile_is_not_there(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shm / "ftd.a.lock").touch()
    gone = ParsedName("/ftd.a.g1.0", "a", 1, "0")
    monkeypatch.setattr(names, "listed", lambda namespace: [*listed(namespace), gone])
    assert _tails(present(Names("a")).ours) == ["lock"]
    assert present(Names("a")).foreign == {}
