"""Mathematics of diffusion alignment as pure functions of torch tensors."""

from flowalign.functional.transition import (
    CPS,
    DDIM,
    Coefficients,
    DanceSDE,
    FlowSDE,
    Gaussian,
    Kernel,
    Precise,
    StepwiseDDIM,
    log_density,
    sample_next,
)
