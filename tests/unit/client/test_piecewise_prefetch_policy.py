from __future__ import annotations

import pickle

from ftd.errors import FtdError
from ftd_client.piecewise_prefetch_policy import PiecewisePrefetchPolicyError


def test_it_is_a_runtime_error_and_crosses_borders() -> None:
    error = PiecewisePrefetchPolicyError("layers.3 waits at the end of a piece", "join later")
    assert isinstance(error, RuntimeError)
    assert isinstance(error, FtdError)
    for copy in (FtdError.from_dict(error.to_dict()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is PiecewisePrefetchPolicyError
        assert (copy.code, copy.message, copy.remedy) == ("piecewise_prefetch", error.message, error.remedy)
