"""Fetch files of models from the Hugging Face hub, and say why it gives none."""

from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)


def file_of(model: str, name: str, subfolder: str | None = None) -> Path:
    """Return a local copy of one file of a model on the hub.

    Raises:
        ValueError: the hub does not give it; the message says why, and what to do.
    """
    try:
        return Path(hf_hub_download(model, name, subfolder=subfolder))
    except (OSError, EntryNotFoundError) as error:
        raise ValueError(
            why_not(model, "/".join(filter(None, (subfolder, name))), error)
        ) from error


def why_not(model: str, what: str, error: Exception) -> str:
    """Say in a few lines why the hub does not give something of a model, and what to do."""
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        offline = ": HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        return (
            f"{model} is no folder here, and the Hugging Face hub could not be reached{offline}.\n"
            f"Download it where there is a network: hf download {model}\n"
            "or name a folder that holds it."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{model} is no folder here, and the Hugging Face hub does not give it to you.\n"
            "Check the name; a gated model needs its licence accepted, and: hf auth login"
        )
    if isinstance(error, EntryNotFoundError):
        return f"{model} is no folder here, and on the Hugging Face hub it has no {what}"
    reason = " ".join(str(error).split())[:200]
    return f"{model} is no folder here, and the Hugging Face hub does not give {what}: {reason}"
