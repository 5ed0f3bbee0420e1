"""Call reward models, which may be user code, and check their outputs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.console import Patience, say
from flowalign.utils.errors import RunFailure, describe_error

OnFailure = Literal["raise", "drop_sample", "drop_group"]
"""Reaction to a failed reward. raise: end the run. drop_sample: drop the samples that need it.
drop_group: drop their whole group."""


class RewardFailure(RunFailure):
    """Reward that could not be computed, in a run that stops on failures."""


class RewardError(RewardFailure):
    """Reward model that raised an error or returned an invalid output."""

    def __init__(self, spec: RewardSpec, what: str):
        dims = f"dimension{'s' * (len(spec.dims) > 1)} {', '.join(spec.dims)}"
        super().__init__(f"reward {spec.name!r} ({dims}) {what}")


class RewardGone(RewardFailure):
    """Reward model that cannot give scores any more, which always ends a run."""


class CheckedReward(RewardModel):
    """Reward model with checked outputs; slow calls are logged.

    An error of the model ends the run. If failed rewards are dropped and the model has answered
    before, the samples of the call fail instead, with the error as their reason. An output of the
    wrong type or shape always ends the run, because every batch would have the same problem. So do
    samples that the model changed in place, because other models score them as well.
    """

    def __init__(
        self,
        model: RewardModel,
        on_failure: OnFailure = "raise",
        log: Callable[[str], None] = say,
    ):
        self.model, self.spec, self.on_failure = model, model.spec, on_failure
        self.patience = Patience(f"reward {model.spec.name!r}", log)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.thread = ThreadPoolExecutor(1, f"reward-{model.spec.name}", _use_device, (device,))
        """Thread for all calls of the model, with the device of the creating thread."""
        self.answered = False
        self.left_dtype: torch.dtype | None = None
        """Default dtype of torch after a call, if it is not float32 and was another one before."""

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score a batch, with a gradient if the media require one.

        Raises:
            RewardError: The model raised an error, returned an invalid output, or changed the
                samples in place.
            RewardGone: The model cannot give scores any more.
        """
        spec, default = self.model.spec, torch.get_default_dtype()
        media = batch.media if batch.media.requires_grad else batch.media.data
        own = replace(batch, media=media, metadata=[deepcopy(dict(m)) for m in batch.metadata])
        version = _count_changes(media)
        try:
            with self.patience, torch.set_grad_enabled(media.requires_grad):
                output = self.model.score(own)
        except RewardGone:
            raise
        # A plug-in may raise anything: it ends the run or is logged.
        except (Exception, SystemExit) as error:
            broken = RewardError(spec, f"raised {describe_error(error, _file_of(self.model))}")
            if self.on_failure == "raise" or not self.answered:
                raise broken from error
            return RewardOutput.fail(spec, dict.fromkeys(range(len(batch)), str(broken)))
        finally:
            if torch.get_default_dtype() not in (default, torch.float32):
                self.left_dtype = torch.get_default_dtype()
        self.answered = True
        if _count_changes(media) != version:
            raise RewardError(spec, "changed the samples in place: score a copy, media.clone()")
        found = check_output(spec, output, len(batch))
        if batch.media.requires_grad:
            return found
        return replace(found, values=found.values.detach())


def _use_device(device: int | None) -> None:
    """Select the device of this process, because every thread has its own current device."""
    if device is not None:
        torch.cuda.set_device(device)


def load(model: RewardModel) -> None:
    """Load a model if it is `Loadable`.

    Raises:
        ValueError, OSError: The model reports that its weights, files or server cannot be used.
        RewardError: The model raised another error.
    """
    try:
        if isinstance(model, Loadable):
            model.load()
    # A plug-in may raise anything: the user gets its name and text.
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError | OSError):
            raise
        described = describe_error(error, _file_of(model))
        raise RewardError(model.spec, f"could not be loaded: {described}") from error


def check_default_dtype(models: Sequence[CheckedReward]) -> None:
    """Raise RewardFailure if a model left torch's default dtype changed.

    Call it while no model scores, because libraries change the default dtype while they load. If
    calls overlapped the change, the message names all their models.
    """
    default = torch.get_default_dtype()
    if names := [repr(model.spec.name) for model in models if model.left_dtype == default]:
        raise RewardFailure(
            f"reward {' or '.join(names)} left torch's default dtype at {default}, which changes "
            "other rewards and the noise.\nSet it back to torch.float32 before score returns."
        )


def check_spec(model: RewardModel) -> None:
    """Raise ValueError unless a model has a valid `spec`."""
    spec, name = getattr(model, "spec", None), type(model).__name__
    if not isinstance(spec, RewardSpec):
        raise ValueError(f"reward {name} has the spec {spec!r}; its __init__ must set a RewardSpec")
    if isinstance(spec.dims, str) or not spec.dims:
        wanted = "they must be a tuple of at least one name, such as ('warmth',)"
        raise ValueError(f"reward {spec.name!r} has the dims {spec.dims!r}; {wanted}")


def check_output(spec: RewardSpec, output: object, count: int) -> RewardOutput:
    """Return a model's output for `count` samples after validation.

    Non-finite values become invalid, even if the model marked them as valid, and invalid values
    become NaN. Gradients are kept.

    Raises:
        RewardError: The output does not have one score per sample and dimension.
    """
    if not isinstance(output, RewardOutput):
        wanted = "a RewardOutput: end score with `return RewardOutput.build(self.spec, values)`"
        raise RewardError(spec, f"returned {_describe_type(output)} instead of {wanted}")
    shape = (count, len(spec.dims))
    columns = {"values": output.values, "valid": output.valid}
    if output.uncertainty is not None:
        columns["uncertainty"] = output.uncertainty
    for name, column in columns.items():
        if not isinstance(column, Tensor) or column.shape != shape or column.is_complex():
            found = _describe_type(column)
            raise RewardError(spec, f"returned {name} of {found}, expected shape {shape}")
    if output.valid.dtype != torch.bool:
        raise RewardError(spec, f"returned valid of {output.valid.dtype}, expected torch.bool")
    if not isinstance(output.reasons, Mapping) or set(output.reasons) - set(range(count)):
        raise RewardError(spec, f"returned reasons {output.reasons!r:.80}, not keyed by sample")
    if len(output.extras) not in (0, count):
        raise RewardError(spec, f"returned {len(output.extras)} extras for {count} samples")
    _check_maps(spec, output, count)
    return _mark_invalid(spec, output)


def _count_changes(media: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if torch does not count it."""
    return 0 if media.is_inference() else media._version


def _check_maps(spec: RewardSpec, output: RewardOutput, count: int) -> None:
    if not output.maps and not output.valid.any():
        return  # all samples failed, so there are no maps
    wanted = {spec.name} if spec.maps else set()
    if {*output.maps} != wanted or any(len(places) != count for places in output.maps.values()):
        raise RewardError(
            spec,
            f"returned the maps {sorted(output.maps)} for {count} samples, expected "
            f"{sorted(wanted)}: set spec.maps, and give `build` places",
        )


def _mark_invalid(spec: RewardSpec, output: RewardOutput) -> RewardOutput:
    values, claimed = output.values.float().cpu(), output.valid.cpu()
    valid = claimed & values.isfinite()
    reasons, spread = {i: str(why) for i, why in output.reasons.items()}, output.uncertainty
    for i in (claimed & ~valid).any(1).nonzero()[:, 0].tolist():
        dims = [spec.dims[r] for r in (claimed & ~valid)[i].nonzero()[:, 0].tolist()]
        lie = f"{spec.name} returned a non-finite value for {', '.join(dims)}"
        reasons[i] = f"{reasons[i]}; {lie}" if i in reasons else lie
    if spread is not None:
        spread = spread.detach().float().cpu().masked_fill(~valid, torch.nan)
    return RewardOutput(
        values.masked_fill(~valid, torch.nan), valid, reasons, spread, output.extras, output.maps
    )


def _file_of(model: RewardModel) -> str | None:
    return vars(sys.modules[type(model).__module__]).get("__file__")


def _describe_type(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
