"""Step-level credit: how much each denoising step earned. One file per method.

A method sees a trajectory and asks for values of its states; it touches nothing else.
"""

from flowalign.credit.branch import Branch
from flowalign.credit.contrast import Contrast
from flowalign.credit.control_variate import ControlVariate
from flowalign.credit.critic import Critic
from flowalign.credit.discounted import Discounted
from flowalign.credit.gain import Gain, NextValue
from flowalign.credit.granular import Granular
from flowalign.credit.lambda_return import LambdaReturn
from flowalign.credit.latent import LatentGain, ProcessOutcome
from flowalign.credit.outcome import Outcome
from flowalign.credit.redistribute import Redistribute
from flowalign.credit.tree import LeafAdvantage
from flowalign.credit.turning_point import TurningPoint

__all__ = [
    "Branch",
    "Contrast",
    "ControlVariate",
    "Critic",
    "Discounted",
    "Gain",
    "Granular",
    "LambdaReturn",
    "LatentGain",
    "LeafAdvantage",
    "NextValue",
    "Outcome",
    "ProcessOutcome",
    "Redistribute",
    "TurningPoint",
]
