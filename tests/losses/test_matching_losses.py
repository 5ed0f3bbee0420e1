"""Losses of matching errors against recorded values and gradients, and arithmetic by hand."""

from math import exp, log, nan

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.extra.regional_dpo import DenseDPO, FocusDPO, LocalDPO
from flowalign.functional.noise_matching import sample_error
from flowalign.losses import (
    DPO,
    IPO,
    KTO,
    RWR,
    SFT,
    AutoBeta,
    GradientBalance,
    Hinge,
    LinearDPO,
    MaPO,
    Safeguard,
    Sigmoid,
)
from flowalign.types import ALONE, Batch, LossContext
from tests.fixtures.golden import load

# Of two pairs: winners .30 and .62, losers .50 and .41; gaps -.09 and .05:
# margins 1.8 and -1 at beta 40.
POLICY, REFERENCE = [0.30, 0.62, 0.50, 0.41], [0.34, 0.60, 0.45, 0.44]


def residual(residuals, shape=(2, 3)):
    """Rows of uneven numbers with these mean squares."""
    residuals = tensor(residuals)
    raw = torch.randn(len(residuals), *shape, generator=torch.Generator().manual_seed(5))
    return raw * (residuals / sample_error(raw)).sqrt().reshape(-1, *[1] * len(shape))


def rows_of(policy, **known):
    """Of pairs, each weighing 1, unless said otherwise."""
    n = len(policy)
    default = {"weight": torch.ones(n), "desirable": torch.arange(n) < n // 2}
    return Batch({"policy": policy} | default | known)


def run(loss, policy=POLICY, reference=REFERENCE, context=ALONE, **known):
    """Loss, log, and gradient with respect to the policy's residual, from mean errors."""
    return run_residuals(loss, residual(policy), residual(reference), context, **known)


def run_residuals(loss, policy, reference, context=ALONE, **known):
    policy = policy.clone().requires_grad_()
    known |= {"reference": reference} if "reference" in loss.needs else {}
    value, stats = loss.loss(rows_of(policy, **known), context)
    return value.detach(), stats, torch.autograd.grad(value, policy)[0]


def softplus(x):
    return log(1 + exp(x))


# Recorded -----------------------------------------------------------------------------------------
#
# Inputs here are predictions. The recorded mean errors differ from ours, of the same predictions,
# by the last bit of float32, and so do those in double precision; beta multiplies that. From the
# recorded errors on, `test_preference_loss` asks for the recordings' own tolerances.


def rounding(beta):
    """Effect of the last bit of four errors near 1 on a margin, each times beta / 2."""
    return 4 * 6e-8 * beta / 2


RECORDED_DPO = [
    ("F_diffusion_dpo", "noise", "beta500", 500.0),
    ("F_diffusion_dpo", "noise", "beta5000", 5000.0),
    ("F_flow_dpo", "target", "beta100", 100.0),
    ("F_flow_dpo", "target", "beta2000", 2000.0),
    ("F_linear_dpo", "target", "dpo_b5000", 5000.0),
    ("F_sdpo", "noise", "dpo_plain", 5000.0),
]


def assert_recorded(loss, beta, item, target, case):
    """Value and gradient are the recorded ones; returns the log and the recording."""
    recorded = load(item)
    policy, reference = (recorded[k] - recorded[target] for k in ("pred", "pred_ref"))
    value, stats, grad = run_residuals(loss, policy, reference)
    assert_close(value, recorded[f"{case}.loss"], rtol=1e-5, atol=rounding(beta))
    assert_close(grad, recorded[f"{case}.grad_pred"], rtol=2e-4 + rounding(beta), atol=1e-8)
    return stats, recorded


@pytest.mark.parametrize(("item", "target", "case", "beta"), RECORDED_DPO)
def test_dpo_is_the_recorded_one(item, target, case, beta):
    stats, recorded = assert_recorded(DPO(beta=beta), beta, item, target, case)
    if f"{case}.inside" in recorded:
        inside = recorded[f"{case}.inside"].mean()
        assert_close(stats["margin"], inside, rtol=2e-4, atol=rounding(beta))
    if f"{case}.implicit_acc" in recorded:
        assert_close(stats["implicit_accuracy"], recorded[f"{case}.implicit_acc"])


@pytest.mark.parametrize(
    ("case", "beta", "floor"),
    [
        ("linear_b100", 100.0, 1e-3),
        ("linear_b500_eta0", 500.0, 0.0),
        ("linear_b5000_eta05", 5000.0, 0.05),
    ],
)
def test_linear_dpo_is_the_recorded_one(case, beta, floor):
    stats, recorded = assert_recorded(
        LinearDPO(beta=beta, floor=floor), beta, "F_linear_dpo", "target", case
    )
    assert_close(stats["linear_weight"], recorded[f"{case}.weight"].mean(), rtol=2e-4, atol=0)


@pytest.mark.parametrize(("case", "mu"), [("dpo_mu0.9", 0.9), ("dpo_mu0.6", 0.6)])
def test_the_safeguard_is_the_recorded_one_with_one_scale_per_batch(case, mu):
    loss = Safeguard(inner=DPO(beta=5000.0), mu=mu, per="batch")
    stats, recorded = assert_recorded(loss, 5000.0, "F_sdpo", "noise", case)
    assert_close(stats["loser_scale"], recorded[f"{case}.lambda"], rtol=1e-4, atol=0)


RECORDED_KTO = {
    "sigmoid": KTO(beta=1000.0),
    "sigmoid_w": KTO(beta=300.0, desirable_weight=1.33, undesirable_weight=0.7),
    "loss_averse": KTO(beta=1000.0, utility="loss_averse"),
    "risk_seeking_3": KTO(beta=1000.0, utility="risk_seeking"),
}


@pytest.mark.parametrize("case", RECORDED_KTO)
def test_kto_is_the_recorded_one(case):
    """The recording has errors of the reference, no predictions: any residual of that size."""
    recorded = load("F_kto")
    policy = recorded["pred"] - recorded["noise"]
    reference = recorded["ref_losses"].sqrt().reshape(-1, 1, 1, 1).expand_as(policy)
    loss = RECORDED_KTO[case]
    value, stats, grad = run_residuals(loss, policy, reference, desirable=recorded["labels"] == 1)
    assert_close(value, recorded[f"{case}.loss"], rtol=1e-5, atol=rounding(loss.beta))
    tolerance = 2e-4 + rounding(loss.beta)
    assert_close(grad, recorded[f"{case}.grad_pred"], rtol=tolerance, atol=1e-8)
    assert_close(stats["baseline"], recorded[f"{case}.kl"])


@pytest.mark.parametrize("scale", [50, 1000])
@pytest.mark.parametrize("case", ["close", "wide", "misranked"])
def test_mapo_is_the_recorded_one(case, scale):
    recorded = load("F_mapo")
    policy = recorded[f"{case}.pred"] - recorded["target"]
    value, _, grad = run_residuals(MaPO(scale=float(scale)), policy, policy)
    assert_close(value, recorded[f"{case}.T{scale}.loss"], rtol=1e-5, atol=0)
    # The scale multiplies likelihoods near 1 as beta / 2 does errors.
    tolerance = 1e-4 + rounding(2 * scale)
    assert_close(grad, recorded[f"{case}.T{scale}.grad_pred"], rtol=tolerance, atol=1e-9)


# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "each"),
    [
        (Sigmoid(), [softplus(-1.8), softplus(1.0)]),
        (Sigmoid(smoothing=0.1), [softplus(-1.8) + 0.1 * 1.8, softplus(1.0) - 0.1 * 1.0]),
        (Hinge(), [0.0, 2.0]),
        (IPO(), [1.3**2, 1.5**2]),
    ],
)
def test_dpo_by_hand_with_every_link(link, each):
    """Smoothing by s adds s z, as softplus(z) - softplus(-z) = z."""
    assert_close(run(DPO(beta=40.0, link=link))[0], tensor(each).mean())


def test_the_weight_of_a_pair_multiplies_its_loss():
    value, _, _ = run(DPO(beta=40.0), weight=tensor([2.0, 0.3, 2.0, 0.3]))
    assert_close(value, tensor((2 * softplus(-1.8) + 0.3 * softplus(1.0)) / 2))


def test_what_is_logged_of_pairs_by_hand():
    _, stats, _ = run(DPO(beta=40.0))
    wanted = {
        "implicit_accuracy": 0.5,
        "margin": 0.4,
        "margin_abs": 0.07,
        "error_chosen": 0.46,
        "error_rejected": 0.455,
        "drift_chosen": -0.01,
        "drift_rejected": 0.01,
        "reward_chosen": 0.2,
        "reward_rejected": -0.2,
        "beta": 40.0,
        "policy_loss": (softplus(-1.8) + softplus(1.0)) / 2,
    }
    assert {k: v.item() for k, v in stats.items()} == pytest.approx(wanted, abs=1e-5)


def test_an_automatic_beta_follows_the_typical_margin_between_its_bounds():
    auto = AutoBeta(target=0.2, low=50.0, high=500.0)
    for typical, beta in ((0.0, 500.0), (0.001, 500.0), (0.01, 277.2589), (0.5, 50.0)):
        _, stats, _ = run(DPO(beta=auto), context=LossContext(typical))
        assert stats["beta"].item() == pytest.approx(beta)
        assert stats["margin"].item() == pytest.approx(beta * 0.01, rel=1e-3)


SCORES = {"text": tensor([0.9, 0.2, 0.3, 0.6]), "motion": tensor([1.0, 4.0, 3.0, 2.0])}


def test_modpo_by_hand():
    """Leads .6 and -.4 in text, -2 and 2 in motion: margins 1.5 * .6 - .2 and -.6 + .2."""
    loss = DPO(beta=40.0, margin={"text": 1.5, "motion": 0.1}, margin_weight=0.5)
    value, stats, _ = run(loss, scores=SCORES)
    z = [(1.8 - 0.7) / 0.5, (-1.0 + 0.4) / 0.5]
    assert_close(value, tensor([softplus(-v) for v in z]).mean())
    assert stats["margin_unknown"].item() == 0
    assert stats["margin"].item() == pytest.approx(0.4, abs=1e-5)


def test_a_pair_without_a_score_weighs_nothing_and_is_counted():
    unknown = {"text": tensor([0.9, 0.2, 0.3, nan])}
    value, stats, grad = run(DPO(beta=40.0, margin={"text": 1.5}), scores=unknown)
    assert_close(value, tensor(softplus(-(1.8 - 0.9)) / 2))
    assert stats["margin_unknown"].item() == 0.5
    assert grad[[0, 2]].abs().amin() > 0
    assert grad[[1, 3]].abs().amax() == 0


def test_linear_dpo_by_hand():
    value, stats, _ = run(LinearDPO(beta=10.0, floor=0.0))
    assert_close(value, tensor((0.32 * -0.2 + 0.6 * 0.21) / 2))
    assert stats["linear_weight"].item() == pytest.approx(0.46, abs=1e-5)


def test_dense_dpo_by_hand():
    """Errors of frames; in pair 1 the rejected video is better in frame 2, pair 2 is all ties."""
    policy = torch.zeros(4, 1, 3, 1, 2)
    for row, frames in enumerate(
        [[0.3, 0.5, 0.2], [0.6, 0.1, 0.4], [0.2, 0.4, 0.7], [0.9, 0.8, 0.5]]
    ):
        policy[row, 0, :, 0, 0] = tensor(frames).mul(2).sqrt()  # the other pixel is right
    reference = policy * tensor([1.0, 0.9, 1.1, 1.2]).reshape(-1, 1, 1, 1, 1)
    labels = tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    value, stats, grad = run_residuals(
        DenseDPO(beta=40.0), policy, reference, segments=torch.cat([labels, -labels])
    )
    # Gaps of pair 1: 0 - .2 (1 - 1.21) = .042 and 0 - .4 (1 - 1.21) = .084.
    z = -20 * (0.042 - 0.084) / 2
    assert_close(value, tensor(softplus(-z) / 2))
    assert stats["margin"].item() == pytest.approx(z, rel=1e-4)
    assert stats["implicit_accuracy"].item() == 1
    assert stats["undecided"].item() == 0.5
    assert grad[[1, 3]].abs().amax() == 0
    assert grad[0, 0, :, 0, 0].sign().tolist() == [1, -1, 0]
    assert grad[2, 0, :, 0, 0].sign().tolist() == [-1, 1, 0]


def test_dense_dpo_is_dpo_where_one_video_is_better_throughout():
    policy, reference = residual(POLICY, (2, 3, 4, 5)), residual(REFERENCE, (2, 3, 4, 5))
    dense = run_residuals(DenseDPO(beta=40.0), policy, reference, segments=torch.ones(4, 3))
    plain = run_residuals(DPO(beta=40.0), policy, reference)
    assert_close(dense[0], plain[0])
    assert_close(dense[2], plain[2])
    assert_close(dense[1]["margin"], plain[1]["margin"])


def test_dense_dpo_with_nothing_but_ties_is_zero():
    policy, reference = residual(POLICY, (2, 3, 4, 5)), residual(REFERENCE, (2, 3, 4, 5))
    value, stats, grad = run_residuals(DenseDPO(), policy, reference, segments=torch.zeros(4, 3))
    assert (value.item(), grad.abs().max().item()) == (0, 0)
    assert all(v.isfinite() for v in stats.values())


def test_local_dpo_by_hand():
    """One channel of two is masked, at weights of 1 and 3; errors there .2, .5 and .4, .3."""
    policy = tensor([[[0.1], [0.2]], [[0.6], [0.5]], [[0.7], [0.4]], [[0.2], [0.3]]]).sqrt()
    reference = tensor([[[0.3], [0.4]], [[0.5], [0.4]], [[0.6], [0.2]], [[0.3], [0.6]]]).sqrt()
    mask = tensor([[[0.0], [1.0]], [[0.0], [3.0]]]).repeat(2, 1, 1)
    value, stats, _ = run_residuals(
        LocalDPO(beta=4.0, sft=0.5), policy, reference, region=mask, region_strength=torch.ones(4)
    )
    # Everywhere: gaps -.2 - .15 and .1 + .2; in the mask -.2 - .2 and .1 + .3.
    first = softplus(-0.7) + softplus(-0.8) + 0.5 * (0.15 + 0.2)
    second = softplus(0.6) + softplus(0.8) + 0.5 * (0.55 + 0.5)
    assert_close(value, tensor((first + second) / 2))
    assert stats["margin"].item() == pytest.approx(0.05, abs=1e-6)
    assert stats["masked_margin"].item() == pytest.approx(0.0, abs=1e-6)
    assert stats["masked_accuracy"].item() == 0.5
    strength = tensor([1.0, 1.5, 1.0, 1.5])
    value, *_ = run_residuals(
        LocalDPO(beta=4.0, sft=0.5), policy, reference, region=mask, region_strength=strength
    )
    # The second pair's errors in the mask count one and a half times.
    second = softplus(0.6) + softplus(1.2) + 0.5 * (0.55 + 1.5 * 0.5)
    assert_close(value, tensor((first + second) / 2))


def test_mapo_by_hand():
    likelihood = [0.5 * e / (exp(0.5 * e) - 1) for e in POLICY]
    z = [30 * (likelihood[0] - likelihood[2]), 30 * (likelihood[1] - likelihood[3])]
    value, stats, _ = run(MaPO(beta=0.2, scale=30.0))
    assert_close(value, tensor([0.3 + 0.2 * softplus(-z[0]), 0.62 + 0.2 * softplus(-z[1])]).mean())
    assert stats["ranking_accuracy"].item() == 0.5
    pull = sum(1 / (1 + exp(v)) for v in z) / 2
    assert stats["margin_pull"].item() == pytest.approx(pull, rel=1e-4)


def test_kto_by_hand():
    """Gains .04, -.02, -.05, .03 and two more of another process, .3 and -.18: baseline .02."""
    loss = KTO(beta=20.0, desirable_weight=2.0, undesirable_weight=0.5)
    value, stats, _ = run(
        loss,
        desirable=tensor([True, False, True, False]),
        weight=tensor([1.0, 3.0, 1.0, 1.0]),
        context=LossContext(gather=lambda gain: torch.cat([gain, tensor([0.3, -0.18])])),
    )
    x = [0.4, 0.8, -1.4, -0.2]  # 20 (gain - .02), turned around for what was not liked
    weight = [2.0, 1.5, 2.0, 0.5]
    each = [w * (1 - 1 / (1 + exp(-v))) for w, v in zip(weight, x, strict=True)]
    assert_close(value, tensor(each).mean(), rtol=1e-5, atol=1e-6)
    assert stats["baseline"].item() == pytest.approx(0.02, abs=1e-6)
    assert stats["implicit_accuracy"].item() == 0.5
    assert stats["margin_abs"].item() == pytest.approx(0.035, abs=1e-6)
    assert stats["drift"].item() == pytest.approx(0.0, abs=1e-6)


def test_the_baseline_of_kto_passes_no_gradient():
    """With a gradient, rows would affect each other; here each has the slope of its own loss."""
    policy, reference = [0.30, 0.50, 0.41], [0.40, 0.52, 0.47]  # mean gain .06
    _, stats, grad = run(KTO(beta=20.0), policy, reference, desirable=tensor([True, True, False]))
    assert stats["baseline"].item() == pytest.approx(0.06, abs=1e-6)
    # d loss / d error = beta y s(x) s(-x) / n, d error / d residual = 2 residual / 6.
    x = tensor([0.8, -0.8, 0.0])
    slope = 20 * tensor([1.0, 1.0, -1.0]) * x.sigmoid() * (-x).sigmoid() / 3
    assert_close(grad, slope.reshape(-1, 1, 1) * residual(policy) / 3, rtol=1e-4, atol=1e-6)


def test_rwr_by_hand_with_what_is_capped_and_what_is_unknown():
    """Rewards 2 text + motion of .5, 400, unknown, -.3 at temperature .5."""
    scores = {"text": tensor([0.1, 200.0, nan, 0.1]), "motion": tensor([0.3, 0.0, 1.0, -0.5])}
    loss = RWR(rewards={"text": 2.0, "motion": 1.0}, temperature=0.5, cap=20.0)
    value, stats, grad = run(loss, scores=scores, weight=tensor([1.0, 0.5, 1.0, 2.0]))
    each = [exp(1.0) * 0.3, 0.5 * 20 * 0.62, 0.0, 2 * exp(-0.6) * 0.41]
    assert_close(value, tensor(each).mean())
    assert stats["reward_unknown"].item() == 0.25
    assert stats["reward_capped"].item() == 0.25
    assert grad[2].abs().max() == 0


def test_sft_by_hand():
    labels = {"desirable": tensor([True, False, False, True])}
    weight = tensor([2.0, 1.0, 1.0, 0.5])
    assert_close(run(SFT(), weight=weight, **labels)[0], tensor((2 * 0.3 + 0.5 * 0.41) / 4))
    everything = (2 * 0.3 + 0.62 + 0.5 + 0.5 * 0.41) / 4
    assert_close(run(SFT(on="all"), weight=weight, **labels)[0], tensor(everything))
    assert run(SFT(), desirable=torch.zeros(4, dtype=torch.bool))[0].item() == 0


# The safeguard ------------------------------------------------------------------------------------


def opposed(seed=3):
    """Residuals of similar pairs of uneven sizes, so that losers drag winners along."""
    generator = torch.Generator().manual_seed(seed)
    winner = torch.randn(3, 2, 3, 4, generator=generator)
    near = winner * tensor([1.5, 0.7, -1.2]).reshape(-1, 1, 1, 1)
    loser = near + 0.2 * torch.randn(3, 2, 3, 4, generator=generator)
    policy = torch.cat([winner, loser])
    return policy, policy + 0.1 * torch.randn(6, 2, 3, 4, generator=generator)


@pytest.mark.parametrize("inner", [DPO(beta=5.0), LinearDPO(beta=5.0)])
def test_a_guarded_step_leaves_the_winner_mu_of_its_descent(inner):
    """In the space of network outputs; the step of a pair is minus the sum of both gradients."""
    policy, reference = opposed()
    for mu in (0.0, 0.3, 0.9):
        _, _, grad = run_residuals(Safeguard(inner=inner, mu=mu), policy, reference)
        winner, loser = grad.chunk(2)
        own = winner.square().sum((1, 2, 3))
        assert (-((winner + loser) * winner).sum((1, 2, 3)) <= -mu * own + 1e-6 * own).all()
    plain = run_residuals(inner, policy, reference)[2]
    winner, loser = plain.chunk(2)
    assert (((winner + loser) * winner).sum((1, 2, 3)) < 0).any(), "nothing to guard"


SEGMENTS = tensor([[1.0, -1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
SEGMENTS = torch.cat([SEGMENTS, -SEGMENTS])


@pytest.mark.parametrize(
    "inner",
    [
        DPO(beta=5.0),
        DPO(beta=5.0, link=IPO()),
        LinearDPO(beta=5.0),
        MaPO(scale=20.0),
        DenseDPO(beta=5.0),
        LocalDPO(beta=5.0),
    ],
)
def test_the_safeguard_scales_the_losers_gradient_and_nothing_else(inner):
    """Value, winners and log are the guarded loss's own, also under masks and segments."""
    policy, reference = (r[..., None] for r in opposed())
    mask = torch.rand(3, *policy.shape[1:], generator=torch.Generator().manual_seed(1))
    known = {
        "segments": SEGMENTS,
        "region": torch.cat([mask, mask]),
        "region_strength": torch.ones(6),
    }
    plain, own, free = run_residuals(inner, policy, reference, **known)
    value, stats, grad = run_residuals(Safeguard(inner=inner, mu=0.4), policy, reference, **known)
    assert torch.equal(value, plain)
    assert {k: v for k, v in stats.items() if k != "loser_scale"} == own
    assert torch.equal(grad[:3], free[:3])
    a, b = policy.flatten(1).chunk(2)
    scale = 0.6 * a.square().sum(1) / (a * b).sum(1)
    scale = scale.where((a * b).sum(1) > 0, torch.ones(3)).clamp(max=1)
    assert_close(grad[3:], scale.reshape(-1, 1, 1, 1, 1) * free[3:])
    assert_close(stats["loser_scale"], scale.mean())
    assert 0 < scale.min() < 0.7
    assert scale.max() == 1


@pytest.mark.parametrize("inner", [DPO(beta=2.0), MaPO(scale=3.0)])
def test_balance_lets_the_push_of_the_loser_be_no_longer_than_the_pull(inner):
    policy, reference = opposed()
    plain, own, free = run_residuals(inner, policy, reference)
    value, stats, grad = run_residuals(GradientBalance(inner=inner), policy, reference)
    assert torch.equal(value, plain)
    assert {k: v for k, v in stats.items() if k != "loser_scale"} == own
    assert torch.equal(grad[:3], free[:3])
    a, b = (side.flatten(1).norm(dim=1) for side in policy.chunk(2))
    scale = (a / b).clamp(max=1)
    assert_close(grad[3:], scale.reshape(-1, *[1] * (grad.ndim - 1)) * free[3:])
    assert 0 < scale.min() < 1
    assert_close(stats["loser_scale"], scale.mean())


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(margin_weight=0.5), "margin is empty"),
        (lambda: AutoBeta(target=0.5), "target 0.5"),
        (lambda: AutoBeta(low=3.0, high=2.0), "low 3.0, high 2.0"),
        (lambda: Safeguard(inner=DPO(), mu=1.1), "mu is 1.1"),
        (lambda: Safeguard(inner=KTO()), "inner is KTO"),
        (lambda: GradientBalance(inner=KTO()), "inner is KTO"),
        (lambda: RWR(rewards={}), "rewards is empty"),
        (lambda: FocusDPO(window=4), "window is 4"),
        (lambda: RWR(rewards={"text": 1.0}, temperature=0.0), "temperature is 0.0"),
        (lambda: run(DenseDPO(), segments=torch.ones(4, 5)), "label 5 frames, the latents have 1"),
        (lambda: run(DPO(margin={"sound": 1.0}), scores=SCORES), r"no scores \['sound'\]"),
        (lambda: run(RWR(rewards={"sound": 1.0}), scores=SCORES), r"no scores \['sound'\]"),
    ],
)
def test_settings_and_data_that_do_not_fit_are_refused_with_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# FocusDPO -----------------------------------------------------------------------------------------


def focused(loss, sigma, mask):
    """Two pairs of latents of two channels and three places, with residuals without symmetry."""
    generator = torch.Generator().manual_seed(7)
    policy, reference = torch.randn(2, 4, 2, 1, 3, generator=generator)
    rows = rows_of(policy.requires_grad_(), reference=reference, sigma=sigma, region=mask)
    value, _ = loss.loss(rows)
    return value, policy, reference, torch.autograd.grad(value, policy)[0]


MASK = tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [0.2, 0.0, 0.0], [0.0, 0.0, 1.0]]).view(4, 1, 1, 3)


def test_focus_by_hand_near_the_data():
    """At sigma 0 the weights are floor + (1 - floor) mask, divided by their sum in each row."""
    value, policy, reference, _ = focused(FocusDPO(beta=3.0, floor=0.4), torch.zeros(4), MASK)
    weights = 0.4 + 0.6 * MASK
    weights = weights / (2 * weights.sum((1, 2, 3), keepdim=True))
    gaps = (weights * (policy.square() - reference.square())).sum((1, 2, 3))
    margin = -1.5 * (gaps[:2] - gaps[2:])
    assert_close(value, torch.nn.functional.softplus(-margin).mean())


def test_focus_widens_with_noise_and_a_floor_of_one_is_plain_dpo():
    near = focused(FocusDPO(beta=3.0, window=3), torch.zeros(4), MASK)[3].abs()
    far = focused(FocusDPO(beta=3.0, window=3), torch.ones(4), MASK)[3].abs()
    ratio = (far / near)[:, 0, 0]  # of the weights, but for one factor of each row
    assert ratio[1, 0] / ratio[1, 1] > 1.5  # the subject is in the middle: its neighbours gain
    value, policy, reference, _ = focused(FocusDPO(beta=3.0, floor=1.0), torch.ones(4), MASK)
    plain, _ = DPO(beta=3.0).loss(rows_of(policy, reference=reference))
    assert_close(value, plain)


def test_a_loss_without_a_column_that_it_needs_names_it():
    for loss, column in ((DenseDPO(), "segments"), (LocalDPO(), "region")):
        with pytest.raises(KeyError, match=f"the batch has no column '{column}', only policy, "):
            run(loss)
