"""Direct-Align and the relative reward against numbers of SRPO's code, see assets/golden."""

import json

import pytest
import torch

from flowalign.gradient_paths import DirectAlign
from flowalign.losses import Margin
from flowalign.rewards.combine import ramp, relative_reward
from flowalign.rewards.objectives import ControlWords
from tests.fixtures import golden
from tests.fixtures.replays import FieldReplay

NAME = "G_srpo"
VALUES = json.loads((golden.GOLDEN / f"{NAME}.json").read_text())["values"]


def shifted(num_steps, shift):
    t = torch.linspace(1, 0, num_steps + 1)
    return shift * t / (1 + (shift - 1) * t)


def gradient_path(config):
    return DirectAlign(
        directions="both",
        schedule_steps=config["vs"],
        window=tuple(config["tt"]),
        num_points=config["Tl"],
        longest=1 - config["gr"],
    )


def drawing(middle, num_points):
    """A generator that draws this point next."""
    for seed in range(10_000):
        found = torch.randint(
            5, num_points - 4, (1,), generator=torch.Generator().manual_seed(seed)
        )
        if int(found) == middle:
            return torch.Generator().manual_seed(seed)
    raise AssertionError(middle)


class Toy:
    """The network, decoder and reward of a recorded case, and a replay of its sample."""

    def __init__(self, case):
        self.t, self.config = golden.load(NAME, f"{case}."), VALUES[case]["config"]
        self.parameters = [self.t[n].clone().requires_grad_() for n in "WuP"]

        def network(x, sigma):
            W, u, P = self.parameters
            time = torch.floor(sigma * 1000) / 1000  # as the authors' code rounds it
            return torch.tanh(x @ W) + time * u + (self.t["pooled"] @ P)[:, None]

        sigmas = torch.tensor([1.0, 0.0])
        self.replay = FieldReplay(network, self.t["noise"], sigmas)
        self.replay.states = [self.t["noise"], self.t["x0"]]
        self.replay.schedule = lambda n: shifted(n, self.config["shift"])

    def score(self, x, text):
        rows, columns = self.config["h"] // 16, self.config["w"] // 16
        z = x.unflatten(1, (rows, columns)).unflatten(-1, (16, 2, 2))
        z = z.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3) / 0.3611 + 0.1159
        image = torch.tanh(0.5 * torch.einsum("oc,nchw->nohw", self.t["vae_M"], z)) / 2 + 0.5
        feature = torch.nn.functional.normalize(image.clamp(0, 1).flatten(1) @ self.t["enc_A"])
        return feature @ text


def test_both_directions_their_rewards_and_gradients_are_those_of_the_recording():
    toy, words, losses = Toy("case0"), ControlWords(), []
    views = gradient_path(toy.config)(toy.replay, drawing(40, 100))
    for i, view in enumerate(views):
        said, t = VALUES["case0"]["branches"][i], golden.load(NAME, f"case0.b{i}.")
        torch.testing.assert_close(view.clean, t[f"case0.b{i}.recovered"], atol=1e-5, rtol=0)
        k = ramp(words.k_inverted if view.inverted else words.k, view.place)
        assert k == pytest.approx(said["discount"], rel=1e-5)
        scores = [toy.score(view.clean, t[f"case0.b{i}.text_{n}"]) for n in ("first", "second")]
        reward = relative_reward(scores[0][:, None], scores[1][:, None], k, words.form)[:, 0]
        torch.testing.assert_close(reward.detach(), t[f"case0.b{i}.reward"], atol=1e-5, rtol=0)
        losses.append(Margin(margin=0.7)(reward) / 2)
        torch.testing.assert_close(losses[-1].detach(), t[f"case0.b{i}.loss"], atol=1e-5, rtol=0)
    sum(loss.sum() for loss in losses).backward()
    assert len(losses) == 2
    for name, parameter in zip("WuP", toy.parameters, strict=True):
        wanted = toy.t[f"case0.grad_{name}"]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-8)


def test_noise_levels_are_those_of_the_recording():
    """In the released code the second direction misses the first by one point; ours meets it."""
    checked = 0
    for row in VALUES["schedule_table"]:
        config = {
            "vs": row["vis_sampling_step"],
            "tt": row["train_timestep"],
            "Tl": row["timestep_length"],
            "gr": row["groundtruth_ratio"],
        }
        made, drawn = gradient_path(config), row["mid_drawn"]
        replay = Toy("case0").replay
        replay.schedule = lambda n, shift=row["shift"]: shifted(n, shift)
        inverted = row["inversion_flag"] == 0
        steps = made.inverting(drawn) if inverted else made.denoising(drawn)
        sigma, target = made.grid(replay)[list(steps)].tolist()
        assert made.length(drawn) == row["k"]
        assert sigma == pytest.approx(row["sigma"], abs=1e-6)
        if not (inverted and drawn == row["k"]):
            assert target == pytest.approx(row["sigma_target"], abs=1e-6)
            checked += 1
    assert checked > 10


def test_scaled_cosines_of_clip_are_combined_as_recorded():
    t = golden.load(NAME, "clip.")
    image, wanted, unwanted = (
        torch.nn.functional.normalize(t[f"clip.{name}"]) for name in ("image", "pos", "neg")
    )
    scale = t["clip.logit_scale"].exp() / 20
    first, second = (scale * (image * text).sum(1, keepdim=True) for text in (wanted, unwanted))
    for k in ("0", "1", "25"):
        found = relative_reward(first, second, float(f"0.{k}"), "released")[:, 0]
        torch.testing.assert_close(found, t[f"clip.score_k0.{k}"], rtol=1e-5, atol=1e-6)


def test_forms_of_the_relative_reward():
    wanted, unwanted = torch.tensor([[0.5]]), torch.tensor([[0.2]])
    by_hand = {"released": 1.2 * 0.5 - 0.2, "difference": 0.3, "guided": 0.8 * 0.2 + 0.2 * 0.5}
    for form, value in by_hand.items():
        assert float(relative_reward(wanted, unwanted, 0.2, form)) == pytest.approx(value)
