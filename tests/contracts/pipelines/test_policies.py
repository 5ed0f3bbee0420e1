"""SD3 satisfies the contract of policies, as further families do."""

import pytest

from tests.fixtures.policy_contract import PictureContract

pytestmark = pytest.mark.slow


class TestPictures(PictureContract):
    """On the families of the fixture `family`."""
