"""The error of `piecewise_prefetch="error"`."""

from ftd.errors import FtdError


class PiecewisePrefetchPolicyError(FtdError, RuntimeError):
    """A join at the end of a captured piece made compute wait for a copy that was to overlap with a later piece.

    Results are right all the same: what is lost is the overlap. Raised from `join_after_forward()` and only where
    `piecewise_prefetch` is `"error"`; `"warn"` logs the same text.
    """

    code = "piecewise_prefetch"
