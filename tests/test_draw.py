"""Which slow tests `make test` runs."""

from types import SimpleNamespace

import pytest

from tests.fixtures import draw


def named(name: str, *marks: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, get_closest_marker=marks.__contains__)


@pytest.fixture
def tests():
    return [named(f"{kind}{i}", kind) for i in range(9) for kind in ("unit", "slow")]


def test_unit_tests_always_run_and_four_versions_run_every_slow_test(tests, monkeypatch):
    ran = []
    for drawn in range(4):
        monkeypatch.setattr(draw, "content_hash", lambda drawn=drawn: drawn)
        left_out = draw.left_out(tests, 4)
        assert all(test.name.startswith("slow") for test in left_out)
        ran += [test.name for test in tests if test not in left_out and "slow" in test.name]
    assert sorted(ran) == [f"slow{i}" for i in range(9)]


def test_slow_tests_that_always_run_are_not_drawn(tests):
    demo = named("demo", "slow", "always")
    assert all(demo not in draw.left_out([demo, *tests[:i]], 4) for i in range(9))


def test_without_the_option_every_test_runs(tests):
    assert draw.left_out(tests, 1) == []
