"""Gradient paths compared with finite differences, the whole sampler, and each other."""

import json
from dataclasses import dataclass

import pytest
import torch

from flowalign.extra import DirichletLeaps, FlowBPBridge, FlowBPLagrange
from flowalign.extra.flowbp import divide_steps, lagrange_weights, support_points
from flowalign.gradient_paths import (
    VADER,
    AlignProp,
    DirectAlign,
    DRaFT,
    DRaFTLV,
    DRTune,
    FlowBPSparse,
    LeapAlign,
    Leaps,
    ReFL,
    UniformLeaps,
)
from flowalign.gradient_paths.steps import draw_late_biased
from tests.fixtures import golden
from tests.fixtures.replays import FieldReplay, bent

T = 6
DRAW = torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64)
"""Weights of the channels in the reward, so that none counts like another."""
REACHING = {
    "DRaFT-1": DRaFT(),
    "DRaFT-4": DRaFT(last_steps=4),
    "AlignProp": AlignProp(truncation="uniform"),
    "VADER": VADER(step="random"),
    "LeapAlign": LeapAlign(),
    "sparse": FlowBPSparse(),
    "bridge": FlowBPBridge(),
    "lagrange": FlowBPLagrange(),
}
"""Gradient paths with a reward that sees the sample itself."""
ALL = REACHING | {
    "ReFL": ReFL(last_steps=3),
    "DRaFT-LV": DRaFTLV(),
    "DRTune": DRTune(),
    "Direct-Align": DirectAlign(directions="both"),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def schedule(num_steps):
    """Unequal steps, so that no two have the same weight."""
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return 3 * t / (1 + 2 * t)


def weights():
    return torch.randn(3, 3, generator=seeded(1), dtype=torch.float64)


def replay_of(parameter, num_steps=T, field=bent):
    start = torch.randn(2, 3, generator=seeded(2), dtype=torch.float64)
    replay = FieldReplay(field(parameter), start, schedule(num_steps))
    replay.renoise = [torch.randn(2, 3, generator=seeded(3 + i)).double() for i in range(3)]
    return replay


def reward(x):
    return (torch.sin(x) * DRAW).sum()


def gradient(gradient_path, num_steps=T, field=bent, seed=0, value=reward):
    parameter = weights().requires_grad_()
    replay = replay_of(parameter, num_steps, field)
    views = list(gradient_path(replay, seeded(seed)))
    total = sum(
        value(view.clean) * (1 if view.weight is None else view.weight.mean()) for view in views
    )
    return torch.autograd.grad(total / len(views), parameter)[0]


def whole_sampler(parameter, num_steps=T, field=bent):
    """The sample with the gradient of every step, written without a replay."""
    x, sigmas = replay_of(parameter, num_steps, field).states[0], schedule(num_steps)
    for k in range(num_steps):
        x = x + (sigmas[k + 1] - sigmas[k]) * field(parameter)(x, sigmas[k])
    return x


def full_gradient(num_steps=T, field=bent, value=reward):
    parameter = weights().requires_grad_()
    return torch.autograd.grad(value(whole_sampler(parameter, num_steps, field)), parameter)[0]


def by_differences(function, at, h=1e-6):
    found = torch.zeros_like(at)
    for i in range(at.numel()):
        step = torch.zeros_like(at).flatten()
        step[i] = h
        step = step.view_as(at)
        found.view(-1)[i] = (function(at + step) - function(at - step)) / (2 * h)
    return found


def stateless(parameter):
    """A field that does not look at the state: no step's gradient flows through another."""
    return lambda x, sigma: torch.tanh(parameter.sum(0) * sigma).expand_as(x)


def test_draft_through_all_steps_is_the_derivative_of_the_sampler():
    found = gradient(DRaFT(last_steps=T))
    numeric = by_differences(lambda w: reward(whole_sampler(w)), weights())
    torch.testing.assert_close(found, numeric, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found, full_gradient(), rtol=1e-12, atol=1e-14)


def test_refl_is_the_derivative_of_one_prediction():
    gradient_path, seed = ReFL(last_steps=3), 4
    k = T - int(torch.randint(1, 4, (1,), generator=seeded(seed)))
    state, sigma = replay_of(weights()).states[k], schedule(T)[k]
    numeric = by_differences(lambda w: reward(state - sigma * bent(w)(state, sigma)), weights())
    torch.testing.assert_close(gradient(gradient_path, seed=seed), numeric, rtol=1e-6, atol=1e-8)


def test_direct_align_is_the_derivative_of_what_one_step_recovers():
    gradient_path, replay = DirectAlign(), replay_of(weights())
    middle = int(torch.randint(5, 996, (1,), generator=seeded()))
    sigma, target = gradient_path.grid(replay)[list(gradient_path.denoising(middle))].double()
    x0, z = replay.states[-1], replay.states[0]
    x = (1 - sigma) * x0 + sigma * z

    def recovered(w):
        return reward((x + (target - sigma) * bent(w)(x, sigma) - target * z) / (1 - target))

    torch.testing.assert_close(
        gradient(gradient_path), by_differences(recovered, weights()), rtol=1e-6, atol=1e-8
    )


def test_align_prop_is_draft_of_a_random_length():
    for seed in range(5):
        start = int(torch.randint(0, T, (1,), generator=seeded(seed)))
        found = gradient(AlignProp(truncation="uniform"), seed=seed)
        assert torch.equal(found, gradient(DRaFT(last_steps=T - start)))
    always_first = AlignProp(mean=0.0, std=1e-9)
    torch.testing.assert_close(gradient(always_first), full_gradient(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "gradient_path",
    [
        FlowBPSparse(active_steps=T, rescale=0.5),
        FlowBPBridge(active_steps=T, alpha=0.6),
        DRTune(train_steps=T, early_stop=0.0),
        DRaFT(last_steps=T),
    ],
)
def test_all_steps_active_are_the_whole_sampler_where_states_do_not_matter(gradient_path):
    found, wanted = gradient(gradient_path, field=stateless), full_gradient(field=stateless)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_without_nested_gradients_sparse_bridge_drtune_and_single_steps_agree():
    sparse = gradient(FlowBPSparse(active_steps=T, rescale=0.0))
    bridge = gradient(FlowBPBridge(active_steps=T, alpha=0.0))
    drtune = gradient(DRTune(train_steps=T, early_stop=0.0))
    single = sum(gradient(VADER(step=k)) for k in range(T))
    for other in (bridge, drtune, single):
        torch.testing.assert_close(sparse, other, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(sparse, full_gradient(), rtol=1e-2)


@pytest.mark.parametrize("kind", [LeapAlign, FlowBPLagrange])
def test_leaps_of_single_steps_are_the_whole_sampler_over_twice_tau(kind):
    found = gradient(kind(leaps=UniformLeaps(), alpha=1.0, tau=0.4), num_steps=2)
    torch.testing.assert_close(found, full_gradient(2) / 0.8, rtol=1e-10, atol=1e-12)


def test_alpha_scales_the_part_of_the_gradient_through_the_input_at_j():
    """Linear in alpha, for LeapAlign, the bridge and the quadrature."""
    for make in (
        lambda a: LeapAlign(alpha=a),
        lambda a: FlowBPBridge(alpha=a),
        lambda a: FlowBPLagrange(alpha=a),
    ):
        none, some, whole = (gradient(make(a)) for a in (0.0, 0.25, 1.0))
        torch.testing.assert_close(some, none + 0.25 * (whole - none), rtol=1e-9, atol=1e-12)
        assert not torch.allclose(none, whole, rtol=1e-3)


def test_rescaling_makes_up_for_inactive_steps():
    """At strength 1 the weights of the steps that are reached add up to those of all."""
    seed, deltas = 5, schedule(T).diff().abs()
    active = draw_late_biased(T, 2, 1.0, seeded(seed))
    plain = gradient(FlowBPSparse(active_steps=2, rescale=0.0), seed=seed)
    whole = gradient(FlowBPSparse(active_steps=2, rescale=1.0), seed=seed)
    factor = deltas.sum() / deltas[active].sum()
    torch.testing.assert_close(whole, factor * plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", REACHING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reward_sees_the_sample_itself_to_the_bit(name, dtype):
    parameter = weights().to(dtype).requires_grad_()
    start = (40 * torch.randn(2, 3, generator=seeded(2))).to(dtype)
    replay = FieldReplay(bent(parameter), start, schedule(T).to(dtype))
    (view,) = REACHING[name](replay, seeded())
    assert torch.equal(view.clean, replay.states[-1])
    assert view.clean.requires_grad


def test_draft_lv_scores_the_sample_and_copies_noised_at_the_last_level():
    replay = replay_of(weights().requires_grad_())
    first, *copies = DRaFTLV(noised_copies=2)(replay, seeded())
    torch.testing.assert_close(first.clean, replay.states[-1], rtol=1e-12, atol=1e-12)
    sigma = schedule(T)[T - 1]
    for i, (view, x) in enumerate(zip(copies, replay.inputs[1:], strict=True)):
        wanted = (1 - sigma) * replay.states[-1] + sigma * replay.renoise[i]
        torch.testing.assert_close(x, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(view.clean, x - sigma * replay.outputs[1 + i])


def test_direct_align_recovers_the_sample_by_the_ideal_velocity():
    """That of the known noise; and an error e of the velocity moves it by e times the gain."""
    replay = replay_of(weights())
    x0, z = replay.states[-1], replay.states[0]
    for error in (0.0, 0.3):
        replay.v = lambda x, sigma, e=error: z - x0 + e
        denoised, inverted = DirectAlign(directions="both")(replay, seeded(3))
        assert (denoised.inverted, inverted.inverted) == (False, True)
        grid = DirectAlign().grid(replay).double()
        middle = int(torch.randint(5, 996, (1,), generator=seeded(3)))
        for view, steps in (
            (denoised, DirectAlign().denoising(middle)),
            (inverted, DirectAlign().inverting(middle)),
        ):
            sigma, target = grid[list(steps)]
            gain = (target - sigma) / (1 - target)
            torch.testing.assert_close(view.clean, x0 + gain * error, rtol=1e-6, atol=1e-6)


def test_both_directions_meet_at_one_noise_level_even_near_the_end():
    for middle in (5, 7, 100, 101, 500, 995):
        gradient_path = DirectAlign(directions="both")
        start, clean = gradient_path.denoising(middle)
        beyond, back = gradient_path.inverting(middle)
        assert start < clean == back < beyond <= gradient_path.num_points - 1


def test_leaps_are_ordered_and_inside_the_rollout():
    for num_steps in (3, 4, 25):
        for seed in range(200):
            for leaps in (UniformLeaps(), DirichletLeaps(), DirichletLeaps(latest=1)):
                k, j = leaps.draw(num_steps, seeded(seed))
                assert 0 <= k < j < num_steps
                if leaps == DirichletLeaps():
                    assert num_steps - j <= 10


def test_steps_are_drawn_late_as_often_as_recorded():
    """Rates of 20,000 draws of FlowBP's code, assets/golden/G_direct_reward.json."""
    recorded = torch.tensor(
        [0.0092, 0.0389, 0.0849, 0.1487, 0.2265, 0.3183, 0.4115, 0.4981, 0.5913, 0.6725]
    )
    generator, counts = seeded(), torch.zeros(10)
    for _ in range(4000):
        counts[draw_late_biased(10, 3, 2.0, generator)] += 1
    assert (counts / 4000 - recorded).abs().max() < 0.035


def test_a_bridge_divides_its_steps_like_the_rollout():
    assert [divide_steps(5, before, 25 - before) for before in (1, 5, 12, 20, 24)] == [
        1,
        1,
        2,
        4,
        4,
    ]
    assert [divide_steps(25, before, 25 - before) for before in (1, 24)] == [1, 24]


@pytest.mark.parametrize(
    ("gradient_path", "num_steps", "said"),
    [
        (ReFL(last_steps=11), 8, "ReFL.last_steps 11 asks for 11 steps, but rollouts have 8"),
        (DRaFT(last_steps=7), 6, "DRaFT.last_steps 7 asks for 7 steps"),
        (DRTune(train_steps=9), 8, "DRTune.train_steps 9"),
        (FlowBPSparse(active_steps=9), 8, "FlowBPSparse.active_steps 9"),
        (FlowBPBridge(active_steps=9), 8, "FlowBPBridge.active_steps 9"),
        (FlowBPLagrange(), 2, "FlowBPLagrange.leaps DirichletLeaps asks for 3 steps"),
        (LeapAlign(), 1, "LeapAlign.leaps UniformLeaps asks for 2 steps"),
        (VADER(step=8), 8, "VADER.step is 8, but rollouts have 8 steps: give at most 7"),
    ],
)
def test_more_steps_than_there_are_is_refused(gradient_path, num_steps, said):
    with pytest.raises(ValueError, match=r"at most|recipe\.start\.num_steps") as caught:
        list(gradient_path(replay_of(weights(), num_steps), seeded()))
    assert said in str(caught.value)


@pytest.mark.parametrize("window", [(25, 5), (5, 51)])
def test_a_window_outside_the_schedule_is_refused(window):
    with pytest.raises(ValueError, match=r"DirectAlign.window is \[\d+, \d+\]"):
        DirectAlign(window=window)


# Gradient paths against numbers recorded from FlowBP's code, see assets/golden/README.md ----------


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
