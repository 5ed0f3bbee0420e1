"""States that a rollout stores: the requested ones, on the requested device and precision."""

from dataclasses import replace

import pytest
import torch

from flowalign.credit import Branch, Gain
from flowalign.functional.transition import CPS, DanceSDE, FlowSDE, log_density
from flowalign.losses.policy_gradient.grpo import GRPO, PPOClip, RatioNorm
from flowalign.sampling import AllButLast, Comb, Fixed, Storage, Tree
from flowalign.sampling.rollout import concat_trajectories
from flowalign.sampling.rollout_replay import CachedReplay
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.reference import unguided
from flowalign.training.reward_gradient import FromRollouts
from flowalign.training.rollouts.collecting import collect_rollouts, rollout
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.types import plain_requests
from flowalign.types.trajectory import Completion
from flowalign.utils.seeds import generator
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import flat, new_learner, new_recipe, new_rewards, train

THREE = ["a", "ccc", "bb"]
ONE_STEP = Completion(max_steps=1, weights="reference")
LATENT_CHANGE = GRPO(PPOClip(0.2), chunk_sizes="latent_change")


def moving_learner(**optimizer):
    """A policy with a curved ODE, so that rounding and mixed-up states change its velocity."""
    policy = PixelPolicy(seed=3)
    torch.nn.init.normal_(
        policy.denoiser[-1].weight, std=0.3, generator=torch.Generator().manual_seed(5)
    )
    return new_learner(policy, learning_rate=3e-2, **optimizer)


def everything(cfg: RolloutSettings, steps) -> range:
    return range(cfg.sampling.num_steps + 1)


def num_bytes(trajectory) -> int:
    return sum(state.nbytes for state in trajectory.states.values())


SIX = {"num_steps": 6, "samples_per_prompt": 4, "sde_window": Fixed(2, 4)}
TREE = {"samples_per_prompt": 4, "branching": Tree(splits=[2, 3])}
KEPT = {
    "window": (new_recipe(SIX), [2, 3, 4, 6]),
    "last": (new_recipe(SIX | {"sde_window": Fixed(5, 6)}), [5, 6]),
    "all_but_last": (new_recipe(SIX | {"sde_window": AllButLast()}), [0, 1, 2, 3, 4, 5, 6]),
    "completed_on_the_way": (new_recipe(SIX, credit=Gain()), [2, 3, 4, 6]),
    "completed_after": (
        new_recipe(SIX | {"sde_window": Fixed(2, 5)}, credit=Gain(), completion=ONE_STEP),
        [2, 3, 4, 5, 6],
    ),
    "read_for_chunks": (new_recipe(SIX, algorithm=LATENT_CHANGE), [0, 1, 2, 3, 4, 5, 6]),
    "tree": (new_recipe(SIX | TREE, credit=Branch()), [2, 3, 4, 6]),
}


@pytest.mark.parametrize(("cfg", "kept"), KEPT.values(), ids=KEPT)
def test_kept_are_states_of_the_window_the_last_and_what_credit_and_chunks_read(cfg, kept):
    trajectory = rollout(cfg.rollouts, moving_learner(), plain_requests(THREE), 0, 0)
    assert sorted(trajectory.states) == kept
    for k, state in trajectory.states.items():
        assert len(state) == len(trajectory.rows.unique_rows(k)), (
            "one row for each state that differs"
        )


def test_a_credit_method_is_given_every_state_that_it_reads_of_a_blank_trajectory():
    class FarBack(Gain):
        def __call__(self, trajectory, values):
            assert trajectory.state(1).shape[0] == len(trajectory.prompts)
            return super().__call__(trajectory, values)

    cfg = new_recipe(SIX, credit=FarBack())
    assert cfg.rollouts.kept_states((2, 3)) == (1, 2, 3, 4, 6)
    assert train(cfg, moving_learner(), steps=1)


def test_a_state_that_was_not_kept_is_refused_by_its_number():
    trajectory = rollout(new_recipe(SIX).rollouts, moving_learner(), plain_requests(THREE), 0, 0)
    for read in (trajectory.state, trajectory.unique_states):
        with pytest.raises(ValueError, match=r"state 5 .*stored states \[2, 3, 4, 6\]"):
            read(5)


SHORT = {
    "window": lambda: new_recipe(SIX, epochs_per_step=2),
    "shared": lambda: new_recipe(SIX | {"seeds_per_prompt": 1}, updates_per_step=2),
    "completed_after": lambda: new_recipe(SIX, credit=Gain(), completion=ONE_STEP),
    "tree": lambda: new_recipe(SIX | TREE, credit=Branch()),
    "comb": lambda: new_recipe(SIX | {"branching": Comb(children=2)}, credit=Branch()),
    "batches": lambda: new_recipe(SIX, rollout_batch_prompts=2),
    "bfloat16": lambda: new_recipe(SIX | {"states": Storage(dtype="bfloat16")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("cfg", SHORT.values(), ids=SHORT)
def test_what_is_not_stored_changes_no_weight_and_no_metric_and_takes_no_bytes(cfg, monkeypatch):
    cfg, sizes, runs = cfg(), [], []
    for keep in (RolloutSettings.kept_states, everything):
        monkeypatch.setattr(RolloutSettings, "kept_states", keep)
        learner = moving_learner()
        sizes.append(num_bytes(rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)))
        metrics = [
            {name: value for name, value in step.items() if not name.startswith(("ti", "thr"))}
            for step in train(cfg, learner, steps=3)
        ]
        runs.append((flat(learner.policy.denoiser), metrics))
    assert torch.equal(runs[0][0], runs[1][0])
    assert repr(runs[0][1]) == repr(runs[1][1])
    assert sizes[0] < 0.7 * sizes[1]


def test_the_bytes_of_a_rollout_by_hand():
    """12 samples of 3 values at 4 of 7 states; of a tree 3, 6, 12, 12 different states."""
    assert (
        num_bytes(rollout(new_recipe(SIX).rollouts, moving_learner(), plain_requests(THREE), 0, 0))
        == 12 * 3 * 4 * 4
    )
    half = new_recipe(SIX | TREE | {"states": Storage(dtype="bfloat16")}, credit=Branch())
    assert (
        num_bytes(rollout(half.rollouts, moving_learner(), plain_requests(THREE), 0, 0))
        == (3 + 6 + 12 + 12) * 3 * 2
    )


LAYOUTS = {
    "chain": {},
    "sde_window": {"sde_window": Fixed(1, 3)},
    "shared": {"seeds_per_prompt": 2},
    "tree": {"branching": Tree(splits=[0, 2], sibling_noise_scale=2.0)},
    "comb": {"branching": Comb(children=2), "sde_window": Fixed(1, 3)},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kernel", [FlowSDE(), DanceSDE(), CPS()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["same", "cpu"])
def test_before_an_update_stored_transitions_have_ratio_one(layout, kernel, dtype, device):
    """bfloat16 keeps 8 bits; a rollout that continued from the exact state would differ much."""
    storage = Storage(dtype=dtype, device=device)
    cfg = new_recipe({"kernel": kernel, "eta": 0.6, "states": storage} | layout)
    learner = moving_learner()
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    rollouts, _ = judged(cfg, learner, trajectory=trajectory)
    batches = list(minibatches(rollouts, torch.arange(12), 7))
    assert sum(batch.num_rows for batch in batches) == int(trajectory.trained.sum())
    for batch in batches:
        with torch.no_grad():
            current = rollouts.fields(learner.policy, learner.policy).transition(
                learner.policy, batch
            )
            logp = log_density(kernel, batch["x_next"], current)
        torch.testing.assert_close(logp, batch["logp_old"], atol=2e-6, rtol=1e-6)
        if dtype == "bfloat16":
            assert torch.equal(batch["x"], batch["x"].bfloat16().float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_of_replay_passes_with_states_kept_in_main_memory(dtype):
    cfg = new_recipe(SIX | {"states": Storage(device="cpu", dtype=dtype)})
    metrics = train(cfg, moving_learner(), steps=2)
    assert metrics[0]["check/ratio_drift_2"] < 1e-6
    assert metrics[0]["check/ratio_drift_3"] < 1e-6


def test_trajectories_that_are_joined_give_up_what_they_kept():
    """Also where rewards of the parts are still being computed: these see the samples alone."""
    cfg = new_recipe(SIX, algorithm=GRPO(RatioNorm()), credit=Gain())
    learner = moving_learner()
    parts = [
        rollout(cfg.rollouts, learner, plain_requests([prompt]), 0, s)
        for s, prompt in enumerate(("a", "ccc"))
    ]
    held = sum(map(num_bytes, parts))
    both = concat_trajectories(parts)
    assert num_bytes(both) == held > 0
    for part in parts:
        assert not part.states
        assert not part.means
        assert not part.finished
    assert both.means
    assert len(both.finished) == 2


def test_sampling_in_batches_leaves_no_state_beside_that_of_the_whole():
    cfg, learner = new_recipe(SIX, rollout_batch_prompts=1), moving_learner()
    values = collect_rollouts(cfg.rollouts, learner, new_rewards(), plain_requests(THREE), 0, 0)
    assert len(values.parts) == 3
    assert [num_bytes(part.trajectory) for part in values.parts] == [0, 0, 0]
    assert num_bytes(values.trajectory) == num_bytes(
        rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    )


def test_states_are_kept_apart_from_where_the_policy_computes(monkeypatch):
    """The meta device simulates a GPU: `place` must move stored states there, including means."""
    monkeypatch.setattr(Storage, "place", lambda _, x: x.to("meta"))
    cfg = new_recipe(SIX, algorithm=GRPO(PPOClip(0.2)))
    trajectory = rollout(cfg.rollouts, moving_learner(), plain_requests(THREE), 0, 0)
    assert {state.device.type for state in trajectory.states.values()} == {"meta"}
    completed = rollout(
        replace(cfg, credit=Gain()).rollouts, moving_learner(), plain_requests(THREE), 0, 0
    ).finished
    assert [x.device.type for x in completed.values()] == ["meta", "meta"]
    assert trajectory.device.type == trajectory.logp.device.type == "cpu"


def test_joined_trajectories_find_their_own_states():
    """For trees, which have fewer rows than samples."""
    cfg, learner = new_recipe(SIX | TREE, credit=Branch()), moving_learner()
    first, second = (
        rollout(cfg.rollouts, learner, plain_requests([p]), 0, s) for p, s in (("a", 0), ("ccc", 1))
    )
    both = concat_trajectories([replace(t, states=dict(t.states)) for t in (first, second)])
    for k in (2, 3, 4, 6):
        assert torch.equal(both.state(k), torch.cat([first.state(k), second.state(k)]))
        assert torch.equal(
            both.state(k, torch.tensor([6, 1])),
            torch.stack([second.state(k)[2], first.state(k)[1]]),
        )


# Steps of cached rollouts are evaluated again as they were made, with a gradient ------------------


PROMPTS = ["a", "bbb", "cc"]


class GuidedPixel(PixelPolicy):
    """A pixel with classifier-free guidance; evaluations are counted by condition."""

    def __init__(self, guidance=3.5):
        super().__init__(seed=4)
        torch.nn.init.normal_(self.denoiser[-1].weight, std=0.3)
        self.guidance, self.evaluations_per_velocity = guidance, 2
        self.seen = []

    def velocity(self, x, sigma, cond):
        self.seen.append((len(x), torch.is_grad_enabled(), self.guidance > 1))
        v = super().velocity(x, sigma, cond)
        if self.guidance <= 1:
            return v
        v_neg = super().velocity(x, sigma, {"length": 0 * cond["length"]})
        return v_neg + self.guidance * (v - v_neg)


def rolled(policy, num_steps=5, samples=2):
    start = FromRollouts(num_steps=num_steps, samples_per_prompt=samples)
    seeds = [generator(0, "noise", i) for i in range(len(PROMPTS))]
    return start.trajectory(policy, plain_requests(PROMPTS), seeds)


def replay_of(policy, trajectory, samples=range(6), conditional=None):
    rows = torch.tensor(list(samples))
    keys = [(7, 0, int(i)) for i in rows]
    return CachedReplay(policy, trajectory, rows, keys, conditional)


def test_a_replayed_velocity_is_the_one_that_made_the_step():
    policy = GuidedPixel()
    trajectory = rolled(policy)
    whole, part = replay_of(policy, trajectory), replay_of(policy, trajectory, [4, 1])
    for k in range(5):
        v = whole.velocity(k)
        assert v.requires_grad
        torch.testing.assert_close(v.detach(), whole.cached_velocity(k), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.velocity(k), v[[4, 1]])
    assert [len(e.x) for e in whole.evaluated] == [6] * 5


@pytest.mark.parametrize("where", ["at a state", "elsewhere"])
def test_a_detached_unconditional_branch_keeps_the_value_and_costs_one_evaluation(where):
    policy = GuidedPixel()
    trajectory = rolled(policy)
    parameters, k = list(policy.denoiser.parameters()), 2
    plain, replay = unguided(policy), replay_of(policy, trajectory)
    detached = replay_of(policy, trajectory, conditional=plain)
    policy.seen.clear()

    def evaluated(replay):
        x = replay.state(k) + (0.1 if where == "elsewhere" else 0.0)
        return replay.velocity_at(x, replay.sigmas[k]) if "else" in where else replay.velocity(k)

    found = evaluated(detached)
    cheap = [(6, True, False)]
    assert policy.seen == (cheap if where == "at a state" else [(6, False, True), *cheap])
    torch.testing.assert_close(found, evaluated(replay), atol=1e-5, rtol=1e-5)

    x = replay.state(k) + (0.1 if where == "elsewhere" else 0.0)
    alone = policy.guidance * plain.velocity(x, replay.sigmas[k], replay.cond)
    weight = torch.linspace(-1, 1, found.numel()).view_as(found)
    ours, theirs = (torch.autograd.grad((weight * v).sum(), parameters) for v in (found, alone))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_noise_belongs_to_the_sample_and_not_to_its_micro_batch():
    policy = PixelPolicy()
    trajectory = rolled(policy)
    whole, part = replay_of(policy, trajectory), replay_of(policy, trajectory, [5, 2])
    torch.testing.assert_close(part.noise(1), whole.noise(1)[[5, 2]], rtol=0, atol=0)
    assert (whole.noise(0) - whole.noise(1)).abs().min() > 0
    assert len(whole.noise(0).unique()) == 18


def test_rollouts_from_pure_noise_know_it():
    policy = PixelPolicy()
    trajectory = rolled(policy)
    replay = replay_of(policy, trajectory)
    assert torch.equal(replay.initial_noise(), trajectory.state(0))
    trajectory.sigmas[0] = 0.95  # as of models that were never trained on pure noise
    assert torch.equal(replay_of(policy, trajectory).initial_noise(), replay.noise(-1))


def test_a_state_that_was_not_kept_is_named():
    policy = PixelPolicy()
    trajectory = rolled(policy)
    del trajectory.states[3]
    with pytest.raises(ValueError, match="state 3 was not kept"):
        replay_of(policy, trajectory).velocity(3)
