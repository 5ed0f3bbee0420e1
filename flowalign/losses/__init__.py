"""Losses that update a policy, one file per kind of loss.

`policy_gradient` trains on transitions of rollouts, `matching` on noised clean latents, and
`reward_gradient` on the gradient of rewards.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
