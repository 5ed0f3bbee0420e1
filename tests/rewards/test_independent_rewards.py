"""Rewards that score the same batch change neither each other nor the noise of the next batch."""

import threading

import pytest
import torch

from flowalign.rewards import FunctionReward, RewardError, RewardFailure, Rewards
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec, plain_requests
from tests.fixtures.embedded import new_sd3
from tests.fixtures.pixel import Redness
from tests.fixtures.training import new_learner, new_recipe


@pytest.fixture(autouse=True)
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def normalise(images, prompts, metadata):
    images.mul_(255)
    return [
        float(one.mean()) + meta.pop("bonus") for one, meta in zip(images, metadata, strict=True)
    ]


def mean(images, prompts, metadata):
    return [float(one.mean()) + meta["bonus"] for one, meta in zip(images, metadata, strict=True)]


def function(name):
    return FunctionReward(f"{__name__}.{name}")


def batch_of(n=3):
    shared = {"bonus": 1.0}
    return MediaBatch(torch.full((n, 1, 3, 2, 2), 0.5), ["a"] * n, [shared] * n)


class Changing(RewardModel):
    """Reward that calls a function with its batch."""

    def __init__(self, change, name="changing"):
        self.change, self.spec = change, RewardSpec(name, (name,), "any", (0.0, 1.0), "none")

    def score(self, batch):
        self.change(batch)
        return RewardOutput.build(self.spec, torch.zeros(len(batch), 1, dtype=torch.float32))


def test_a_function_that_works_in_place_scores_alone_and_before_others_the_same():
    batch = batch_of()
    rewards = Rewards([function("normalise"), function("mean")], {})
    for _ in range(2):
        assert rewards.score(batch).values.tolist() == [[128.5, 1.5]] * 3
    assert batch.media.unique().tolist() == [0.5]
    assert batch.metadata[0] == {"bonus": 1.0}


def test_metadata_that_a_class_changes_is_whole_for_others():
    batch = batch_of()
    pop = Changing(lambda own: [one.pop("bonus") for one in own.metadata])
    assert Rewards([pop, function("mean")], {}).score(batch).values.tolist() == [[0.0, 1.5]] * 3


@pytest.mark.parametrize("on_failure", ["raise", "drop_sample"])
def test_a_class_that_changes_the_samples_is_refused_by_its_name(on_failure):
    rewards = Rewards([Redness(), Changing(lambda own: own.media[:1].mul_(2))], {}, on_failure)
    with pytest.raises(RewardError, match=r"'changing' .* changed the samples in place") as caught:
        rewards.score(batch_of())
    assert "redness" not in str(caught.value)


def test_a_class_that_changes_a_copy_is_not_refused():
    Rewards([Changing(lambda own: own.media.clone().mul_(2))], {}).score(batch_of())


def test_with_gradients_samples_that_are_changed_are_refused_as_well():
    batch = batch_of()
    batch = MediaBatch(batch.media.requires_grad_() * 1, batch.prompts, batch.metadata)
    rewards = Rewards([Changing(lambda own: own.media.mul_(2))], {})
    with pytest.raises(RewardError, match="changed the samples in place"):
        rewards.score_with_gradient(batch)


def test_a_reward_that_leaves_another_default_dtype_is_refused_by_its_name():
    leave = Changing(lambda _: torch.set_default_dtype(torch.float64), "leaving")
    for call in (Rewards([leave], {}).score, Rewards([leave], {}).score_with_gradient):
        torch.set_default_dtype(torch.float32)
        with pytest.raises(RewardFailure, match=r"'leaving' left .* at torch\.float64") as caught:
            call(batch_of())
        assert len(str(caught.value).splitlines()) <= 5


def test_rewards_that_end_or_begin_while_another_one_loads_are_not_refused():
    """The default dtype is float16 when `early` ends, and float32 again when `late` does."""
    begun, changed, late_begun, restored = (threading.Event() for _ in range(4))

    def load(_):
        assert begun.wait(20)
        torch.set_default_dtype(torch.float16)
        changed.set()
        assert late_begun.wait(20)
        torch.set_default_dtype(torch.float32)
        restored.set()

    def end(_):
        begun.set()
        assert changed.wait(20)

    def begin(_):
        late_begun.set()
        assert restored.wait(20)

    early, late = Changing(end, "early"), Changing(begin, "late")
    rewards = Rewards([early], {})
    batch = batch_of()
    rewards.submit(Changing(load), batch)
    scoring = rewards.scoring()
    scoring.add(batch)
    assert changed.wait(20)
    threading.Timer(0.2, rewards.submit, (late, batch)).start()
    scoring.result()
    assert torch.get_default_dtype() == torch.float32
    rewards.check_default_dtype()
    assert rewards.worker(late).thread.submit(int).result() == 0
    rewards.check_default_dtype()


class Loading(Changing):
    """Reward that sets the default dtype from the beginning of batch 2 to that of batch 3."""

    def __init__(self, policy, loads):
        super().__init__(lambda _: self.load())
        self.loads, self.dtypes, self.velocity, self.noise = (
            loads,
            [],
            policy.velocity,
            policy.noise,
        )
        self.changed, self.third = threading.Event(), threading.Event()
        policy.noise, policy.velocity = self.draw, self.evaluate

    def load(self):
        if self.loads and not self.changed.is_set():
            torch.set_default_dtype(torch.float16)
            self.changed.set()
            assert self.third.wait(60)
            torch.set_default_dtype(torch.float32)

    def draw(self, *given):
        assert not self.loads or not self.dtypes or self.changed.wait(60)
        if len(self.dtypes) == 8:
            self.third.set()
        return self.noise(*given)

    def evaluate(self, *given):
        self.dtypes.append(torch.get_default_dtype())
        return self.velocity(*given)


def sample_beside(loads):
    """States, log-probabilities and samples of a rollout in three batches of one prompt."""
    learner, cfg = new_learner(new_sd3()), new_recipe(rollout_batch_prompts=1)
    model = Loading(learner.policy, loads)
    requests = plain_requests(["a red circle", "a blue square", "a cat"])
    rewards = Rewards([model], {"changing": 1.0})
    values = collect_rollouts(cfg.rollouts, learner, rewards, requests, 0, 0)
    values([4])
    assert (model.dtypes[4:8] == [torch.float16] * 4) == loads
    states = [values.trajectory.state(k) for k in range(5)]
    return [*states, values.trajectory.logp, *values.media.values()]


@pytest.mark.slow
def test_a_reward_that_loads_while_the_next_batch_is_sampled_changes_no_noise():
    for plain, beside in zip(sample_beside(False), sample_beside(True), strict=True):
        assert plain.dtype == beside.dtype == torch.float32
        assert torch.equal(plain, beside)
