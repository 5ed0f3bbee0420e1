"""Check that requests, policy and rewards fit each other, before any weight is read."""

from collections.abc import Iterable, Sequence

from flowalign.media.decode import MediaProblem
from flowalign.media.references import has_hole, shape_of
from flowalign.types import Policy, Request, RewardModel


def check_requests(
    policy: Policy, rewards: Sequence[RewardModel], located: Iterable[tuple[str, Request]]
) -> None:
    """Raise ValueError for the first request that policy or rewards cannot use, with its place."""
    needing = [model.spec.name for model in rewards if "references" in model.spec.needs]
    for where, request in located:
        if problem := _problem(policy, needing, request):
            raise ValueError(f"{where}: {problem}")


def _problem(policy: Policy, needing: Sequence[str], request: Request) -> str:
    if misfit := policy.takes.misfit(request):
        return f"{type(policy).__name__} {misfit}"
    if needing and not request.references:
        return f"reward {needing[0]!r} needs a source, and the request names no image"
    try:
        return _pixel_problem(policy, bool(needing), request)
    except (MediaProblem, OSError) as problem:
        return str(problem)


def _pixel_problem(policy: Policy, scored: bool, request: Request) -> str:
    for one in request.references:
        frames, _, _ = shape_of(one)
        moves = policy.takes.kind == "source" and policy.fps is not None and not scored
        if frames > 1 and not moves:
            return f"references are pictures here; {one.name} has {frames} frames"
    if request.mask is None:
        return ""
    wanted, shape = shape_of(request.references[0]), shape_of(request.mask)
    if shape[1:] != wanted[1:] or shape[0] != 1:
        sizes = [f"{width} x {height}" for _, height, width in (shape, wanted)]
        return f"mask {request.mask.name} has {sizes[0]} pixels, the source {sizes[1]}"
    if not has_hole(request.mask):
        return f"mask {request.mask.name} has no white pixel, so nothing would be painted"
    return ""
