"""Check that the checkpoints that a run starts from exist."""

from pathlib import Path


def check_start(path: str, key: str) -> None:
    """Raise ValueError unless the folder of a checkpoint exists; `key` names its setting."""
    if not Path(path).is_dir():
        raise ValueError(
            f"{key}: the checkpoint {path!r} does not exist (looked in {Path.cwd()}): train it "
            "first, or name a folder such as runs/RUN/checkpoints/step-000100"
        )
