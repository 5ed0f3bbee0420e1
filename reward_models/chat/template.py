"""Reads the prompts of judges, text with slots for words and images, and encodes the images."""

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowalign.types import MediaBatch
from flowalign.utils.files import bundled
from flowalign.utils.hub import file_of
from reward_models.backbones.pixels import evenly, sample_frames
from reward_models.backbones.reward_bases import to_uint8

_FOLDER = Path(__file__).parent / "prompts"
_UNIFIED = "github.com/CodeGoat24/UnifiedReward"
_RATIONAL = "github.com/X-GenGroup/Flow-Factory, as it asks RationalRewards"
OFFICIAL = {
    "unified_reward_point": f"{_UNIFIED}, inference_qwen/UnifiedReward-2.0-inference",
    "unified_reward_video": f"{_UNIFIED}, inference_qwen/UnifiedReward-2.0-inference",
    "unified_reward_pair_score": f"{_UNIFIED}, inference_qwen/UnifiedReward-2.0-inference",
    "unified_reward_final": _UNIFIED,
    "unified_reward_pair": _UNIFIED,
    "unified_reward_think": f"{_UNIFIED}, UnifiedReward-Think/inference_qwen",
    "unified_reward_think_video": f"{_UNIFIED}, UnifiedReward-Think/inference_qwen",
    "unified_reward_flex": f"{_UNIFIED}, UnifiedReward-Flex",
    "unified_reward_edit_rank": f"{_UNIFIED}, UnifiedReward-Edit",
    "unified_reward_edit_score": f"{_UNIFIED}, UnifiedReward-Edit",
    "edit_score_sc": "github.com/VectorSpaceLab/EditScore, editscore/vie_prompts.py",
    "edit_score_pq": "github.com/VectorSpaceLab/EditScore, editscore/vie_prompts.py",
    "rational_rewards_t2i": _RATIONAL,
    "rational_rewards_edit": _RATIONAL,
    "rational_rewards_pair": _RATIONAL,
    "video_score2": "the model card of VideoScore2",
    "magic_assessor": "the code of MagicMirror (arXiv:2509.10260), get_prompt of base_info.py",
}
"""Location of the text that a judge was trained with, by the bundled prompt in its place."""
_SLOT = re.compile(r"\{(prompt|media|references|first|second|task|criterion|question)\}")
_USER = "\n=== user ===\n"


@dataclass(frozen=True)
class Template:
    """Text of a user prompt, with an optional system prompt."""

    user: str
    system: str = ""
    official: str = ""
    """Location of the text that the judge was trained with, if this is another; else empty."""

    def render(self, **slots: str | Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages, with words and images (data URLs) inserted into their slots.

        The content of a slot is not searched for slots, because a prompt may contain `{media}`.
        """
        parts: list[dict[str, Any]] = []
        for i, piece in enumerate(_SLOT.split(self.user)):
            value = piece if i % 2 == 0 else slots[piece]
            if not isinstance(value, str):
                parts += [{"type": "image_url", "image_url": {"url": url}} for url in value]
            elif parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += value
            elif value:
                parts.append({"type": "text", "text": value})
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": parts}]


def read_template(source: str, slots: Sequence[str], optional: Sequence[str] = ()) -> Template:
    """Read a prompt.

    `source` is the name of a bundled prompt, the path of a file, `hub:owner/repository/path` for a
    file of a model on the Hugging Face Hub, or `package:name/path` for a file of an installed
    package.

    Raises:
        ValueError: It does not exist, lacks one of the slots, or has an unknown slot.
    """
    system, _, user = _read_text(source).rpartition(_USER)
    found = set(_SLOT.findall(user))
    if found - {*slots, *optional} or set(slots) - found:
        wanted = f"it must have {sorted(slots)} and may have {sorted(optional)}"
        raise ValueError(f"template {source} has the slots {sorted(found)}; {wanted}")
    return Template(user, system, OFFICIAL.get(source, "") if _is_bundled(source) else "")


def _is_bundled(source: str) -> bool:
    return (_FOLDER / f"{source}.txt").is_file()


def _read_text(source: str) -> str:
    kind, _, rest = source.partition(":")
    try:
        if kind == "hub":
            if not (found := re.fullmatch(r"([^/]+/[^/]+)/(.+)", rest)):
                raise ValueError(f"template {source!r} must be hub:owner/repository/path")
            return file_of(found[1], found[2]).read_text(encoding="utf-8")
        if kind == "package":
            package, _, name = rest.partition("/")
            return (resources.files(package) / name).read_text(encoding="utf-8")
        path = _FOLDER / f"{source}.txt" if _is_bundled(source) else Path(bundled(source))
        if path.exists() and not path.is_file():
            raise FileNotFoundError(path)  # reading a device would never end
        return path.read_text(encoding="utf-8")
    except (OSError, ModuleNotFoundError, UnicodeDecodeError) as error:
        names = sorted(p.stem for p in _FOLDER.glob("*.txt"))
        raise ValueError(
            f"template {source!r} cannot be read ({type(error).__name__}); give a file, "
            f"hub:owner/repository/path, package:name/path, or one of {', '.join(names)}"
        ) from error


def encode_image(picture: Float[Tensor, "3 h w"]) -> str:
    """Encode an image in [0, 1] as a PNG in a data URL: lossless after rounding to 8 bits.

    JPEG of quality 75 would change a pixel by 3 to 4 levels on average, which affects a judge of
    artefacts.
    """
    bits = to_uint8(picture[None])[0]
    return _png(bits.tobytes(), bits.shape[1], bits.shape[0])


def encode_images(
    pictures: Sequence[Float[Tensor, "3 h w"]] | Float[Tensor, "n 3 h w"],
) -> list[str]:
    """Encode every image, in order."""
    return [encode_image(picture) for picture in pictures]


def encode_frames(
    sample: MediaBatch, most: int = 1, choose: Callable[[int, int], list[int]] = evenly
) -> list[str]:
    """Encode at most `most` frames of a batch of one; by default evenly spaced frames."""
    return encode_images(sample_frames(sample.media[0].detach(), most, choose))


def encode_source(sample: MediaBatch) -> list[str]:
    """Encode the first reference of a batch of one that passed the screen."""
    return [encode_image(sample.references[0][0])]


def encode_references(sample: MediaBatch) -> list[str]:
    """Encode all references of a batch of one, followed by its mask if it has one."""
    pictures = list(sample.references[0]) if sample.references else []
    masks = [mask.expand(3, -1, -1) for mask in sample.masks if mask is not None]
    return [encode_image(picture) for picture in (*pictures, *masks)]


@lru_cache(maxsize=32)  # each image of a group occurs in many pairs
def _png(bits: bytes, width: int, height: int) -> str:
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), bits).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
