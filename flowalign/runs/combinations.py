"""Combine run files of models and methods."""

from collections.abc import Iterable, Mapping

from flowalign.runs.config import load
from flowalign.runs.config.loading import compose
from flowalign.runs.run_files import ShippedRun, recipes
from flowalign.utils.strict_yaml import read_mapping


def combinations(model: ShippedRun) -> list[ShippedRun]:
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
    model: ShippedRun, method: str, known: Mapping[str, ShippedRun]
) -> ShippedRun | None:
    """Return a method combined with a model's file; None if that is no valid run.

    A file for the pair has tuned values, so it is preferred if it exists. If the method replaces
    the prompts and the run needs those of the model, a file from configs/tasks that restores them
    is added.
    """
    pair = known.get(f"credit/{model.name.partition('/')[2]}/{method}")
    both = model.under(known[f"methods/{method}"])
    behind = [both, *map(both.under, _prompts_of(model, known.values()))]
    return next(filter(_fits, [pair] if pair else behind), None)


def _prompts_of(model: ShippedRun, files: Iterable[ShippedRun]) -> list[ShippedRun]:
    """Return the file that restores a model's prompts in a method's samples, if there is one."""
    own = compose([str(model.files[0])]).values["recipe"]["init_args"]["prompts"]
    tasks = [one for one in files if one.name.startswith("tasks/")]
    wanted = {"recipe": {"data": {"prompts": own}}}
    return [one for one in tasks if read_mapping(str(one.files[0])) == wanted]


def _fits(one: ShippedRun) -> bool:
    """Return whether the files are a valid run; its data need not exist on this machine."""
    files = [str(file) for file in one.files]
    try:
        data = compose(files).values["recipe"]["init_args"].get("data", {})
        stored = "path" in data.get("init_args", {})
        load(files, [f"recipe.data.path={files[0]}"] if stored else [])
    except ValueError:  # ConfigError says why; most methods fit some models only
        return False
    return True
