"""Add failures and stragglers to a capacity plan: rows of simulated runs by staleness."""

from dataclasses import dataclass, replace

from flowalign.runs.planning.capacity import balance
from flowalign.runs.planning.capacity_plan import Capacity
from flowalign.runs.planning.fleet import Fleet, Outcome, simulate, young_interval

FAILURE_HOURS = 50_000.0
"""Default mean time between failures of a GPU. Source: 419 unexpected interruptions in 54 days on
16,384 H100 when training Llama 3, 50,700 hours each (arXiv:2407.21783, section 3.3.4)."""
_SEEDS = range(3)
_MOST_STEPS = 2000
"""Longest simulated run; the rows are means per step."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Failures and delays of a simulated run."""

    failure_hours: float = FAILURE_HOURS
    """Mean time between failures of one GPU."""
    restart: float = 600.0
    """Seconds from a failure until training continues."""
    save: float = 30.0
    """Seconds of a checkpoint."""
    spread: float = 0.1
    """Standard deviation of the logarithm of stage times."""


def fleets(found: Capacity, count: int, every: int, trouble: Trouble) -> dict[str, Fleet]:
    """Return the fleets to compare, by name: synchronous, and separate workers with staleness.

    Reward and rollout workers are one stage with the time of the slower kind.
    """
    exchange = found.stages.get("communication", 0.0)
    shared = found.seconds - found.stages["update"] - exchange
    together = Fleet(
        trainers=count,
        samplers=0,
        rollout=shared,
        update=found.stages["update"] + exchange,
        spread=trouble.spread,
        failure=3600 * trouble.failure_hours,
        every=every,
        save=trouble.save,
        restart=trouble.restart,
    )
    result = {"synchronous": together}
    pools = found.pools
    kinds = sum(seconds > 0 for seconds in pools.values())
    if kinds > 1 and count >= kinds:
        counts = dict(zip(pools, balance([*pools.values()], count), strict=True))
        times = {name: pools[name] / counts[name] for name in pools if counts[name]}
        update = times.pop("trainers")
        workers = replace(
            together,
            trainers=counts["trainers"],
            samplers=count - counts["trainers"],
            rollout=max(times.values()),
            update=update + exchange,
        )
        result |= {f"workers, staleness {s}": replace(workers, staleness=s) for s in (0, 1, 2)}
    return result


def fleet_rows(
    found: Capacity, count: int, steps: int, every: int, trouble: Trouble
) -> dict[str, str]:
    """Return the rows of the simulation, means of three seeds."""
    simulated = min(steps, _MOST_STEPS)
    saved = every or simulated
    rows = {}
    for name, fleet in fleets(found, count, saved, trouble).items():
        runs = [simulate(fleet, simulated, seed) for seed in _SEEDS]
        rows[name] = _describe(runs, simulated)
    interval = young_interval(trouble.save, 3600 * trouble.failure_hours, count)
    best = max(1, round(interval / found.seconds))
    rows["checkpoints that lose least"] = f"every {best:,} steps (Young); the run file: {saved}"
    return rows


def _describe(runs: list[Outcome], steps: int) -> str:
    seconds, trained, restarts, lost = (
        sum(values) / len(runs)
        for values in zip(
            *((one.seconds, one.training, one.restarts, one.lost) for one in runs), strict=True
        )
    )
    return (
        f"{seconds / steps:,.3g} seconds per step, trainers update {trained / seconds:.0%} of the "
        f"time; in {steps:,} steps {restarts:.3g} restarts, {lost:.3g} repeated steps"
    )
