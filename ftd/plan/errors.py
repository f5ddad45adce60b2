"""Errors of the planner."""

from __future__ import annotations

from ftd.errors import EXIT_USAGE, FtdError, MemoryShortError


class PlanError(FtdError):
    """A problem that cannot be planned as given, or a strategy whose plan would corrupt a forward."""

    code = "plan"
    exit_status = EXIT_USAGE


class BudgetError(MemoryShortError):
    """No plan fits the budget.

    Attributes:
        smallest_bytes: the smallest budget that works; 0 where the error crossed a wire as text.
    """

    code = "gpu_budget"
    smallest_bytes: int = 0

    def __init__(self, message: str, remedy: str = "", smallest_bytes: int = 0) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, smallest_bytes)
        self.smallest_bytes = smallest_bytes
