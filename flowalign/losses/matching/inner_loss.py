"""Check the inner loss of a wrapper."""

from flowalign.types import MatchingLoss


def require_pairs(inner: MatchingLoss) -> None:
    """Raise ValueError if a wrapped loss does not compare pairs."""
    if not inner.requirements.paired:
        raise ValueError(
            f"inner is {type(inner).__name__}, which does not compare pairs; choose a pair loss "
            "such as DPO"
        )
