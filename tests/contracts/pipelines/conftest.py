"""The families that every test of the contract runs on."""

from typing import Any

import pytest
from diffusers import FluxKontextPipeline

from tests.fixtures.families import SD3_FAMILY, Family, flux1_family, kontext_family
from tests.fixtures.tiny_flux import build_flux


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


@pytest.fixture(scope="module")
def plain_kontext(kontext):
    return kontext.new()


@pytest.fixture(params=["sd3", "flux1"])
def family(request) -> Family:
    return SD3_FAMILY if request.param == "sd3" else request.getfixturevalue("flux1")


@pytest.fixture(scope="session")
def _loaded() -> dict[str, Any]:
    return {}


@pytest.fixture
def plain(family, _loaded) -> Any:
    """The family's policy as it is loaded, shared: only for tests that change nothing in it."""
    if family.path not in _loaded:
        _loaded[family.path] = family.new()
    return _loaded[family.path]
