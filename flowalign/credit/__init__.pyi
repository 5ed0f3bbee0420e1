from .branch import Branch as Branch
from .contrast import Contrast as Contrast
from .control_variate import ControlVariate as ControlVariate
from .critic import Critic as Critic
from .gain import Gain as Gain, NextValue as NextValue
from .granular import Granular as Granular
from .lambda_return import LambdaReturn as LambdaReturn
from .latent_gain import LatentGain as LatentGain, ProcessOutcome as ProcessOutcome
from .next_latent import NextLatent as NextLatent
from .outcome import Outcome as Outcome
from .tree import LeafAdvantage as LeafAdvantage
from .turning_point import TurningPoint as TurningPoint
