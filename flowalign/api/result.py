"""Outcome of a training run: the pipeline, its metrics, and ways to save and publish it."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowalign.api.options import Options
from flowalign.runs.config import Run
from flowalign.runs.export_weights import describe_folder
from flowalign.runs.model_card import Form, Subject, Trained, check_plots
from flowalign.utils import hub
from flowalign.utils.console import is_main
from flowalign.utils.files import atomic_write
from flowalign.utils.live_objects import PREFIX
from pipelines import loaded_pipe


@dataclass(frozen=True)
class Result:
    """Outcome of a training run."""

    pipe: Any
    """Pipeline that was given, with the trained adapter, or with trained weights."""
    history: dict[str, list[float | None]]
    """Metrics by name, one entry per step, as a table; None where a step has no such metric."""
    summary: dict[str, Any]
    """Rewards before and after training, costs and seconds: content of summary.json."""
    output_dir: Path
    """Run directory, with checkpoints and report.html."""
    subject: Subject = field(repr=False)
    """Task and words of the weights, for the model card."""

    def save(self, folder: str | Path) -> None:
        """Write the adapter as `load_lora_weights` reads it, or the whole pipeline.

        Only the first of several processes writes.
        """
        if is_main():
            loaded_pipe.save_trained(self.pipe, str(folder))

    def push_to_hub(self, repo_id: str, *, license: str, private: bool = False) -> str | None:
        """Publish the weights with a model card, and return the address.

        What is published is also in the folder `hub` of the run directory. Only the first of
        several processes publishes; the others return None.

        Raises:
            ValueError: The name is invalid, the base model has no name, or the hub refuses.
        """
        if not is_main():
            return None
        adapted = loaded_pipe.has_adapter(self.pipe)
        check_target(repo_id, license, loaded_pipe.name_of(self.pipe) if adapted else None)
        folder, target = self.output_dir / "hub", "diffusers" if adapted else "merged"
        trained = Trained(self.output_dir, self.output_dir / "config.yaml", self.output_dir)
        if folder.exists():
            shutil.rmtree(folder)
        with atomic_write(folder) as partial:
            partial.mkdir()
            self.save(partial)
            form = Form(target, "fp32", folder, license)
            describe_folder(partial, self.subject, trained, form)
        return hub.publish(folder, repo_id, private)


def check_publishing(options: Options, run: Run) -> None:
    """Check the arguments for publishing, and the access to the hub if they ask for it.

    Raises:
        ValueError: An argument is missing or has no effect, or the hub is not reachable.
    """
    given = [name for name in ("hub_model_id", "hub_private_repo", "license") if name in options]
    if not options.get("push_to_hub"):
        if given:
            raise ValueError(f"{given[0]} is given without push_to_hub=True")
        return
    missing = [name for name in ("hub_model_id", "license") if name not in options]
    if missing:
        raise ValueError(f"push_to_hub needs {missing[0]}, such as {_EXAMPLES[missing[0]]!r}")
    settings: Any = run.policy
    base = settings.path if getattr(settings, "lora", None) else None
    if is_main():
        check_target(options.get("hub_model_id", ""), options.get("license", ""), base)


_EXAMPLES = {"hub_model_id": "owner/name", "license": "apache-2.0"}


def check_target(repo_id: str, license: str, base: str | None) -> None:
    """Check that weights can be published; `base` is the base model of an adapter.

    Raises:
        ValueError: The name is invalid, the base model has no name, or the hub is not reachable.
    """
    check_plots()
    hub.check_name(repo_id)
    if not license:
        raise ValueError("license is empty; the licence of the base model binds the weights")
    if base and base.startswith(PREFIX):
        raise ValueError(
            "pipe was built in memory, so the model card cannot name its base model: load it with "
            "from_pretrained,\nor call pipe.register_to_config(_name_or_path='owner/name') before "
            "training"
        )
    hub.check_publishing(repo_id)
