"""Download model files from the Hugging Face Hub, publish folders, and explain errors."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub as hf
from huggingface_hub import constants, errors  # not attributes of `hf` until they are imported

_SECONDS = 3.0
"""Time that the Hub has to answer the first request of a process."""


@cache
def contact() -> bool:
    """Contact the Hub once per process, and return whether the user has chosen to work offline.

    If the Hub does not answer, only downloaded files are used from then on. Without this, each
    missing file would wait for several attempts.
    """
    if constants.HF_HUB_OFFLINE:
        return True
    try:
        hf.get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except (OSError, _http_error()):
        constants.HF_HUB_OFFLINE = True
    return False


def _http_error() -> type[Exception]:
    """Return the HTTP error of huggingface_hub, which changes its HTTP client between versions."""
    return next(c for c in errors.HfHubHTTPError.__mro__ if c.__name__ == "HTTPError")


def file_of(model: str, name: str, subfolder: str | None = None) -> Path:
    """Return a local copy of one file of a model on the Hub.

    Raises:
        ValueError: The download failed; the message has the reason and a remedy.
    """
    contact()
    try:
        return Path(hf.hf_hub_download(model, name, subfolder=subfolder))
    except (OSError, errors.EntryNotFoundError) as error:
        raise ValueError(
            why_not(model, "/".join(filter(None, (subfolder, name))), error)
        ) from error


def cached_file(model: str, name: str, subfolder: str | None = None) -> Path | None:
    """Return the downloaded copy of a file of a model, or None; the Hub is not contacted."""
    file = hf.try_to_load_from_cache(model, "/".join(filter(None, (subfolder, name))))
    return Path(file) if isinstance(file, str) else None


def check_name(name: str) -> None:
    """Raise ValueError if a text is not the name of a model of the Hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{name!r} is not a model name such as owner/name")


def check_publishing(name: str) -> None:
    """Check that the Hub is reachable and accepts the token.

    Raises:
        ValueError: The Hub is not reachable, or rejects the token.
    """
    if hf.get_token() is None:
        raise ValueError(
            "there is no token for the Hugging Face Hub: hf auth login, or set HF_TOKEN"
        )
    try:
        hf.HfApi().whoami()
    except (OSError, _http_error(), errors.OfflineModeIsEnabled) as error:
        raise ValueError(_unpublished(name, error)) from error


def publish(folder: Path, name: str, private: bool) -> str:
    """Upload a folder as a model, and return its URL.

    Raises:
        ValueError: The upload failed; the folder is kept and can be uploaded later.
    """
    api = hf.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights by flowalign")
    except (OSError, _http_error(), errors.OfflineModeIsEnabled) as error:
        later = f"{folder} is kept; upload it later: hf upload {name} {folder}"
        raise ValueError(f"{_unpublished(name, error)}\n{later}") from error
    return str(address)


def _unpublished(name: str, error: Any) -> str:
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status in (401, 403):
        return f"the Hugging Face Hub does not let this token publish {name}: hf auth login"
    if status is not None:
        reason = " ".join(str(error).split())[:160]
        return f"the Hugging Face Hub refused {name}: {reason}"
    return f"the Hugging Face Hub could not be reached{_explain_offline()}: publish later"


def why_not(model: str, what: str, error: Exception) -> str:
    """Return a message of a few lines with the reason of a failed download, and a remedy."""
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            f"{model} is not a local folder, and the Hugging Face Hub could not be reached"
            f"{_explain_offline()}.\nDownload it on a machine with a network: hf download {model}\n"
            "or set the path of a local copy."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{model} is not a local folder, and was not found on the Hugging Face Hub.\n"
            "Check the name; a gated model needs its licence accepted, and: hf auth login"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return f"{model} is not a local folder, and on the Hugging Face Hub it has no {what}"
    reason = " ".join(str(error).split())[:200]
    return (
        f"{model} is not a local folder, and {what} could not be downloaded from the Hugging Face "
        f"Hub: {reason}"
    )


def _explain_offline() -> str:
    """Return the reason if the user has chosen to work offline; "" otherwise."""
    return ": HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE and contact() else ""
