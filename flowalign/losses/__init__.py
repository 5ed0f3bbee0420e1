"""Losses that update a policy, one file per published loss.

`policy_gradient` learns from transitions of rollouts, `matching` from noised clean latents,
`reward_gradient` from the gradient of rewards.
"""

from flowalign.utils.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
