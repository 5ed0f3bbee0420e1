"""Gradient paths against numbers recorded from FlowBP's code, see assets/golden/README.md."""

import json
from dataclasses import dataclass

import pytest
import torch

from flowalign.extra import DirichletLeaps, FlowBPBridge, FlowBPLagrange
from flowalign.extra.flowbp import lagrange_weights, support_points
from flowalign.gradient_paths import (
    DRaFTLV,
    DRTune,
    FlowBPSparse,
    LeapAlign,
    Leaps,
    ReFL,
    UniformLeaps,
)
from tests.fixtures import golden
from tests.fixtures.replays import FieldReplay

NAME = "G_direct_reward"
VALUES = json.loads((golden.GOLDEN / f"{NAME}.json").read_text())["values"]


@dataclass(frozen=True)
class Given(Leaps):
    """The leap of a recording, with a sampling rule that flowalign does not offer."""

    k: int
    j: int

    def draw(self, num_steps, generator):
        torch.randint(0, 2, (1,), generator=generator)
        return self.k, self.j


LAGRANGE = {"order": 3, "active_points": 2, "other_scale": 0.25, "alpha": 0.1, "tau": 0.2}
CASES = {
    "refl": ReFL(last_steps=5),
    "refl_cfg": ReFL(last_steps=5),
    "draft_lv": DRaFTLV(noised_copies=2),
    "draft_lv0": DRaFTLV(noised_copies=0),
    "drtune": DRTune(train_steps=3, early_stop=0.4),
    "drtune_b": DRTune(train_steps=2, early_stop=0.0),
    "leapalign": LeapAlign(alpha=0.3, tau=0.1),
    "leapalign_alpha0": LeapAlign(alpha=0.0, tau=0.1),
    "leapalign_alpha1": LeapAlign(alpha=1.0, tau=0.01),
    "leapalign_tau": LeapAlign(alpha=0.3, tau=0.001),
    "leapalign_cfg": LeapAlign(alpha=0.3, tau=0.1),
    "sparse": FlowBPSparse(active_steps=4, bias=1.0, rescale=0.5),
    "sparse_raw": FlowBPSparse(active_steps=3, bias=2.0, rescale=0.0),
    "sparse_cfg": FlowBPSparse(active_steps=3, bias=1.0, rescale=0.5),
    "bridge": FlowBPBridge(active_steps=5, bias=4.0, rescale=0.0, alpha=0.5),
    "bridge_rescale": FlowBPBridge(
        leaps=Given(2, 6), active_steps=4, bias=2.0, rescale=0.7, alpha=0.8
    ),
    "lagrange": FlowBPLagrange(leaps=UniformLeaps(), **LAGRANGE),
    "lagrange_dirichlet": FlowBPLagrange(
        leaps=DirichletLeaps(after=2.5, between=6.0, before=2.0, latest=3), **LAGRANGE
    ),
    "lagrange_tau": FlowBPLagrange(leaps=UniformLeaps(), **LAGRANGE | {"tau": 0.001}),
}
CASES["lagrange_all_rescale"] = FlowBPLagrange(
    leaps=Given(2, 4),
    **LAGRANGE
    | {"active_points": 3, "other_scale": 1.0, "rescale": 0.5, "alpha": 0.6, "tau": 0.05},
)


@dataclass
class Recorded:
    """The toy network, decoder and reward of a recording, and the replay of its rollout."""

    case: str

    def __post_init__(self):
        found = golden.load(NAME, f"{self.case}.")
        self.t, self.said = found, VALUES[self.case]
        self.parameters = [found[name].clone().requires_grad_() for name in "WuP"]
        scale, options = self.said["cfg_guidance"], self.said["options"]
        guided = scale > 1

        def network(x, sigma, cond):
            W, u, P = self.parameters
            mixed = torch.einsum("oc,nchw->nohw", W, x)
            return (
                torch.tanh(mixed) + (sigma * u)[None, :, None, None] + (cond @ P)[..., None, None]
            )

        def both(x, sigma):
            v, v_neg = (network(x, sigma, found[name]) for name in ("cond", "uncond"))
            return v_neg + scale * (v - v_neg)

        def plain(x, sigma):
            return network(x, sigma, found["cond"])

        detached = guided and options.get("cfg_detach_neg", False)
        v = both if guided else plain
        part = (lambda x, sigma: scale * plain(x, sigma)) if detached else v
        self.replay = FieldReplay(part, found["x_init"], found["sigmas"], v if detached else None)
        self.replay.renoise = [*found["eps"]]
        self.scale = scale if detached else 1.0

    def reward(self, x0):
        t = self.t
        z = x0 / 1.5305 + 0.0609
        image = torch.tanh(0.5 * torch.einsum("oc,nchw->nohw", t["vae_M"], z)) * 0.5 + 0.5
        feature = torch.nn.functional.normalize(image.flatten(1) @ t["rm_A"], dim=-1)
        text = t["rm_text"].repeat(len(x0) // len(t["rm_text"]), 1)
        return (feature * text).sum(-1)


def connected(recorded):
    generator = torch.Generator().manual_seed(recorded.said["generator_seed"])
    views = list(CASES[recorded.case](recorded.replay, generator))
    clean = torch.cat([view.clean for view in views])
    weight = views[0].weight
    return clean, torch.ones(len(clean)) if weight is None else weight


@pytest.mark.parametrize("case", CASES)
def test_surrogates_weights_and_gradients_are_those_of_the_recording(case):
    recorded = Recorded(case)
    t = recorded.t
    x0, weight = connected(recorded)
    x0.retain_grad()
    loss = (weight * torch.relu(0.55 - recorded.reward(x0))).mean()
    loss.backward()

    torch.testing.assert_close(x0.detach(), t[f"{case}.x0_surrogate"], atol=1e-5, rtol=0)
    torch.testing.assert_close(loss.detach(), t[f"{case}.loss"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x0.grad, t[f"{case}.grad_x0"], rtol=1e-4, atol=1e-7)
    if f"{case}.sample_weight" in t:
        torch.testing.assert_close(weight, t[f"{case}.sample_weight"], rtol=1e-4, atol=0)
    for name, parameter in zip("WuP", recorded.parameters, strict=True):
        torch.testing.assert_close(parameter.grad, t[f"{case}.grad_{name}"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", [case for case in CASES if "cfg" not in case])
def test_the_network_is_evaluated_where_the_recording_evaluates_it(case):
    recorded = Recorded(case)
    connected(recorded)
    wanted = recorded.said["calls_with_grad_timesteps"]
    recording = [recorded.t[f"{case}.call{i}.x"] for i in range(len(wanted))]
    assert len(recorded.replay.inputs) == len(wanted)
    for x in recorded.replay.inputs:
        assert min(float((x - y).abs().max()) for y in recording) < 1e-5


def test_quadrature_is_that_of_the_recording():
    t, seen = golden.load(NAME), 0
    for name in [name for name in t if name.startswith("quad") and name.endswith(".range")]:
        case = name.removesuffix(".range")
        start, stop = (int(i) for i in t[name])
        sigmas, support = t[f"{case}.sigmas"], t[f"{case}.support"].long()
        found = lagrange_weights(sigmas[support], sigmas[start], sigmas[stop])
        torch.testing.assert_close(found, t[f"{case}.weights"].float(), rtol=1e-5, atol=1e-7)
        seen += 1
    assert seen > 2
    for row in VALUES["tables"]["interval_supports"]:
        assert support_points(row["start"], row["target"], row["order"]) == row["supports"]
