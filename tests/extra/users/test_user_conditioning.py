"""A personalised policy is asked for the person that a request, or the run file, names."""

import pytest
import torch

from flowalign.extra import Users
from flowalign.sampling.inference import encode_once, generate
from flowalign.types import PromptGuidance, Request, UserConditioning
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy

KNOWN = {"ann": 7.0, "bob": -2.0, "": 0.0}


class Companion(PixelPolicy, UserConditioning):
    """Moves data by a number of each person."""

    user_conditioning = property(lambda self: self)

    def add_users(self, cond, users):
        return {**cond, "user": torch.tensor([[KNOWN[user]] for user in users])}

    def check_user(self, user):
        if user not in KNOWN:
            raise ValueError(f"user {user!r} has no embedding")

    def encode(self, requests):
        return self.add_users(super().encode(requests), [""] * len(requests))

    def velocity(self, x, sigma, cond):
        return cond["user"].expand(-1, 3)


def test_samples_are_those_of_the_person_who_asks():
    policy = Companion()
    requests = [Request("a"), Request("a", metadata={"user_id": "bob"})]
    start = torch.cat([policy.noise(1, generator(0, "x", i)) for i in range(2)])
    seeds = [generator(0, "x", i) for i in range(2)]
    moved = generate(policy, requests, 4, seeds, 2, conditioning=Users(user="ann")) - start
    assert torch.allclose(moved, torch.tensor([[-7.0], [2.0]]).expand(2, 3), atol=1e-5)


def test_equal_prompts_of_two_people_are_encoded_apart():
    conditioned = [Users(user=name).for_inference(Request("a")) for name in ("ann", "bob", "ann")]
    cond, row = encode_once(Companion(), conditioned)
    assert cond["user"][row][:, 0].tolist() == [7.0, -2.0, 7.0]
    assert Users().for_inference(Request("a")).input_digest == Request("a").input_digest


def test_people_whom_the_policy_does_not_know_are_refused():
    Users(user="ann").check(Companion(), {})
    with pytest.raises(ValueError, match="'eve' has no embedding"):
        Users(user="eve").check(Companion(), {})
    with pytest.raises(ValueError, match="PixelPolicy has no user conditioning"):
        Users().check(PixelPolicy(), {})
    with pytest.raises(ValueError, match="set it to null"):
        Users(guidance=PromptGuidance())
