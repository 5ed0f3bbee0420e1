"""Let a critic learn from the outcomes of a step, the same on all processes."""

from flowalign.credit.critic import Learned, explained_variance
from flowalign.distributed.processes import Processes
from flowalign.rewards.objectives import TransformedValues
from flowalign.training.rollouts.settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues


def learned(
    cfg: RolloutSettings, critic: Learned, processes: Processes, values: CompletionValues
) -> tuple[Learned, dict[str, float]]:
    """Return the critic after these outcomes, and the share of their variance that it foresaw."""
    trajectory, rewards = values.trajectory, values.rewards
    transformed = TransformedValues(values, rewards.dims, cfg.value_transform, trajectory)
    outcome = processes.gather(transformed([trajectory.num_steps])[:, 0])
    usable = rewards.usable(outcome.isfinite())
    outcome = outcome[usable].nan_to_num()
    group = processes.gather(trajectory.prompt + (processes.rank << 40))[usable]
    features = {
        k: processes.gather(trajectory.features(k))[usable] for k in sorted(trajectory.hidden)
    }
    if not len(outcome):
        return critic, {}
    foreseen = {
        k: critic.predicted(k, x, group, len(rewards.dims)) @ rewards.weights
        for k, x in features.items()
    }
    total = outcome @ rewards.weights
    metrics = {
        f"critic/explained_variance_{k}": explained_variance(value, total, group)
        for k, value in foreseen.items()
    }
    return critic.after(features, outcome, group), metrics
