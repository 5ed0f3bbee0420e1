"""Turn samples into rows of the table: decode them, score them in batches, name the columns."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from flowalign.curation.scoring.part_files import FIXED, OWN_COLUMNS, REFERENCES
from flowalign.data.media_record import Record
from flowalign.data.readers import Dataset
from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.functional.resizing import average_on_grid
from flowalign.rewards.checked import RewardError
from flowalign.rewards.function_reward import WrongScores
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec, Sound
from flowalign.utils.files import atomic_write
from flowalign.utils.media.decode import Clip, decode, is_video
from flowalign.utils.media.encode import read_sound
from flowalign.utils.media.media import Media, MediaProblem

_LOOKED_AT = 20
"""Number of first records that are searched for a prompt."""
_MAP_SIDE = 64
"""Largest side of a map that is written; losses resize it to the grid of latents."""

Cell = str | int | float | bool | None
Column = Cell | list[str | None] | dict[str, Cell]
_Scored = tuple[dict[str, Column], str, Tensor | None]
"""Columns, reason and map of a sample."""


@dataclass(frozen=True)
class DecodedMedium:
    """Decoded sample of a record, or the reason why it could not be decoded."""

    record: Record
    index: int
    """Index of the record in its dataset."""
    medium: int
    """Index of this sample in the record."""
    clip: Clip | None = None
    references: Sequence[Float[Tensor, "3 _ _"]] = ()
    mask: Float[Tensor, "1 h w"] | None = None
    sound: Sound | None = None
    reason: str = ""
    """Reason why it could not be decoded; empty if it was."""

    @property
    def size(self) -> int:
        """Number of bytes of its pixels."""
        return self.clip.pixels.numel() if self.clip else 0


def check_prompts(dataset: Dataset, models: Sequence[RewardModel]) -> None:
    """Raise ValueError if a reward needs prompts, and none of the first records has one."""
    asking = [model.spec.name for model in models if "prompt" in model.spec.needs]
    first = itertools.islice(dataset, _LOOKED_AT) if asking else ()
    if asking and not any(record.prompt or record.problem for record in first):
        raise ValueError(
            f"{dataset.name} has no prompts, which {', '.join(asking)} needs. Write each into a\n"
            "text file with the name of its image, list them in metadata.csv (file_name,prompt),\n"
            "or name their column: --columns prompt=COLUMN"
        )


def prepare(
    record: Record,
    index: int,
    medium: int,
    max_frames: int | None = None,
    with_sound: bool = False,
) -> DecodedMedium:
    """Decode one sample of a record, and the record's references and mask; optionally its sound."""
    if record.problem:
        return DecodedMedium(record, index, medium, reason=record.problem)
    try:
        clip = decode(record.media[medium], max_frames)
        references = [_decode_still(reference) for reference in record.references]
        mask = _decode_still(record.mask).mean(0, keepdim=True) if record.mask else None
        heard = with_sound and is_video(record.media[medium])
        sound = read_sound(record.media[medium]) if heard else None
    except MediaProblem as problem:
        return DecodedMedium(record, index, medium, reason=str(problem))
    return DecodedMedium(record, index, medium, clip, references, mask, sound)


def _decode_still(medium: Media) -> Float[Tensor, "3 h w"]:
    return decode(medium, 1).frames[0]


def assemble(items: Sequence[DecodedMedium]) -> MediaBatch:
    """Stack decoded items of one shape; frames per second are known for all or none."""
    clips = [item.clip for item in items if item.clip]
    rates = [clip.fps for clip in clips if clip.fps is not None]
    return MediaBatch(
        torch.stack([clip.pixels for clip in clips]).float().div_(255),
        [item.record.prompt for item in items],
        [item.record.metadata for item in items],
        rates,
        [item.references for item in items],
        [item.index for item in items],
        [item.mask for item in items] if any(item.mask is not None for item in items) else (),
        [item.sound for item in items] if any(item.sound for item in items) else (),
    )


def score(
    models: Sequence[RewardModel], items: Sequence[DecodedMedium], batch: MediaBatch, folder: Path
) -> list[dict[str, Column]]:
    """Score items with checked models; return a row for each, with the columns of all models.

    Maps are files in the folder `maps`, and their absolute paths are columns.
    """
    rows: list[dict[str, Column]] = [{} for _ in items]
    reasons: list[list[str]] = [[] for _ in items]
    for model in models:
        unsuited = _find_unsuited(model.spec, items)
        suited = [i for i in range(len(items)) if i not in unsuited]
        found: dict[int, _Scored] = {
            i: (_empty_columns(model.spec), why, None) for i, why in unsuited.items()
        }
        if suited:
            found |= dict(zip(suited, _score_batch(model, batch.take(suited)), strict=True))
        for i, (columns, why, place) in found.items():
            rows[i] |= columns
            reasons[i] += [why] if why else []
            if place is not None:
                file = f"{items[i].index:09d}-{items[i].medium:02d}.safetensors"
                rows[i] |= write_map(place, folder / "maps" / model.spec.name / file)
    return [
        _make_row(item, why, columns, models)
        for item, why, columns in zip(items, reasons, rows, strict=True)
    ]


def make_unscored_row(models: Sequence[RewardModel], item: DecodedMedium) -> dict[str, Column]:
    """Return the row of an item that could not be decoded."""
    columns: dict[str, Column] = {}
    for model in models:
        columns |= _empty_columns(model.spec)
    return _make_row(item, [item.reason], columns, models)


def join_fingerprints(models: Sequence[RewardModel]) -> str:
    """Return the joint fingerprint of all models; rows with different ones are not comparable."""
    return "+".join(model.spec.fingerprint() for model in models)


def _find_unsuited(spec: RewardSpec, items: Sequence[DecodedMedium]) -> dict[int, str]:
    """Return reasons for single items that would make the model reject the whole batch."""
    together = Counter(item.index for item in items)
    reasons = {}
    for i, item in enumerate(items):
        frames = len(item.clip.pixels) if item.clip else 0
        if spec.modality == "image" and frames > 1:
            reasons[i] = f"{spec.name} scores images, not videos"
        elif "fps" in spec.needs and (item.clip is None or item.clip.fps is None):
            reasons[i] = f"{spec.name} needs frames per second, which are unknown"
        elif "sound" in spec.needs and item.sound is None:
            reasons[i] = f"{spec.name} scores sound, and this file has none"
        elif "references" in spec.needs and not item.references:
            reasons[i] = f"{spec.name} needs reference images"
        elif "groups" in spec.needs and together[item.index] < len(item.record.media):
            reasons[i] = f"{spec.name} compares whole groups of readable samples of one shape"
    return reasons


def write_map(place: Float[Tensor, "*place"], file: Path) -> dict[str, Column]:
    """Write a map unless it is unknown, with sides up to `_MAP_SIDE`; return its column."""
    if not place.isfinite().all() or not place.any():
        return {}
    grid = (*place.shape[:-2], *(min(side, _MAP_SIDE) for side in place.shape[-2:]))
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial:
        save_file({"map": average_on_grid(place[None], grid)[0, 0].contiguous()}, partial)
    return {f"map/{file.parent.name}": str(file.absolute())}


def _score_batch(model: RewardModel, batch: MediaBatch) -> list[_Scored]:
    """Return columns, reason and map of every sample; a rejected sample fails alone."""
    try:
        output = model.score(batch)
    except RewardError as error:
        refusal = error.__cause__
        if not isinstance(refusal, ValueError) or isinstance(refusal, WrongScores):
            raise
        if len(batch) == 1 or "groups" in model.spec.needs:
            first_line = (str(refusal).splitlines() or [""])[0]
            why = f"{model.spec.name} refused: {first_line}"
            return [(_empty_columns(model.spec), why, None)] * len(batch)
        return [one for part in batch.chunks(1) for one in _score_batch(model, part)]
    places = output.maps.get(model.spec.name, [None] * len(batch))
    columns = [_score_columns(model.spec, output, i) for i in range(len(batch))]
    return [(columns[i], output.reasons.get(i, ""), places[i]) for i in range(len(batch))]


def _score_columns(spec: RewardSpec, output: RewardOutput, i: int) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for r, dim in enumerate(spec.dims):
        valid = bool(output.valid[i, r])
        columns |= {dim: output.values[i, r].item() if valid else None, f"{dim}_valid": valid}
        if output.uncertainty is not None:
            spread = output.uncertainty[i, r].item()
            columns[f"{dim}_uncertainty"] = spread if math.isfinite(spread) else None
    return columns


def _empty_columns(spec: RewardSpec) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for dim in spec.dims:
        columns |= {dim: None, f"{dim}_valid": False}
    return columns


def _make_row(
    item: DecodedMedium,
    reasons: Sequence[str],
    scores: Mapping[str, Column],
    models: Sequence[RewardModel],
) -> dict[str, Column]:
    record = item.record
    judgements = {"rank": record.ranks, "votes": record.votes, "rating": record.ratings}
    labels: dict[str, Column] = {
        f"{kind}/{dim}": float(values[item.medium])
        for kind, by_dim in judgements.items()
        for dim, values in by_dim.items()
    }
    labels |= {f"both_bad/{dim}": True for dim in record.both_bad}
    if record.references:
        labels[REFERENCES] = [reference.path for reference in record.references]
    if record.mask:
        labels[REQUEST_MASK] = record.mask.path or ""
    return {
        "record": record.id,
        "medium": item.medium,
        "prompt": record.prompt,
        "path": record.media[item.medium].path if record.media else None,
        # `RunningStats` splits at the separator, so no reason may hold it.
        "reason": "; ".join(reason.replace("; ", ", ") for reason in reasons) or None,
        "fingerprint": join_fingerprints(models),
        **labels,
        **scores,
        **({OWN_COLUMNS: own} if (own := _format_own(record.metadata, scores)) else {}),
    }


def _format_own(metadata: Mapping[str, Any], scores: Mapping[str, Column]) -> dict[str, Cell]:
    """Return the dataset's other columns; a name that the table uses gets the prefix `data/`."""
    own = {}
    for name, value in metadata.items():
        is_taken = name in (*FIXED, *scores, REFERENCES, REQUEST_MASK, OWN_COLUMNS) or "/" in name
        is_taken |= name.endswith(("_valid", "_uncertainty"))
        own[f"data/{name}" if is_taken else name] = _format_cell(value)
    return own


def _format_cell(value: Any) -> Cell:
    """Return a text, a number of 64 bits or a boolean as it is, and other values as JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
