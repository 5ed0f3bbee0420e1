"""SD3 and FLUX.1 satisfy the contract of policies."""

from tests.fixtures.policy_contract import PictureContract


class TestPictures(PictureContract):
    """On both families of the fixture `family`."""
