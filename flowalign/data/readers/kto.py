"""Read single images or videos with a thumbs-up or thumbs-down, for KTO."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import REQUEST_MASK, Fields
from flowalign.data.readers.preferences import read_safetensors_path
from flowalign.data.readers.schema import Schema, find_present

_PROMPT = ("prompt", "caption", "text")
_MEDIUM = ("image", "video", "completion")
_LABELS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """Read a row; its label becomes `desirable` in the metadata unless it is not a boolean."""
    row = rows[0]
    metadata = row.rest(*_PROMPT, *_MEDIUM, "references", REQUEST_MASK)
    desirable = _LABELS.get(str(row.row.fields.get("label")).lower())
    if desirable is not None:
        metadata["desirable"] = desirable
    if "weight_map" in row:
        metadata["weight_map"] = read_safetensors_path(row, "weight_map")
    medium = row.medium(find_present(row, _MEDIUM), row.number("fps"))
    references = row.optional_media("references")
    prompt = row.text(find_present(row, _PROMPT))
    mask = row.request_mask()
    return Record(default_id, prompt, [medium], references, metadata=metadata, mask=mask)


KTO = Schema("kto", (_PROMPT, _MEDIUM, ("label",)), _record)
