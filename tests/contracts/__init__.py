"""Contracts of policies and rewards."""

import pytest

pytest.register_assert_rewrite("tests.fixtures.families")
