"""Plans of the policies in `configs/`, so that `flowalign check` builds no network for them.

A plan builds networks on the meta device. This imports diffusers, transformers and peft, which
takes seven of ten seconds of CPU time. `assets/bench/plans.py` writes the records. Each belongs to
one policy class with all settings that a plan depends on, to the configuration files of the model,
to the code that plans, and to the versions of the libraries. Any other plan is computed, so a
change of the code costs time, and never returns an outdated plan.
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
_LIBRARIES = ("diffusers", "torch", "transformers")
_COUNTED = ("evaluation_flops", "decode_flops")


def find_plan(policy: Any, compute: Callable[[], ModelPlan]) -> ModelPlan | None:
    """Return the recorded plan of a policy, or None. `compute` makes it for further schedules."""
    if (record := read_records().get(identify(policy))) is None:
        return None
    policy.folder.compare_downloads()
    return restore(record["plan"], compute)


def identify(policy: Any) -> str:
    """Return the key of a policy's record."""
    kind, known = type(policy), vars(policy.codec) | vars(policy.network) | vars(policy)
    names = sorted(inspect.signature(kind.__init__).parameters.keys() - _UNUSED)
    settings = {name: repr(known[name]) for name in names}
    settings["quantization"] = repr(policy.network.setup.quantization)
    settings["vae_tile"] = repr(policy.network.setup.vae_tile)
    settings["guided"] = str(policy.guidance > 1)
    versions, code = {n: version(n) for n in _LIBRARIES}, _digest_code(kind, type(policy.codec))
    name = f"{kind.__module__}.{kind.__qualname__}"
    content = [name, settings, policy.folder.describe(), versions, code]
    return _digest(json.dumps(content).encode())


@cache
def _digest_code(*classes: type) -> str:
    """Return the digest of the code that plans: shared modules, and those of these classes."""
    root, bases = Path(__file__).parents[1], {base for one in classes for base in one.__mro__}
    own = {Path(inspect.getfile(one)) for one in bases if one.__module__.startswith("pipelines.")}
    shared = {*root.glob("*.py"), *root.glob("network/*.py"), *root.glob("parts/**/*.py")}
    return _digest(b"".join(file.read_bytes() for file in sorted(own | shared)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


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
        "trusted": True,
    }
    return ModelPlan(**{**fields, **special, **counted})


def _schedule(known: Mapping[str, list[float]], compute: Callable[[], ModelPlan], num: int) -> Any:
    if (sigmas := known.get(str(num))) is not None:
        return torch.tensor(sigmas)
    return compute().sigmas(num)


@cache
def read_records() -> Mapping[str, Any]:
    """Return the records by key: a run file with the policy, and its plan."""
    return json.loads(FILE.read_text(encoding="utf-8"))
