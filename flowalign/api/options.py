"""Define the keyword arguments of `align` and `Trainer`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict

from flowalign.runs.session import Callback
from flowalign.training.recipe import Recipe
from flowalign.utils.errors import RunFailure, suggest_name

Prompts = str | Sequence[str] | Sequence[Mapping[str, Any]] | Any
"""Prompts: a file, a list of texts, a list of rows with a column `prompt`, or a dataset of rows."""


class Options(TypedDict, total=False):
    """Keyword arguments of `align` and `Trainer`; an absent one keeps the run file's value."""

    method: str | Recipe
    """Name of a file in configs/methods, a run file, or a recipe such as
    `flowalign.training.PolicyGradient`, whose prompts or data are used unless the call has its own
    (default: flow_grpo)."""
    data: Any
    """Preference data, for methods that train on stored pairs or labels: a path or name, a dataset,
    or rows with columns as in Pick-a-Pic or TRL."""
    batch_size: int
    """Number of pairs or labelled samples per training step."""
    reward_weights: Mapping[str, float | Mapping[str, float]]
    """Weight of each reward by name, or of each of its dimensions (default: 1)."""
    eval_prompts: Prompts
    """Held-out prompts. They are sampled before and after training (default: none)."""
    eval_steps: int
    """Number of steps between evaluations; 0: only before and after training (default: 0)."""
    num_steps: int
    """Number of training steps."""
    samples_per_prompt: int
    """Number of samples that are compared per prompt."""
    prompts_per_step: int
    """Number of prompts per training step."""
    num_inference_steps: int
    """Number of denoising steps in training."""
    guidance_scale: float
    """Classifier-free guidance."""
    height: int
    """Height in pixels (default: that of the model's run file, at most the pipeline's own)."""
    width: int
    """Width in pixels (default: as for the height)."""
    num_frames: int
    """Number of frames, for pipelines that make videos."""
    learning_rate: float
    """Learning rate of AdamW."""
    lora_rank: int
    """Rank of the trained adapter. Alpha becomes twice the rank."""
    micro_batch: int
    """Number of samples per network call. It changes time and memory only."""
    device: Literal["cpu", "cuda"]
    """Device of the pipeline; another one than the pipeline's is refused."""
    seed: int
    """Seed of all random draws (default: 0)."""
    output_dir: str
    """Run directory (default: runs/ and the method, with a number from the second run on)."""
    overwrite: bool
    """Whether to replace an earlier run in the directory (default: False)."""
    resume: bool | str
    """Whether to continue the run in the directory from its newest checkpoint, or the path of
    another checkpoint (default: False)."""
    callbacks: Sequence[Callback]
    """Objects that are called after steps and evaluations."""
    report_to: Sequence[Literal["tensorboard", "wandb", "trackio"]]
    """Trackers in addition to metrics.jsonl (default: none)."""
    push_to_hub: bool
    """Whether to publish the weights after training, with a model card (default: False)."""
    hub_model_id: str
    """Name of the published model: owner/name."""
    hub_private_repo: bool
    """Whether the published model is private (default: False)."""
    license: str
    """Licence of the published weights, by its hub id; that of the base model binds them."""
    model: Mapping[str, Any]
    """Further settings of the policy, as in a run file; `class_path` chooses another class."""
    settings: Mapping[str, Any]
    """Further settings, by dotted key of a run file, such as {"recipe.sampling.eta": 0.7}."""


def check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown keyword argument, and name a similar one."""
    for name in options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown argument {name!r}; {suggest_name(name, Options.__annotations__)}")


_IN_PYTHON = (
    (r"^command line: ", ""),
    (r"--resume (PATH|\S*/\S*)", r"resume='\1'"),
    (r"--(resume|overwrite)\b", r"\1=True"),
    (r"--columns (\w+)=(\S+)", r"columns={'\1': '\2'}"),
    (r"--schema\b", "settings={'recipe.data.schema': ...}, or map columns with columns={...}"),
    (r"see flowalign recipes", "flowalign.runs.run_files.list_recipes() lists them"),
    (r"`flowalign pairs`", "flowalign.make_pairs"),
    (r"`flowalign score`", "flowalign.score"),
    (r", or --format jsonl|\nflowalign check lists .*", ""),
    (r"--(?=[a-z])", ""),
)
"""Words of the command line in messages, and what to write in Python; in this order."""


@contextmanager
def advise_in_python() -> Iterator[None]:
    """Name arguments instead of command-line options in the errors that leave the context.

    It is a context manager and a function decorator.
    """
    try:
        yield
    except (ValueError, RunFailure) as error:
        text = str(error)
        for pattern, words in _IN_PYTHON:
            text = re.sub(pattern, words, text)
        if text != str(error):
            error.args = (text,)
        raise
