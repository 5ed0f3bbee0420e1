"""Features of states: the network's own, whole with guidance, one row for each distinct state."""

import pytest
import torch
from torch import nn

from flowalign.credit import Critic, LambdaReturn
from flowalign.sampling import Fixed, Sampling, Tree
from flowalign.sampling.rollout import RolloutOutputs, concat_trajectories, sample
from flowalign.sampling.stepping import FeatureRecorder, average_places, last_layers
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.training.rollouts.state_values import Experience
from flowalign.types import plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.embedded import new_sd3
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import PROMPTS, new_learner, new_recipe, new_rewards


def drawn(policy, features=(0, 2), prompts=("a", "bb"), **sampling):
    """Two prompts of four samples; the features of states 0 and 2."""
    defaults = {"num_steps": 4, "samples_per_prompt": 4, "sde_window": Fixed(0, 3)}
    cfg = Sampling(**defaults | sampling)
    seeds = [generator(7, "noise", i) for i in range(len(prompts))]
    window = cfg.sde_window.steps(4, 0, torch.Generator())
    return sample(
        policy, plain_requests(prompts), cfg, window, seeds, keep=RolloutOutputs(features=features)
    )


def test_features_are_what_the_last_layer_reads():
    policy = PixelPolicy(seed=2)
    trajectory = drawn(policy)
    x, length = trajectory.state(2), torch.tensor([[1.0]] * 4 + [[2.0]] * 4)
    read = torch.cat([x, torch.full((8, 1), 0.5), length], 1)
    with torch.no_grad():
        wanted = policy.denoiser[1](policy.denoiser[0](read))
    torch.testing.assert_close(trajectory.features(2), wanted)
    assert sorted(trajectory.hidden) == [0, 2]


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_the_micro_batch_changes_no_features(micro_batch):
    policy = PixelPolicy(seed=2)
    wanted, got = drawn(policy), drawn(policy, micro_batch=micro_batch)
    torch.testing.assert_close(got.features(2), wanted.features(2))


def test_samples_that_share_a_state_share_its_features():
    trajectory = drawn(PixelPolicy(seed=2), branching=Tree(splits=(0, 1)), samples_per_prompt=4)
    assert len(trajectory.hidden[0]) == 2
    assert len(trajectory.hidden[2]) == 8
    assert trajectory.features(0).shape == (8, 32)
    assert torch.equal(trajectory.features(0)[0], trajectory.features(0)[3])
    assert not torch.equal(trajectory.features(0)[0], trajectory.features(0)[4])


def test_trajectories_that_are_joined_keep_their_features_in_order():
    policy = PixelPolicy(seed=2)
    parts = [drawn(policy, prompts=(prompt,)) for prompt in PROMPTS[:2]]
    wanted = torch.cat([part.features(2) for part in parts])
    assert torch.equal(concat_trajectories(parts).features(2), wanted)


def test_sampling_prompts_in_batches_changes_no_features():
    learning = {"credit": LambdaReturn(), "critic": Critic()}
    found = []
    for size in (None, 2):
        cfg = new_recipe(rollout_batch_prompts=size, **learning)
        requests, critic = plain_requests(PROMPTS[:3]), cfg.critic.start()
        values = collect_rollouts(
            cfg.rollouts, new_learner(), new_rewards(), requests, 0, 0, Experience(critic)
        )
        found.append([values.trajectory.features(k) for k in (0, 1, 2)])
    for whole, batched in zip(*found, strict=True):
        torch.testing.assert_close(whole, batched)


@pytest.mark.slow
def test_guidance_gives_the_features_of_both_evaluations():
    """Without the prompt and with it, for each sample by itself."""
    guided, plain = new_sd3(guidance=3.0), FeatureRecorder(new_sd3())
    x = guided.noise(2, torch.Generator().manual_seed(0))
    prompts, sigma = ["a red circle", "three white triangles"], torch.tensor(0.7)
    watched = FeatureRecorder(guided)
    with torch.no_grad():
        watched.velocity(x, sigma, guided.encode(plain_requests(prompts)))
        for texts in (["", ""], prompts):
            plain.velocity(x, sigma, plain.policy.encode(plain_requests(texts)))
    both = watched.take(2)
    without, with_prompt = torch.cat(plain.rows).split(2)
    torch.testing.assert_close(both, torch.cat([without, with_prompt], 1))


def test_hidden_states_are_averaged_over_tokens_or_places():
    tokens, places = torch.tensor([[[1.0, 4.0], [3.0, 8.0]]]), torch.ones(1, 2, 3, 4)
    assert average_places(tokens).tolist() == [[2.0, 6.0]]
    assert average_places(places * torch.tensor([2.0, 5.0])[:, None, None]).tolist() == [[2.0, 5.0]]
    assert average_places(tokens[:, 0].bfloat16()).tolist() == [[1.0, 4.0]]


def test_the_last_layer_of_each_joined_network_is_found_and_those_of_blocks_are_not():
    def network():
        block = nn.ModuleDict({"proj_out": nn.Linear(1, 1)})
        return nn.ModuleDict({"blocks": nn.ModuleList([block]), "proj_out": nn.Linear(1, 1)})

    one, two = network(), nn.ModuleDict({"high": network(), "low": network()})
    assert last_layers(one) == [one["proj_out"]]
    assert last_layers(two) == [two["high"]["proj_out"], two["low"]["proj_out"]]


def test_a_network_whose_last_layer_has_another_name_is_refused():
    with pytest.raises(ValueError, match=r"Linear has none that is called proj_out or conv_out"):
        last_layers(nn.Linear(1, 1))
