"""Plans of the policies in `configs/`, so that `flowalign check` builds no network for them.

A plan builds networks on the meta device. This imports diffusers, transformers and peft, which
takes seven of ten seconds of CPU time. `assets/bench/plans.py` writes the records. Each belongs to
one policy class with all settings that a plan depends on, to the configuration files of the model,
and to the versions of the libraries. Any other plan is computed.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.types import ModelPlan, Saving

FILE = Path(__file__).with_name("recorded_plans.json")
_UNUSED = {"self", "path", "guidance"}
"""Arguments of policies that are identified in another way, see `identify`."""
_COUNTED = ("evaluation_flops", "decode_flops")


def find_plan(policy: Any, compute: Callable[[], ModelPlan]) -> ModelPlan | None:
    """Return the recorded plan of a policy, or None. `compute` makes it for further schedules."""
    if not (records := read_records()) or (record := records.get(identify(policy))) is None:
        return None
    policy.folder.compare_downloads()
    return restore(record["plan"], compute)


def identify(policy: Any) -> str:
    """Return the key of a policy's record."""
    kind, known = type(policy), vars(policy.codec) | vars(policy.network) | vars(policy)
    names = sorted(inspect.signature(kind.__init__).parameters.keys() - _UNUSED)
    settings = {name: repr(known[name]) for name in names}
    settings["quantization"] = repr(policy.network.setup.quantization)
    settings["guided"] = str(policy.guidance > 1)
    content = f"{kind.__module__}.{kind.__qualname__}", settings, policy.folder.describe()
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def library_versions() -> dict[str, str]:
    """Return the major and minor versions of the libraries that define the networks."""
    names = ("diffusers", "torch", "transformers")
    return {name: ".".join(version(name).split(".")[:2]) for name in names}


def describe(plan: ModelPlan, schedules: Mapping[int, Tensor]) -> dict[str, Any]:
    """Return a plan as values for JSON, with the schedules of these numbers of steps."""
    fields = vars(plan) | {name: getattr(plan, name)() for name in _COUNTED}
    fields["savings"] = [vars(saving) for saving in plan.savings]
    fields["sigmas"] = {str(num): sigmas.tolist() for num, sigmas in sorted(schedules.items())}
    return fields


def restore(fields: Mapping[str, Any], compute: Callable[[], ModelPlan]) -> ModelPlan:
    """Return the plan that `describe` wrote."""
    counted = {name: partial(int, fields[name]) for name in _COUNTED}
    special = {
        "latent_shape": tuple(fields["latent_shape"]),
        "savings": tuple(Saving(**saving) for saving in fields["savings"]),
        "sigmas": partial(_schedule, fields["sigmas"], compute),
    }
    return ModelPlan(**{**fields, **special, **counted})


def _schedule(known: Mapping[str, list[float]], compute: Callable[[], ModelPlan], num: int) -> Any:
    if (sigmas := known.get(str(num))) is not None:
        return torch.tensor(sigmas)
    return compute().sigmas(num)


@cache
def read_records() -> Mapping[str, Any]:
    """Return the records by key; none if they were made with other versions of the libraries."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content["plans"] if content["versions"] == library_versions() else {}
