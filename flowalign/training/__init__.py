"""Training of policies. Each kind of training is a folder with a recipe and a loop.

A run file names a recipe, which opens a loop. All recipes share the learner, references, averages,
checkpoints, evaluation and checks.
"""

from flowalign.training.checkpoint import Checkpoints
from flowalign.training.held_out_evaluation import Evaluation
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.policy_gradient import PolicyGradient
from flowalign.training.recipe import Loop, MemoryPart, Recipe, RecipePlan, RunContext
from flowalign.training.reference import EMA
from flowalign.training.reward_gradient.reward_gradient_recipe import RewardGradient
from flowalign.utils.errors import TrainingFailure

__all__ = [
    "EMA",
    "Checkpoints",
    "Evaluation",
    "Learner",
    "Loop",
    "Matching",
    "MemoryPart",
    "Optimizer",
    "PolicyGradient",
    "Recipe",
    "RecipePlan",
    "RewardGradient",
    "RunContext",
    "TrainingFailure",
]
