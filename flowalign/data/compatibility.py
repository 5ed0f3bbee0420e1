"""Check that requests, policy and rewards fit each other, before any model is loaded."""

from collections.abc import Iterable, Sequence

from flowalign.data.media_record import has_hole, shape_of
from flowalign.types import InputSpec, Policy, Request, RewardModel, RewardSpec
from flowalign.utils.media.media import MediaProblem


def check_requests(
    policy: Policy,
    rewards: Sequence[RewardModel],
    located: Iterable[tuple[str, Request]],
    key: str = "",
) -> None:
    """Raise ValueError for the first request that is unsuitable for the policy or a reward.

    The message names the file and line of the request, and the setting `key` that names the file.
    """
    specs = [model.spec for model in rewards]
    for where, request in located:
        if problem := _problem(policy, specs, request):
            remedy = _remedy(policy.input_spec, request, key) if key else ""
            raise ValueError(f"{where}: {problem}{remedy}")


def _remedy(input_spec: InputSpec, request: Request, key: str) -> str:
    """Return what to set if a request lacks references or a mask, with a bundled example."""
    lacks_mask = input_spec.mask and request.mask is None
    if len(request.references) >= input_spec.references[0] and not lacks_mask:
        return ""
    columns = "an `image` and a `mask`" if input_spec.mask else "an `image`"
    other = "first_frames" if input_spec.kind == "first_frame" else "edits"
    example = f"assets/prompts/{'fills' if input_spec.mask else other}.jsonl"
    return f".\nSet {key} to a file whose rows have {columns}, such as {example}"


def _problem(policy: Policy, specs: Sequence[RewardSpec], request: Request) -> str:
    if misfit := policy.input_spec.misfit(request):
        return f"{type(policy).__name__} {misfit}"
    for spec in specs:
        if lack := spec.lacks(request):
            return f"reward {spec.name!r} {lack}"
    try:
        scored = any("references" in spec.needs for spec in specs)
        return _pixel_problem(policy, scored, request) or _mask_problem(policy.input_spec, request)
    except (MediaProblem, OSError) as problem:
        return str(problem)


def _pixel_problem(policy: Policy, scored: bool, request: Request) -> str:
    for one in request.references:
        shape = shape_of(one)
        if shape[0] > 1 and (scored or policy.input_spec.frames == (1, 1)):
            return f"references must be images; {one.name} has {shape[0]} frames"
        given = policy.input_spec.references[1] > 0
        if given and (misfit := policy.input_spec.misshapen(*shape)):
            return f"{one.name}: {type(policy).__name__} {misfit}"
    return ""


def _mask_problem(input_spec: InputSpec, request: Request) -> str:
    if (mask := request.mask) is None:
        return ""
    wanted, shape = shape_of(request.references[0]), shape_of(mask)
    if shape[1:] != wanted[1:] or shape[0] != 1:
        sizes = [f"{width} x {height}" for _, height, width in (shape, wanted)]
        return f"mask {mask.name} has {sizes[0]} pixels, the source {sizes[1]}"
    if has_hole(mask, input_spec.crop):
        return ""
    within = (
        f" within the {input_spec.crop[1]} x {input_spec.crop[0]} that are kept"
        if input_spec.crop
        else ""
    )
    return f"mask {mask.name} has no white pixel{within}, so there is no region to inpaint"
