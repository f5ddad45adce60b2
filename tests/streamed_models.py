"""Small models for the engine's suite: each is hard to stream in one way, which the docstring of its builder names.

`CASES` has them all by name; `made(name)` builds one.
"""

from tests import streamed_blocks, streamed_escapes, streamed_libraries, streamed_orders, streamed_owners
from tests.streamed_case import CASES, Call, Case, made, tensors

__all__ = [
    "CASES",
    "Call",
    "Case",
    "made",
    "streamed_blocks",
    "streamed_escapes",
    "streamed_libraries",
    "streamed_orders",
    "streamed_owners",
    "tensors",
]
