"""Old policies, anchors and guided references: their schedules, and how the loop evaluates them."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from flowalign.losses import AWM, CRD, DGPO, NFT, LinearDPO
from flowalign.training import checkpoint
from flowalign.training.matching import Uniform, residuals
from flowalign.training.matching.matching_loop import micro_batch_loss
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.reference_models import (
    Average,
    EMAReference,
    FrozenBase,
    GuidedReference,
)
from flowalign.training.reference import EMA, Guided, Ramp, conditional, unguided
from flowalign.types import Batch, plain_requests
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.embedded import move, new_sd3
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import pairs, recipe, train
from tests.fixtures.training import flat, new_learner

GOLDEN = Path(__file__).parents[3] / "assets" / "golden"


def scored(seed=0) -> Batch:
    """Twelve samples of three groups; better ones are redder."""
    rows = pairs(6, seed=seed).without("pair")
    red = rows["latents"][:, 0]
    return rows.with_columns(advantage=1.5 * red / red.abs().max(), group=torch.arange(12) % 3)


def weights(learner) -> torch.Tensor:
    return flat(learner.policy.denoiser)


def average(learner, name) -> torch.Tensor:
    return torch.cat([a.flatten() for a in learner.averages[name].average])


def following(learner, **averages):
    for name, some in averages.items():
        some.follow(learner, name)
    return learner


# Schedules ----------------------------------------------------------------------------------------

NAMED = {
    ("F_nft", "return_decay", "0"): Ramp(highest=0.0),
    ("F_nft", "return_decay", "1"): Ramp(slope=0.001, highest=0.5),
    ("F_nft", "return_decay", "2"): Ramp(flat=75, slope=0.0075, highest=0.999),
    ("F_crd", "decay", "0-.25-.005-.999"): Ramp(start=0.25, slope=0.005, highest=0.999),
    ("F_crd", "decay", "75-0-.0075-.999"): Ramp(flat=75, slope=0.0075, highest=0.999),
}


@pytest.mark.parametrize("name", NAMED, ids="-".join)
def test_named_schedules_are_the_recorded_ones(name):
    item, table, kind = name
    recorded = json.loads((GOLDEN / f"{item}.json").read_text())["values"][table]
    found = [NAMED[name].at(step) for step in recorded["steps"]]
    assert found == pytest.approx(recorded["by_type"][kind])


def test_an_average_that_starts_at_one_is_held_and_then_let_go():
    held = Ramp(start=1.0, flat=3, slope=0.2, highest=0.3)
    assert [held.at(n) for n in range(1, 6)] == [1.0, 1.0, 1.0, 0.3, 0.3]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("highest", 1.0, "below 1"), ("start", 1.2, "at most 1"), ("slope", -0.1, "at least 0")],
)
def test_a_schedule_that_averages_nothing_is_refused(name, value, allowed):
    with pytest.raises(ValueError, match=rf"decay\.{name} is {value}; it must be .*{allowed}"):
        Ramp(**{"highest": 0.5, name: value})


def test_a_ramp_by_hand():
    """Decays .2, .5, .5 of averagings 1 to 3."""
    p = torch.nn.Parameter(torch.tensor([1.0]))
    ema = EMA([p], Ramp(start=0.2, flat=1, slope=0.3, highest=0.6).at)
    for value, wanted in ((2.0, 1.8), (4.0, 2.9), (1.0, 0.6 * 2.9 + 0.4)):
        p.data.fill_(value)
        ema.update(1)
        assert_close(ema.average[0], torch.tensor([wanted]))


# The loop -----------------------------------------------------------------------------------------


def test_an_average_per_step_waits_for_all_updates_of_the_step():
    cfg = recipe(loss=NFT(), old=Average(), updates_per_step=3, kl=0.1)
    learner = following(
        new_learner(),
        old=Average(),
        anchor=Average(decay=0.5, per="update"),
        behaviour=Average(decay=Ramp(start=0.25, slope=0.25, highest=0.9)),
    )
    found = [weights(learner)]
    for step in range(2):
        train(cfg, learner, scored(), steps=[step])
        assert torch.equal(average(learner, "old"), weights(learner))
        found.append(weights(learner))
    counted = {name: a.num_updates for name, a in learner.averages.items()}
    assert counted == {"old": 2, "anchor": 6, "behaviour": 2}
    ramped = 0.5 * found[0] + 0.5 * found[1]
    assert_close(average(learner, "behaviour"), 0.75 * ramped + 0.25 * found[2])


def test_the_old_policy_is_evaluated_at_the_same_noise_before_the_policy():
    cfg = recipe(loss=NFT(), old=Average(decay=0.9), kl=0.2)
    learner = following(new_learner(), old=cfg.old)
    train(cfg, learner, scored(), steps=2)
    data = noise_for(cfg, learner.policy, scored(), 0, (0, 7, 0)).all()
    before = weights(learner)
    loss, stats = micro_batch_loss(cfg, learner, data)
    assert torch.equal(weights(learner), before)
    old, base = PixelPolicy(), PixelPolicy()
    torch.nn.utils.vector_to_parameters(average(learner, "old"), old.denoiser.parameters())
    s = data["sigma"][:, None]
    x = (1 - s) * data["latents"] + s * data["noise"]
    target = data["noise"] - data["latents"]
    with torch.no_grad():
        policy, older, frozen = (
            p.velocity(x, data["sigma"], dict(data["cond"])) - target
            for p in (learner.policy, old, base)
        )
    wanted, _ = cfg.loss.loss(data.with_columns(policy=policy, old=older))
    assert_close(loss.detach(), wanted + 0.2 * (policy - frozen).square().mean())
    assert_close(stats["old_drift"], (policy - older).square().mean())
    assert stats["old_drift"] > 1e-8


def test_the_first_update_of_every_step_has_a_ratio_of_one_to_the_copy_of_the_step():
    cfg = recipe(loss=AWM(ratio_to="old", anchor_weight=0.0), old=Average())
    learner = following(new_learner(), old=cfg.old)
    one, other = train(cfg, learner, scored(), steps=2)
    assert one["ratio"] == other["ratio"] == 1
    assert one["old_drift"] == other["old_drift"] == 0
    cfg = recipe(loss=cfg.loss, old=cfg.old, updates_per_step=2)
    (last,) = train(cfg, learner, scored(), steps=[2])
    assert last["ratio"] != 1


def test_redder_samples_are_learned_from_scored_groups():
    """Every loss moves the policy's own samples towards the rewarded colour."""
    for loss in (NFT(), AWM(), DGPO(beta=5.0, clip=None), CRD()):
        averages = {name: Average(decay=0.3) for name in ("old", "anchor") if name in loss.needs}
        cfg = recipe(loss=loss, **averages)
        learner = following(new_learner(learning_rate=3e-3), **averages)
        red = [float(_data_prediction(learner))]
        train(cfg, learner, scored(), steps=12)
        red.append(float(_data_prediction(learner)))
        assert red[1] > red[0] + 0.01, type(loss).__name__


def _data_prediction(learner) -> torch.Tensor:
    """Mean redness of the data that the policy predicts from fixed noise."""
    noise = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))
    sigma, cond = torch.full((16,), 0.95), {"length": torch.arange(1.0, 17.0)[:, None]}
    with torch.no_grad():
        return (noise - sigma[:, None] * learner.policy.velocity(noise, sigma, cond))[:, 0].mean()


class Noisy(PixelPolicy):
    """Evaluates the same weights differently each time, as with dropout."""

    calls = 0

    def velocity(self, x, sigma, cond):
        self.calls += 1
        return super().velocity(x, sigma, cond) + 0.1 * self.calls


def test_an_old_policy_that_differs_with_equal_weights_stops_the_run():
    cfg = recipe(loss=NFT(), old=Average())
    with pytest.raises(TrainingFailure, match=r"old policy's velocities differ .* by 0\.01"):
        train(cfg, following(new_learner(policy=Noisy()), old=cfg.old), scored())


def test_checkpoints_restore_every_average_and_its_place_on_the_schedule(tmp_path):
    averages = {"old": Average(decay=Ramp(slope=0.1, highest=0.8)), "behaviour": Average(decay=0.4)}
    cfg = recipe(loss=NFT(), **averages)
    straight = following(new_learner(), **averages)
    train(cfg, straight, scored(), steps=3)
    folder = checkpoint.save(tmp_path, 3, straight, "", {})
    resumed = following(new_learner(), **averages)
    checkpoint.restore(folder, resumed)
    for learner in (straight, resumed):
        train(cfg, learner, scored(), steps=[3, 4])
    for name in averages:
        assert torch.equal(average(straight, name), average(resumed, name))
    assert torch.equal(weights(straight), weights(resumed))
    assert resumed.averages["old"].num_updates == 5


# Norms --------------------------------------------------------------------------------------------


def test_norms_are_logged_by_thirds_of_the_noise_level_and_empty_thirds_are_left_out():
    """Predictions of norms 2 and 6 at low noise, of references 1 and 4; 3 of 6 at high noise."""
    target = torch.tensor([[1.0], [2.0], [-1.0], [3.0]])
    columns = {
        "policy": torch.tensor([[1.0], [4.0], [4.0], [0.0]]),
        "reference": torch.tensor([[0.0], [2.0], [7.0], [3.0]]),
        "target": target,
        "sigma": torch.tensor([0.1, 0.3, 0.7, 1.0]),
    }
    found = {name: float(value) for name, value in residuals.norm_ratios(Batch(columns)).items()}
    logged = residuals.means_by_third(found | {"other": 5.0})
    assert logged == pytest.approx(
        {"norm_ratio/low": (2 + 1.5) / 2, "norm_ratio/high": (0.5 + 0.5) / 2, "other": 5.0}
    )
    assert residuals.norm_ratios(Batch({"policy": target, "sigma": target[:, 0]})) == {}


def test_micro_batches_of_any_size_log_the_same_norms():
    learner, loss, found = new_learner(), LinearDPO(beta=9.0), []
    train(recipe(loss=loss), learner, pairs(), steps=3)
    for size in (64, 5):
        resumed = new_learner(learning_rate=1e-9)
        torch.nn.utils.vector_to_parameters(weights(learner), resumed.policy.denoiser.parameters())
        (metrics,) = train(recipe(loss=loss, micro_batch=size), resumed, pairs(), [4])
        found.append({k: v for k, v in metrics.items() if k.startswith("norm_")})
    assert found[0] == pytest.approx(found[1])
    assert set(found[0]) == {"norm_ratio/low", "norm_ratio/middle", "norm_ratio/high"}
    assert abs(found[0]["norm_ratio/high"] - 1) > 1e-3


# Guided references --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "sampled_with"), [(FrozenBase(), 1.0), (EMAReference(decay=0.0), 3.0)]
)
def test_a_guided_reference_adds_guidance_of_its_own_scale(inner, sampled_with):
    """The conditioning on the empty prompt is there already, or encoded with the reference.

    Stored data never have it.
    """
    policy, both = new_sd3(guidance=sampled_with), new_sd3(guidance=2.0)
    learner = new_learner(policy=policy)
    learner.fields["reference"] = GuidedReference(guidance=2.5, inner=inner).field(learner)
    assert isinstance(learner.reference, Guided)
    assert conditional(learner.reference) is learner.reference
    x = policy.noise(2, torch.Generator().manual_seed(2))
    requests, sigma = plain_requests(["a red circle", "two"]), torch.tensor([0.3, 0.8])
    cond = both.encode(requests)
    empty = {k.removesuffix("_neg"): v for k, v in cond.items() if k.endswith("_neg")}
    start = [p.detach().clone() for p in learner.parameters]
    move(policy, 0.2)
    moved = [p.detach().clone() for p in learner.parameters]
    encoded = policy.encode(requests)
    got = learner.reference.velocity(x, sigma, encoded)
    stored = {k: v for k, v in encoded.items() if not k.endswith("_neg")}
    assert_close(learner.reference.velocity(x, sigma, stored), got, atol=1e-4, rtol=1e-4)
    for p, value in zip(learner.parameters, moved, strict=True):
        assert torch.equal(p, value)
    plain = policy if sampled_with == 1 else unguided(policy)
    with torch.no_grad():
        for p, value in zip(learner.parameters, start, strict=True):
            p.copy_(value)
        text = {k: v for k, v in cond.items() if not k.endswith("_neg")}
        with_text, without = (plain.velocity(x, sigma, some) for some in (text, empty))
    assert_close(got, without + 2.5 * (with_text - without), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, with_text, atol=1e-2)


def test_a_policy_without_guidance_has_no_guided_reference():
    with pytest.raises(ValueError, match="PixelPolicy has no classifier-free guidance"):
        GuidedReference().field(new_learner())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GuidedReference(guidance=1.0), r"reference\.guidance is 1\.0"),
        (
            lambda: GuidedReference(inner=GuidedReference()),
            "a GuidedReference; use its own",
        ),
    ],
)
def test_references_that_are_none_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# Settings -----------------------------------------------------------------------------------------


def test_averages_that_nothing_reads_and_losses_without_theirs_are_refused():
    with pytest.raises(ValueError, match=r"NFT compares .* named old, and recipe\.old is null"):
        recipe(loss=NFT()).check_averages("policy")
    with pytest.raises(ValueError, match=r"data samples from weights named behaviour"):
        recipe().check_averages("behaviour")
    for name in ("old", "anchor", "behaviour"):
        with pytest.raises(ValueError, match=rf"recipe\.{name} is Average, but"):
            recipe(**{name: Average()}).check_averages("policy")
    recipe(loss=NFT(), old=Average()).check_averages("policy")
    recipe(loss=AWM(), anchor=Average(), behaviour=Average()).check_averages("behaviour")
    recipe(old=Average()).check_averages("old")


def test_evaluations_beside_the_policys_are_counted():
    crd = recipe(loss=CRD(), old=Average(), reference=GuidedReference())
    none = dict.fromkeys(("reference", "old", "anchor", "teachers", "steps to states"), 0)
    assert crd.evaluations_beside(PixelPolicy()) == none | {"reference": 2, "old": 1}
    awm = recipe(loss=AWM(ratio_to="old"), old=Average(), anchor=Average())
    assert awm.evaluations_beside(PixelPolicy()) == none | {"old": 1, "anchor": 1}
    assert (
        recipe(loss=NFT(), old=Average(), kl=0.1).evaluations_beside(PixelPolicy())["reference"]
        == 1
    )


@pytest.mark.parametrize("loss", [NFT(), AWM(), DGPO(), CRD()])
def test_losses_of_velocities_refuse_other_spaces(loss):
    with pytest.raises(ValueError, match=r"space is noise, but .* is defined on velocities"):
        recipe(loss=loss, space="noise", times=Uniform())
