"""Time a step by stage, and compare it with its floor: its network evaluations back to back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from flowalign.runs.bench.floor import Floor
from flowalign.runs.config import Run
from flowalign.runs.planning.capacity import backward_passes
from flowalign.runs.planning.capacity_plan import MEASURED
from flowalign.runs.planning.plan import plan_step
from flowalign.runs.session.session import Session, start
from flowalign.training.recipe_plan import StepWork
from flowalign.utils.costs import Stages

_GIB = 2**30


def measure(run: Run, repeats: int) -> dict[str, float]:
    """Return median seconds of the stages of a step and of the floor, and their quotient.

    The first step is not measured. The stages are sample, decode, reward (the time spent waiting)
    and update (everything else except the checks of the first steps). `cpu_seconds` count this
    process only; compare them on a machine that others use. With a GPU, `gib/` are the peak GiB of
    each stage. `check/` are measurements of the first step, such as the deviation of the ratio from
    1. `seconds_per/` are the costs of one unit of work for `flowalign check --costs`: an evaluation
    while sampling, one in the update without backward pass, a decode, and a reward call.

    Raises:
        ValueError: The run cannot be started.
    """
    model, step = plan_step(run)
    with start_temporarily(run) as session:
        result = _measure_steps(session, repeats)
    return result | unit_seconds(result, step.work, backward_passes(model))


def unit_seconds(seconds: Mapping[str, float], work: StepWork, passes: int) -> dict[str, float]:
    """Divide the seconds of the stages of a step by its planned work.

    A stage without planned work costs nothing.
    """
    counts = {
        "evaluation": ("sample", work.sampling + work.completing),
        "update": ("update", work.training * passes + work.frozen),
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
