"""Record the plans of the policies in `configs/` for `flowalign check`.

python assets/bench/plans.py     # two minutes; from configuration files, without weights
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from flowalign.runs.config import Run, load
from flowalign.runs.planning import plan
from flowalign.types import ModelPlan
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import write_text
from pipelines.parts.recorded_plans import FILE, describe, identify
from pipelines.policy import DiffusersPolicy

CONFIGS = Path(__file__).parents[2] / "configs"


class Recorder:
    """Computes each plan once, and collects the schedules that runs ask for."""

    def __init__(self):
        self.plans: dict[str, ModelPlan] = {}
        self.schedules: dict[str, dict[int, Tensor]] = {}

    def find_plan(self, policy: Any, compute: Callable[[], ModelPlan]) -> ModelPlan:
        """Return the plan of a policy; a replacement of `recorded_plans.find_plan`."""
        key = identify(policy)
        if key not in self.plans:
            self.plans[key], self.schedules[key] = compute(), {}
        made, known = self.plans[key], self.schedules[key]
        return replace(made, sigmas=lambda num: known.setdefault(num, made.sigmas(num)))


def runs() -> Iterator[tuple[str, Run]]:
    """Yield the run files of `configs/` with a policy that has recorded plans, with name."""
    for file in sorted(CONFIGS.rglob("*.yaml")):
        try:
            run, _ = load([str(file)], [])
        except ConfigError:  # a method, a benchmark, or a file that needs an option
            continue
        if isinstance(run.policy, DiffusersPolicy) and not run.policy.network.computes_at_load:
            yield str(file.relative_to(CONFIGS)), run


def main() -> None:
    """Write a line per policy, with and without guidance, with the schedules of its run files."""
    recorder, files = Recorder(), {}
    with patch("pipelines.policy.find_plan", recorder.find_plan):
        for file, run in runs():
            files.setdefault(identify(run.policy), file)
            plan(run)
            if run.policy.guidance > 1 and run.policy.has_guidance:
                with suppress(ConfigError, ValueError):  # some recipes need guidance
                    plain = replace(run, guidance="off")
                    plan(plain)
                    files.setdefault(identify(plain.policy), file)
    plans = {
        key: {"file": file, "plan": describe(recorder.plans[key], recorder.schedules[key])}
        for key, file in files.items()
    }
    lines = ",\n".join(f'"{key}": {json.dumps(one)}' for key, one in plans.items())
    write_text(FILE, f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
