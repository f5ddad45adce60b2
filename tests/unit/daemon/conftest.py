from __future__ import annotations

import pytest

from ftd.shm.names import Names


@pytest.fixture
def names(namespace: str) -> Names:
    return Names(namespace)
