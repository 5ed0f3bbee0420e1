"""The families that every test of the contract runs on."""

from typing import Any

import pytest
from diffusers import FluxFillPipeline, FluxKontextPipeline

from tests.fixtures.families import (
    SD3_FAMILY,
    Family,
    fill_family,
    flux1_family,
    kontext_family,
    qwen_edit_family,
    qwen_family,
)
from tests.fixtures.tiny_flux import build_flux
from tests.fixtures.tiny_qwen_image import build_qwen


@pytest.fixture(scope="session")
def flux1(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("flux1")
    other = build_flux(folder / "other", num_attention_heads=3)
    return flux1_family(build_flux(folder / "dev"), other)


@pytest.fixture(scope="session")
def kontext(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("kontext")
    other = build_flux(folder / "other", FluxKontextPipeline, num_attention_heads=3)
    return kontext_family(build_flux(folder / "kontext", FluxKontextPipeline), other)


@pytest.fixture(scope="session")
def fill(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("fill")
    sizes = {"in_channels": 64 + 64 + 256, "out_channels": 64}
    other = build_flux(folder / "other", FluxFillPipeline, num_attention_heads=3, **sizes)
    return fill_family(build_flux(folder / "fill", FluxFillPipeline, **sizes), other)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("qwen")
    other = build_qwen(folder / "other", num_attention_heads=3)
    return qwen_family(build_qwen(folder / "qwen"), other)


@pytest.fixture(scope="session")
def qwen_edit(tmp_path_factory) -> Family:
    """The second model modulates images as at time 0."""
    folder = tmp_path_factory.mktemp("qwen_edit")
    other = build_qwen(folder / "other", edits=True, num_attention_heads=3, zero_cond_t=True)
    return qwen_edit_family(build_qwen(folder / "edit", edits=True), other)


FURTHER = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("flux1", "kontext", "fill", "qwen", "qwen_edit")
]


@pytest.fixture(params=["sd3", *FURTHER])
def family(request) -> Family:
    return SD3_FAMILY if request.param == "sd3" else request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def _loaded() -> dict[tuple[type, str], Any]:
    return {}


@pytest.fixture
def plain(family, _loaded) -> Any:
    """The family's policy as it is loaded, shared: only for tests that change nothing in it."""
    key = family.cls, family.path  # AnyFlow wraps the same folders
    if key not in _loaded:
        _loaded[key] = family.new()
    return _loaded[key]
