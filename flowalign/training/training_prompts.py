"""Define the setting of the training prompts, which most recipes and data sources have."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingPrompts:
    """Setting of recipes and data sources that sample the policy for prompts of one file."""

    prompts: str
    """Path of the training prompts: a text file, one prompt per line, or JSONL with a field
    `prompt`, plus `image`, `images` or `mask` if the policy takes them."""

    @property
    def prompt_files(self) -> list[str]:
        """Return the path of the training prompts."""
        return [self.prompts]
