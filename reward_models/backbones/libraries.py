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
    import transformers
    from torchvision.transforms import functional as TF
else:
    accelerate, open_clip = LazyModule("accelerate"), LazyModule("open_clip")
    peft, transformers = LazyModule("peft"), LazyModule("transformers")
    TF = LazyModule("torchvision.transforms.functional")

__all__ = ["TF", "accelerate", "open_clip", "peft", "transformers"]
