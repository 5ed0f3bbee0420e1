"""Check that the checkpoints that a run starts from exist."""

from pathlib import Path

from flowalign.training.checkpoint_files import check_weights


def check_start(path: str, key: str) -> None:
    """Raise ValueError unless the weights of a checkpoint are intact; `key` names its setting."""
    if not Path(path).is_dir():
        raise ValueError(
            f"{key}: the checkpoint {path!r} does not exist (looked in {Path.cwd()}): train it "
            "first, or name a folder such as runs/RUN/checkpoints/step-000100"
        )
    try:
        check_weights(Path(path))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
