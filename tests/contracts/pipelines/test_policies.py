"""SD3 satisfies the contract of policies and, as slow tests, FLUX.1 and further families do."""

from tests.fixtures.policy_contract import PictureContract


class TestPictures(PictureContract):
    """On the families of the fixture `family`."""
