import pickle
from collections.abc import Iterator

import pytest

from ftd import errors
from ftd.cuda.runtime import CudaError
from ftd.errors import BindError, FtdError, os_reason


def _below(cls: type[FtdError]) -> Iterator[type[FtdError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)


OURS = [c for c in dict.fromkeys(_below(FtdError)) if c.__module__ in (errors.__name__, CudaError.__module__)]


def test_codes_are_unique_and_every_class_has_one() -> None:
    codes = [cls.__dict__["code"] for cls in OURS]
    assert len(codes) == len(set(codes))


#: The codes are a promise: scripts and peers of other releases know an error by them.
EXPECTED = {
    "usage": 2, "config": 2, "not_built": 2, "namespace": 2, "runtime_dir": 2,
    "source": 1, "source_changed": 1,
    "memory": 6, "segment": 1, "access": 1,
    "already_running": 5, "not_running": 3, "stop_timeout": 1, "control": 1, "frame": 1, "protocol_mismatch": 1,
    "internal": 1,
    "no_creator": 3, "creator_failed": 1, "creator_died": 1, "creator_hung": 1, "attach_timeout": 4, "no_lease": 1,
    "follower_closed": 1, "bind": 1,
    "cuda": 1,
}  # fmt: skip


def test_codes_and_exit_statuses_are_the_contracts() -> None:
    found = {cls.code: cls.exit_status for cls in OURS}
    assert {code: found.get(code) for code in EXPECTED} == EXPECTED


@pytest.mark.parametrize("cls", OURS)
def test_an_error_crosses_processes(cls: type[FtdError]) -> None:
    error = cls("found 1, expected 2", "do this")
    for copy in (pickle.loads(pickle.dumps(error)), FtdError.from_dict(error.to_dict())):
        assert type(copy) is cls
        assert (copy.message, copy.remedy, str(copy)) == (error.message, error.remedy, str(error))


def test_a_code_of_a_newer_peer_is_a_plain_error() -> None:
    error = FtdError.from_dict({"code": "of_tomorrow", "message": "found", "remedy": "do"})
    assert type(error) is FtdError
    assert (error.message, error.remedy) == ("found", "do")


def test_a_map_without_fields_is_still_an_error() -> None:
    assert FtdError.from_dict({}).to_dict() == {"code": "error", "message": "", "remedy": ""}


def test_a_message_is_one_line() -> None:
    error = FtdError("found\n  1,\texpected 2 ", "do\nthis")
    assert (error.message, error.remedy) == ("found 1, expected 2", "do this")
    assert str(error) == "found 1, expected 2\n  → do this"


def test_without_a_remedy_there_is_no_arrow() -> None:
    assert str(FtdError("found")) == "found"


def test_every_difference_of_a_bind_is_listed_and_pickled() -> None:
    error = BindError("2 differences", "use the same model", problems=("a: 1", "b: 2"))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == ("a: 1", "b: 2")
    assert str(copy) == "2 differences\n  · a: 1\n  · b: 2\n  → use the same model"


def test_a_subclass_without_a_code_of_its_own_keeps_its_parents() -> None:
    class Special(errors.SegmentError):
        pass

    restored = FtdError.from_dict(Special("x").to_dict())
    assert type(restored) is errors.SegmentError


def test_the_reason_of_the_operating_system_reads_inside_a_sentence() -> None:
    assert os_reason(OSError(28, "No space left on device")) == "no space left on device"
    assert os_reason(OSError("Odd")) == "odd"
