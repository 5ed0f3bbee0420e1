"""Losses that update a policy, one file per published loss.

`policy_gradient` trains on transitions of rollouts, `matching` on noised clean latents, and
`reward_gradient` on the gradient of rewards.
"""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
