"""Importing large libraries."""

import gc

import pytest

from flowalign.utils.imports import pause_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_and_returns_to_its_state_after_an_error(enabled, monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
    monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
    paused = pause_garbage_collection()
    paused.__enter__()
    assert calls == ["disable"]
    assert not paused.__exit__(ImportError, ImportError(), None)
    assert calls == ["disable", *["enable"] * enabled]
