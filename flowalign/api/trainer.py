"""Train a pipeline that a script has loaded, on its reward functions and prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from flowalign.api.composition import DATA, HELD_OUT, PROMPTS, compose_options
from flowalign.api.data import to_columns, write_requests
from flowalign.api.notebook import notebook_callbacks
from flowalign.api.objects import name_objects, share_rewards
from flowalign.api.options import Options, Prompts, advise_in_python, check_names
from flowalign.api.result import Result, check_publishing
from flowalign.data.requests import read_located_requests
from flowalign.runs.config.loading import load_with_origins
from flowalign.runs.model_card import describe_subject
from flowalign.runs.run_directory import find_latest
from flowalign.runs.session import Session, start
from flowalign.runs.train_session import iterate, measure, planned
from flowalign.types import Request, RewardModel
from flowalign.utils.console import get_log
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.live_objects import share_objects
from flowalign.utils.tracking import read_metrics
from pipelines import loaded_pipe

Rewards = (
    Callable[..., Any]
    | RewardModel
    | Sequence[Callable[..., Any] | RewardModel]
    | Mapping[str, Callable[..., Any] | RewardModel | type[RewardModel]]
)
"""Reward functions and models: one, a list, or a mapping by name."""


class Trainer:
    """Training of a loaded pipeline; see `align` for the arguments.

    The constructor checks all settings and changes nothing. `train` runs to the end. Iterating over
    the trainer runs one step at a time and yields its metrics. Afterwards the pipeline is as it
    was, with the trained adapter; after an error, or if the iteration is left early, without it.

    Raises:
        ValueError: An argument is invalid; the message says what to change.
        TypeError: An argument is unknown.
    """

    @advise_in_python()
    def __init__(
        self,
        pipe: Any,
        rewards: Rewards | None = None,
        prompts: Prompts | None = None,
        **options: Unpack[Options],
    ):
        check_names(options)
        loaded_pipe.check_pipe(pipe, options.get("device"))
        self.pipe, self.options = pipe, options
        self._session: Session | None = None
        self._folder = TemporaryDirectory()
        models = share_rewards({} if rewards is None else rewards)
        dims = {name: model.spec.dims for name, model in models.items()}
        given = {PROMPTS: prompts, HELD_OUT: options.get("eval_prompts")}
        requests = {name: _read_prompts(one) for name, one in given.items() if one is not None}
        counts = {name: len(some) for name, some in requests.items()}
        self._composed = compose_options(pipe, dims, options, counts)
        lent = loaded_pipe.lend(pipe, Path(self._folder.name))
        folder = self._composed.output_dir
        self._requests = {str(folder / name): some for name, some in requests.items()}
        self._inputs: dict[str, Any] = dict(self._requests)
        if not isinstance(data := options.get("data"), str | None):
            self._inputs[DATA] = data
        with share_objects({**models, **self._inputs, loaded_pipe.name_of(pipe): lent}):
            self._loaded = load_with_origins(self._composed.files, self._composed.overrides())
            run = self._loaded.run
            run.recipe.check_data(run.context(run.build_rewards()))
        check_publishing(options, run)

    def train(self) -> Result:
        """Train to the last step.

        Raises:
            KeyboardInterrupt: Ctrl-C stopped the run after a checkpoint; `resume=True` continues.
        TrainingFailure: The GPU ran out of memory; the message lists settings that save some.
        """
        for _ in self:
            pass
        return self.result

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Run the remaining steps, and yield the metrics of each."""
        log, run = get_log(), self._loaded.run
        with advise_in_python(), ExitStack() as stack:
            stack.enter_context(share_objects(self._inputs))
            stack.enter_context(planned(run))
            keep = stack.enter_context(loaded_pipe.borrow(self.pipe))
            resume = self._checkpoint(self.options.get("resume", False))
            settings = name_objects(self._loaded)
            overwrite = self.options.get("overwrite", False)
            callbacks = [*self.options.get("callbacks", ()), *notebook_callbacks()]
            session = start(run, settings, log, resume, overwrite, callbacks)
            self._session = session
            if session.processes.is_main:
                for file, requests in self._requests.items():
                    write_requests(Path(file), requests)
            yield from iterate(session)
            if session.summary["status"] == "interrupted":
                log("interrupted; continue with resume=True")
                raise KeyboardInterrupt
            _use_average(session)
            keep()
            log(f"report: {session.folder / 'report.html'}")
        self._publish()

    def evaluate(self) -> dict[str, float]:
        """Evaluate `eval_prompts` now, between two steps; afterwards return the last evaluation.

        Raises:
            ValueError: There are no `eval_prompts`, or the run has not begun.
        """
        cfg = self._loaded.run.evaluation
        if cfg is None or self._session is None:
            why = "eval_prompts is not given" if cfg is None else "no step has been made"
            raise ValueError(f"nothing to evaluate: {why}")
        if not self._session.summary:
            return measure(self._session, cfg).metrics
        rows = read_metrics(self.output_dir)
        last = [row for row in rows if "evaluated_after" in row][-1]
        return {name: value for name, value in last.items() if name.startswith("eval/")}

    @property
    def output_dir(self) -> Path:
        """Return the run directory."""
        return self._composed.output_dir

    @property
    def state(self) -> Path | None:
        """Return the newest checkpoint, from which `resume=True` continues; None without one."""
        return find_latest(self.output_dir)

    @property
    def result(self) -> Result:
        """Return the outcome of a finished run."""
        if self._session is None or not self._session.summary:
            raise ValueError("the run has not ended: call train() first")
        rows = [
            {name: None if value is None else float(value) for name, value in row.items()}
            for row in read_metrics(self.output_dir)
            if "evaluated_after" not in row
        ]
        return Result(
            self.pipe,
            to_columns(rows),
            self._session.summary,
            self.output_dir,
            describe_subject(self._loaded.run),
        )

    def _publish(self) -> None:
        """Publish the weights if the options ask for it."""
        if self.options.get("push_to_hub"):
            name, license = self.options.get("hub_model_id", ""), self.options.get("license", "")
            private = self.options.get("hub_private_repo", False)
            if address := self.result.push_to_hub(name, license=license, private=private):
                get_log()(f"published: {address}")

    def _checkpoint(self, resume: bool | str) -> Path | None:
        """Return the checkpoint to continue from, or a run directory that has none yet."""
        if isinstance(resume, str):
            return Path(resume)
        newest = self.state or (self.output_dir if self.output_dir.is_dir() else None)
        return newest if resume else None


def align(
    pipe: Any,
    rewards: Rewards | None = None,
    prompts: Prompts | None = None,
    **options: Unpack[Options],
) -> Result:
    """Train a pipeline on rewards of its samples, or on preference data, and return the outcome.

    Args:
        pipe: Loaded diffusers pipeline. It is trained in place; a LoRA is added by default.
        rewards: Functions `(images, prompts) -> list[float]` and reward models, by name.
        prompts: Texts, rows with a column `prompt`, a file, or a dataset.
        **options: See `Options`.

    Raises:
        ValueError: An argument is invalid. The pipeline is unchanged.
    """
    return Trainer(pipe, rewards, prompts, **options).train()


@convert_value_errors("prompts: ")
def _read_prompts(prompts: Any) -> list[tuple[str, Request]]:
    return read_located_requests(prompts)


def _use_average(session: Session) -> None:
    """Give the policy its averaged weights, which evaluations measure."""
    if (ema := session.learner.ema) and ema.num_updates:
        ema.write()
    elif ema:
        session.log("no update was averaged yet: the pipeline has the weights of the last step")
