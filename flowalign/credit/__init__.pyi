from .branch import Branch as Branch
from .contrast import Contrast as Contrast
from .chain import ControlVariate as ControlVariate
from .critic import Critic as Critic
from .chain import Gain as Gain, NextValue as NextValue
from .chain import Granular as Granular
from .chain import LambdaReturn as LambdaReturn
from .chain import LatentGain as LatentGain, ProcessOutcome as ProcessOutcome
from .branch import NextLatent as NextLatent
from .chain import Outcome as Outcome
from .branch import LeafAdvantage as LeafAdvantage
from .branch import MixedAdvantage as MixedAdvantage
from .turning_point import TurningPoint as TurningPoint
