"""Check the inner loss of a wrapper."""

from flowalign.types import MatchingLoss


def require_pairs(inner: MatchingLoss) -> None:
    """Raise ValueError if a wrapped loss does not compare pairs."""
    if not inner.requirements.paired:
        raise ValueError(
            f"inner is {type(inner).__name__}, which knows no losers; it must be a loss "
            "of pairs, such as DPO"
        )
