"""What the tests of one family share: each file has a fixture `family`, or it is of SD3."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.fixtures.adapter_contract import Moved, official_pipeline, save_moved
from tests.fixtures.families import SD3_FAMILY, Family


@pytest.fixture
def family() -> Family:
    return SD3_FAMILY


@pytest.fixture(scope="module")
def _loaded() -> dict[tuple[Any, ...], Any]:
    return {}


def _load_once(family: Family, loaded: dict[Any, Any], name: str, load: Callable[[], Any]) -> Any:
    key = family.cls, family.path, name
    if key not in loaded:
        loaded[key] = load()
    return loaded[key]


@pytest.fixture
def borrow(family, _loaded) -> Iterator[Callable[..., Any]]:
    """Load a policy of the family once; each test may move its weights, which are put back."""
    with ExitStack() as returned:

        def find(**changes: Any) -> Any:
            policy = _load_once(family, _loaded, repr(changes), lambda: family.new(**changes))
            returned.enter_context(_put_back(policy.denoiser))
            return policy

        yield find


@contextmanager
def _put_back(network: torch.nn.Module) -> Iterator[None]:
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    training = network.training
    try:
        yield
    finally:
        for name, tensor in network.state_dict().items():
            tensor.copy_(weights[name])
        network.zero_grad()
        network.train(training)


@pytest.fixture
def plain(borrow) -> Any:
    """The family's policy as it is loaded."""
    return borrow()


@pytest.fixture
def moved(family, _loaded, tmp_path_factory) -> Moved:
    return _load_once(
        family, _loaded, "moved", lambda: save_moved(family, tmp_path_factory.mktemp("moved"))
    )


@pytest.fixture
def official(family, plain, _loaded) -> Any:
    """The pipeline of the folder in plain diffusers, whose network must stay as it is."""
    return _load_once(family, _loaded, "official", lambda: official_pipeline(family, plain))
