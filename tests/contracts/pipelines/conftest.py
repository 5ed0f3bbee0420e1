"""What the tests of one family share: each file has a fixture `family`, or it is of SD3."""

from typing import Any

import pytest

from tests.fixtures.families import SD3_FAMILY, Family


@pytest.fixture
def family() -> Family:
    return SD3_FAMILY


@pytest.fixture(scope="module")
def _loaded() -> dict[tuple[type, str], Any]:
    return {}


@pytest.fixture
def plain(family, _loaded) -> Any:
    """The family's policy as it is loaded, shared: only for tests that change nothing in it."""
    key = family.cls, family.path
    if key not in _loaded:
        _loaded[key] = family.new()
    return _loaded[key]
