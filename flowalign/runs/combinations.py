"""Combine run files of models and methods, and plan their memory."""

from collections.abc import Iterable, Mapping

from flowalign.runs.config import load
from flowalign.runs.config.loading import compose
from flowalign.runs.planning import plan
from flowalign.runs.run_files import Combination, ShippedFile, recipes
from flowalign.utils.strict_yaml import read_mapping

_UNPLANNED = "reward/", "clip_pairs/", "search/"
"""Folders of run files for commands other than `train`."""
_MEMORY = "memory, about"


def combinations(model: ShippedFile) -> list[Combination]:
    """Return every method of the package that is a valid run with a model's file.

    Raises:
        ValueError: The file is not in configs/models.
    """
    if model.name.partition("/")[0] != "models":
        raise ValueError(f"{model.name} is no model; name a file of configs/models")
    known = {one.name: one for one in recipes()}
    methods = [name.partition("/")[2] for name in known if name.startswith("methods/")]
    found = [combination(model, method, known) for method in methods]
    return [one for one in found if one is not None]


def combination(
    model: ShippedFile, method: str, known: Mapping[str, ShippedFile]
) -> Combination | None:
    """Return a method combined with a model's file; None if that is no valid run.

    If the method replaces the prompts and the run needs those of the model, a file from
    configs/tasks that restores them is added.
    """
    pair = known.get(f"credit/{model.name.partition('/')[2]}/{method}")
    both = model, known[f"methods/{method}"]
    behind = [both, *[(*both, one) for one in _prompts_of(model, known.values())]]
    tried = behind if pair is None else [(pair,)]
    return next(filter(_fits, map(Combination, tried)), None)


def _prompts_of(model: ShippedFile, files: Iterable[ShippedFile]) -> list[ShippedFile]:
    """Return the file that restores a model's prompts in a method's samples, if there is one."""
    own = compose([str(model.file)]).values["recipe"]["init_args"]["prompts"]
    tasks = [one for one in files if one.name.startswith("tasks/")]
    wanted = {"recipe": {"data": {"prompts": own}}}
    return [one for one in tasks if read_mapping(str(one.file)) == wanted]


def _fits(one: Combination) -> bool:
    """Return whether the files are a valid run; its data need not exist on this machine."""
    files = [str(part.file) for part in one.parts]
    try:
        data = compose(files).values["recipe"]["init_args"].get("data", {})
        stored = "path" in data.get("init_args", {})
        load(files, [f"recipe.data.path={files[0]}"] if stored else [])
    except ValueError:  # ConfigError says why; most methods fit some models only
        return False
    return True


def memory_of(recipe: ShippedFile | Combination) -> str:
    """Return the planned memory of a run, or the reason why there is none."""
    parts = recipe.parts if isinstance(recipe, Combination) else (recipe,)
    if not parts[0].complete:
        return "same as the model"
    if recipe.name.startswith(_UNPLANNED):
        return "not planned"
    try:
        return plan(load([str(part.file) for part in parts])[0])[_MEMORY]
    except ValueError as error:
        return str(error).splitlines()[0]
