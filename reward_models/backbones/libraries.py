"""Libraries that take seconds to import, and that settings and help do not need.

Use `transformers.X` inside functions instead of `from transformers import X`: the first attribute
imports the library. Annotations of functions and base classes would import it at once.
"""

from typing import TYPE_CHECKING

from flowalign.utils.imports import LazyModule

if TYPE_CHECKING:
    import accelerate
    import open_clip
    import peft
    import timm
    import transformers
    from torchvision.transforms import functional as TF
else:
    accelerate, peft, transformers = map(LazyModule, ("accelerate", "peft", "transformers"))
    open_clip, timm = LazyModule("open_clip", "clip"), LazyModule("timm", "clip")
    TF = LazyModule("torchvision.transforms.functional")
_outputs = LazyModule("transformers.modeling_outputs")

__all__ = ["TF", "accelerate", "name_cache", "open_clip", "peft", "timm", "transformers"]


def name_cache() -> str:
    """Return the name of past keys and values in calls and outputs of the installed transformers.

    Releases up to 5.17 have `past_key_values`; 5.24 has `cache`, and 5.40 takes no other.
    """
    fields = _outputs.BaseModelOutputWithPast.__dataclass_fields__
    return "cache" if "cache" in fields else "past_key_values"
