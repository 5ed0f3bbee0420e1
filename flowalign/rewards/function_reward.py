"""Use a plain Python function, or any other callable, as a reward model."""

import copy
import hashlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec, score_usable
from flowalign.utils.errors import explain_errors
from flowalign.utils.live_objects import find_object
from flowalign.utils.media.pixels import to_bytes, to_images
from flowalign.utils.ranges import ImportPath

_VIDEOS = ("videos", "video", "clips")
"""Names of a first parameter that takes videos; any other name takes images."""
Form = Literal["pil", "tensor"]
"""Form in which a function takes images."""


class WrongScores(ValueError):
    """Error of a function that does not return a score per sample, whatever the samples are."""


class CallableReward(RewardModel):
    """Reward model that calls `def reward(images, prompts) -> list[float]`.

    The first parameter gets a list of PIL images, or RGB tensors [n, 3, H, W] in [0, 1]. Its
    annotation decides, `Tensor` or another type; without one, `images` decides. If it is called
    `videos`, it gets a list of frames per video, or tensors [n, F, 3, H, W]. A parameter called
    `prompts` gets the prompts, `metadata` a mapping per sample, and any other parameter the column
    of this name; `**columns` gets the remaining columns. All are copies. The function returns a
    score per sample, higher is better; None and NaN count as failed. There is no gradient.

    Args:
        function: Function, bound method, module or other callable.
        name: Name of the reward dimension. None: the name of the function.
        images: Form of images for a first parameter without annotation.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, images: Form = "pil"):
        self.function = function
        name = name or str(getattr(function, "__name__", type(function).__name__))
        parameters = [*_signature(function, name).values()]
        if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise ValueError(
                f"reward {name} takes ({', '.join(p.name for p in parameters)}); its first "
                "parameter must take the images, or the videos"
            )
        first, *others = parameters
        self._takes_videos = first.name in _VIDEOS
        self.images: Form = _find_form(first.annotation) or images
        self._columns = [p for p in others if p.kind is not inspect.Parameter.VAR_KEYWORD]
        self._takes_all = len(self._columns) < len(others)
        self.spec = RewardSpec(
            name=name,
            dims=(name,),
            modality="any" if self._takes_videos else "image",
            licence="unknown",
            version=_digest_source(function),
        )

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score all samples in one call.

        Raises:
            ValueError: The function returned a wrong number of scores, or no numbers.
        """
        return score_usable(self.spec, batch, self.spec.screen(batch), self._rate)

    def _rate(self, batch: MediaBatch) -> RewardOutput:
        # Copies, because functions change what they get, and other rewards score the batch.
        scores = self.function(self._media(batch), **self._inputs(batch))
        values = torch.tensor(self._list_scores(scores, batch), dtype=torch.float32)
        return RewardOutput.build(self.spec, values[:, None])

    def _media(self, batch: MediaBatch) -> Any:
        media = batch.media.detach().to(torch.float32, copy=True)
        if self.images == "tensor":
            return media if self._takes_videos else media[:, 0]
        frames = [to_images(clip) for clip in to_bytes(media.cpu())]
        return frames if self._takes_videos else [clip[0] for clip in frames]

    def _inputs(self, batch: MediaBatch) -> dict[str, Any]:
        metadata = [copy.deepcopy(dict(one)) for one in batch.metadata or [{}] * len(batch)]
        columns = {name: [one.get(name) for one in metadata] for one in metadata for name in one}
        columns["prompts"] = list(batch.prompts)
        inputs = dict(columns) if self._takes_all else {}
        known = columns | {"metadata": metadata}
        for parameter in self._columns:
            if parameter.name in known:
                inputs[parameter.name] = known[parameter.name]
            elif parameter.default is parameter.empty:
                raise ValueError(
                    f"reward {self.spec.name} takes {parameter.name}, which is no column of the "
                    f"prompts; there are {', '.join(known)}"
                )
        return inputs

    def _list_scores(self, scores: Any, batch: MediaBatch) -> list[float]:
        """Return the scores of a function as numbers; a failed score is NaN."""
        found: Any = scores
        if isinstance(scores, tuple) and len(scores) == 2 and isinstance(scores[1], Mapping):
            found = scores[0]  # scores and details, as rewards of DDPO and Flow-GRPO return
        found = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != len(batch):
            shown = f"{len(found)} scores" if isinstance(found, Sequence) else repr(found)[:60]
            raise WrongScores(
                f"reward {self.spec.name} returned {shown} for {len(batch)} samples; it must "
                "return a list with a number, or None, per sample"
            )
        return [self._read_score(one, i, batch) for i, one in enumerate(found)]

    def _read_score(self, score: Any, i: int, batch: MediaBatch) -> float:
        one: Any = score
        if isinstance(score, list) and len(score) == 1:
            one = score[0]  # of a tensor with one column
        where = f"sample {i} (prompt {batch.prompts[i]!r:.60})"
        wrong = f"reward {self.spec.name} returned {score!r:.60} for {where}, not a number or None"
        with explain_errors(wrong, TypeError, ValueError):
            return math.nan if one is None else float(one)


class FunctionReward(CallableReward):
    """Plain function of a run file, named as `class_path: my_reward.py:reward`.

    See `CallableReward` for its parameters.

    Args:
        function: Dotted path of the function.
        name: Name of the reward dimension. Null: the name of the function.
        images: Form of images for a first parameter without annotation.
    """

    def __init__(self, function: ImportPath, name: str | None = None, images: Form = "tensor"):
        super().__init__(_import_function(function), name, images)


def find_reward(name: str) -> RewardModel:
    """Return the reward model that a script shares under a name; see `share_objects`.

    Raises:
        ValueError: There is none.
    """
    found = find_object(name)
    if not isinstance(found, RewardModel):
        raise ValueError(f"{name} is no reward model of a script that is running")
    return found


def _signature(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    called = function.forward if isinstance(function, nn.Module) else function
    with explain_errors(f"reward {name} has no readable signature", TypeError, ValueError):
        parameters = inspect.signature(called).parameters
    return {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL}


def _find_form(annotation: Any) -> Form | None:
    """Return the form of images that a parameter is annotated with; None without annotation."""
    if annotation is inspect.Parameter.empty:
        return None
    kind = getattr(annotation, "array_type", annotation)  # of jaxtyping
    return "tensor" if kind is Tensor or (isinstance(kind, str) and "Tensor" in kind) else "pil"


def _import_function(path: str) -> Callable[..., Any]:
    problem = f"function {path!r} cannot be imported"
    with explain_errors(problem, ImportError, AttributeError, ValueError):
        function = pkgutil.resolve_name(path)
    if not callable(function):
        raise ValueError(f"function {path!r} is no function")
    return function


def _digest_source(function: Callable[..., Any]) -> str:
    """Return a hash of the source, so that scores of different versions are not mixed."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = getattr(function, "__qualname__", type(function).__qualname__)
    return hashlib.sha256(source.encode()).hexdigest()[:16]
