from .branching import Chain as Chain, Comb as Comb, Tree as Tree
from .calibration import Calibration as Calibration
from .stepping import complete as complete
from .sde_windows import FrameWindow as FrameWindow
from .inference import generate as generate
from .sampling_settings import Storage as Storage
from .reward_guidance import Euphonium as Euphonium, FlowNRG as FlowNRG
from .rollout import sample as sample
from .sampling_settings import Sampling as Sampling
from .sde_windows import (
    AllButLast as AllButLast,
    Backward as Backward,
    Fixed as Fixed,
    Geometric as Geometric,
    NoSteps as NoSteps,
    Random as Random,
    RandomSubset as RandomSubset,
    SDEWindow as SDEWindow,
    Sliding as Sliding,
)
