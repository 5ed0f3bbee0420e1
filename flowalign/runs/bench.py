"""Time a step by stage, and its floor.

The floor are the network evaluations of the step back to back: a lower bound of its duration.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flowalign.runs.capacity import MEASURED, backward_passes, recognise_gpu
from flowalign.runs.config import Run
from flowalign.runs.planning import plan_step
from flowalign.runs.session import Session, start
from flowalign.training.learner import Learner
from flowalign.training.recipe import StepWork
from flowalign.training.reference import FrozenCopy, Guided
from flowalign.utils.costs import Stages, is_checking


class Floor:
    """Recorder that counts network evaluations and can repeat them.

    Two evaluations have the same kind if their inputs have equal shapes and dtypes, and if both
    record a gradient or both do not. The last inputs of each kind are kept. Evaluations of checks
    are left out while stages are measured.
    """

    def __init__(self, learner: Learner):
        self.calls: Counter[Hashable] = Counter()
        """Number of evaluations of each kind."""
        self._inputs: dict[Hashable, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        self._records = True
        plain = [f.field if isinstance(f, Guided) else f for f in learner.fields.values()]
        copies = [f.policy.denoiser for f in plain if isinstance(f, FrozenCopy)]
        self.networks: list[nn.Module] = [learner.policy.denoiser, *copies]
        for network in self.networks:
            network.register_forward_pre_hook(self._note, with_kwargs=True)

    def clear(self) -> None:
        """Forget the evaluations so far."""
        self.calls.clear()
        self._inputs.clear()

    def run(self) -> None:
        """Repeat the recorded evaluations, with a backward pass if they recorded a gradient."""
        self._records = False
        try:
            for kind, count in self.calls.items():
                for _ in range(count):
                    self._evaluate(kind)
        finally:
            self._records = True
        for network in self.networks:
            network.zero_grad(set_to_none=True)

    def _note(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._records or is_checking():
            return
        given = tree_map(_detach, (args, kwargs))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        device = tensors[0].device.type
        mode = torch.is_grad_enabled(), device, _autocast(device)
        kind = id(network), mode, tuple((tuple(t.shape), t.dtype) for t in tensors)
        self.calls[kind] += 1
        self._inputs[kind] = network, *given

    def _evaluate(self, kind: Any) -> None:
        network, args, kwargs = self._inputs[kind]
        records, device, dtype = kind[1]
        with (
            torch.set_grad_enabled(records),
            torch.autocast(device, dtype, enabled=dtype is not None),
        ):
            made = network(*args, **kwargs)
        if records:
            torch.stack([part.float().mean() for part in tree_leaves(made)]).sum().backward()


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


_GIB = 2**30


def measure(run: Run, repeats: int) -> dict[str, float]:
    """Return median seconds of the stages of a step and of the floor, and their quotient.

    The first step is not measured. The stages are sample, decode, reward (the time spent waiting)
    and update (everything else except the checks of the first steps). `cpu_seconds` count this
    process only; compare them on a machine that others use. With a GPU, `gib/` are the peak GiB of
    each stage. `check/` are measurements of the first step, such as the deviation of the ratio from
    1. `share_of_peak` is the rate of the step's network evaluations relative to the GPU's peak rate
    in bf16, if it is known. `seconds_per/` are the costs of one unit of work for `flowalign check
    --costs`: an evaluation while sampling, one in the update without backward pass, a decode, and a
    reward call.

    Raises:
        ValueError: The run cannot be started.
    """
    model, step = plan_step(run)
    with start_temporarily(run) as session:
        result = _measure_steps(session, repeats)
    passes = backward_passes(model, run.speed.kept_blocks)
    if (gpu := recognise_gpu(run.device)) and (each := model.evaluation_flops()):
        rollout = step.work.count("sampling") + step.work.count("completing")
        rate = (rollout + step.work.of_update(passes)) * each / result["seconds/step"]
        result["share_of_peak"] = rate / gpu.flops
    return result | unit_seconds(result, step.work, passes)


def unit_seconds(
    seconds: Mapping[str, float], work: StepWork, passes: int | float
) -> dict[str, float]:
    """Divide the seconds of the stages of a step by its planned work.

    A stage without planned work costs nothing.
    """
    counts = {
        "evaluation": ("sample", work.count("sampling") + work.count("completing")),
        "update": ("update", work.of_update(passes)),
        "decode": ("decode", work.decodes),
        "reward": ("reward", work.reward_calls),
    }
    found = {
        unit: seconds.get(f"seconds/{stage}", 0.0) / count if count else 0.0
        for unit, (stage, count) in counts.items()
    }
    return {MEASURED + unit: value for unit, value in found.items()}


@contextmanager
def start_temporarily(run: Run) -> Iterator[Session]:
    """Start a run in a directory that is removed afterwards.

    Raises:
        ValueError: The run cannot be started.
    """
    with TemporaryDirectory(prefix="flowalign-bench-") as folder:
        at = replace(run, output_dir=str(Path(folder) / "run"))
        session = start(at, "", lambda _: None)
        try:
            yield session
        finally:
            assert session.claim is not None, "a single process"
            session.claim.release()


def _measure_steps(session: Session, repeats: int) -> dict[str, float]:
    """Run steps of a started run; after each, time its network evaluations alone."""
    floor, costs, rows = Floor(session.learner), session.costs, list[dict[str, float]]()
    steps = session.loop.run(range(1 + repeats))
    checks = {name: v for name, v in next(steps).items() if name.startswith("check/")}
    for _ in range(repeats):
        floor.clear()
        with Stages("update") as stages:
            next(steps)
        before = costs.network_evaluations
        with Stages("floor") as bare:
            floor.run()
        evaluations = costs.network_evaluations - before
        rows.append(_build_row(stages, bare) | {"network_evaluations": float(evaluations)})
    session.learner.optimizer.zero_grad(set_to_none=True)
    result = {name: median(row.get(name, 0.0) for row in rows) for name in rows[-1]}
    examples = session.run.recipe.examples_per_step
    return checks | result | {"images_per_second": examples / result["seconds/step"]}


def _build_row(stages: Stages, bare: Stages) -> dict[str, float]:
    """Return the measurements of one step."""
    seconds = {n: value for n, value in stages.seconds.items() if n != "check"} | bare.seconds
    step = sum(seconds.values()) - seconds["floor"]
    own = step - sum(seconds.get(name, 0.0) for name in ("decode", "reward"))
    used = {n: s for n, s in stages.processor_seconds.items() if n != "check"}
    peaks = {f"gib/{n}": size / _GIB for n, size in (stages.peaks | bare.peaks).items()}
    peaks.pop("gib/check", None)
    return {
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "seconds/step": step,
        "cpu_seconds/step": sum(used.values()),
        "cpu_seconds/floor": bare.processor_seconds["floor"],
        "overhead": step / seconds["floor"],
        "overhead_without_reward": own / seconds["floor"],
        **peaks,
    }
