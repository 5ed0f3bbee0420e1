"""Convert the records of any preference dataset to training pairs or samples."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flowalign.data.media_record import Record
from flowalign.data.preference.preference_data import (
    Example,
    Keep,
    Pair,
    Sample,
    Segment,
    media_of,
    requests_of,
)
from flowalign.data.preference.validate import DropReport, Inspection
from flowalign.data.readers import Dataset
from flowalign.data.readers.training_rows import (
    CHOSEN_REJECTED,
    DENSE_DPO,
    KTO,
    LOCAL_DPO,
    emphasis,
)
from flowalign.data.tensor_store import is_latent
from flowalign.types import InputSpec
from flowalign.utils.errors import require_known
from flowalign.utils.media.media import MediaProblem

ByDimension = Mapping[str, Sequence[float]]
"""One number per image or video of a record, by dimension; higher is better."""
_TRAINING_SCHEMAS = (CHOSEN_REJECTED.name, LOCAL_DPO.name, DENSE_DPO.name)
"""Schemas with a chosen and a rejected item per row, and optional further columns of a pair."""


def read_pairs(
    dataset: Dataset,
    dimensions: Sequence[str],
    mixed_shapes: bool,
    keep: Keep,
    report: DropReport,
) -> list[Pair]:
    """Read all usable pairs of a dataset; add the dropped rows to `report`.

    Two items of a record are a pair if annotators preferred one of them, separately in each of
    `dimensions`. Votes take precedence over ranks, and ranks over ratings. If `dimensions` is
    empty, all dimensions with votes or ranks are used, or all rated dimensions if there are none.
    Dropped are ties, identical media, pairs that contradict their scores, and repeated pairs.
    Unless `mixed_shapes`, pairs of different sizes or numbers of frames are dropped as well.

    Raises:
        ValueError: The dataset lacks one of `dimensions`.
    """
    inspection = Inspection()
    pairs: dict[bytes, Pair] = {}
    for where, record, preferences in _read_preferences(dataset, dimensions, report):
        for pair in _make_pairs(record, preferences, where, report):
            if dataset.schema.name in _TRAINING_SCHEMAS:
                pair = _add_pair_columns(pair, record, dataset.schema.name)
            if problem := _describe_problem(pair, inspection, mixed_shapes):
                report.add(problem, where)
            elif (key := inspection.pair_key(pair)) in pairs:
                report.add("repeated pair", where)
            else:
                chosen = replace(pair.chosen, media=keep(pair.chosen.media))
                rejected = replace(pair.rejected, media=keep(pair.rejected.media))
                pairs[key] = replace(pair, chosen=chosen, rejected=rejected)
    return list(pairs.values())


def read_samples(
    dataset: Dataset, dimensions: Sequence[str], labelled: bool, keep: Keep, report: DropReport
) -> list[Sample]:
    """Read all usable single images or videos of a dataset; add the dropped rows to `report`.

    A sample is desirable if it has a thumbs-up or won at least one comparison, and undesirable if
    it only lost. The remaining samples are unlabelled, and dropped if `labelled`. An image or video
    is one sample, even if it was compared several times.

    Raises:
        ValueError: The dataset lacks one of `dimensions`.
    """
    inspection = Inspection()
    samples: dict[bytes, Sample] = {}
    for where, record, preferences in _read_preferences(dataset, dimensions, report):
        alone = len(record.media) == 1
        for sample in _make_samples(record, preferences):
            problem = _describe_missing_label(record, dataset.schema.name)
            problem = problem or inspection.of_one(sample.media)
            key = b"" if problem else inspection.sample_key(sample, alone)
            if problem or (key in samples and alone):
                report.add(problem or "repeated item", where)
            elif key not in samples:
                samples[key] = replace(sample, media=keep(sample.media))
            elif sample.desirable or samples[key].desirable is None:
                samples[key] = replace(samples[key], desirable=sample.desirable)
    found = list(samples.values())
    return _drop_unlabelled(found, report) if labelled else found


def _drop_unlabelled(samples: Sequence[Sample], report: DropReport) -> list[Sample]:
    """Drop samples without a label."""
    for sample in samples:
        if sample.desirable is None:
            report.add("neither liked nor disliked", sample.media.path or sample.prompt)
    return [sample for sample in samples if sample.desirable is not None]


def drop_misfits(
    examples: Sequence[Example], input_spec: InputSpec, report: DropReport
) -> list[Example]:
    """Drop the examples with a request that does not fit the policy's `input_spec`."""
    kept = []
    for example in examples:
        misfit = input_spec.misfit(requests_of(example)[0])
        where = example.where if isinstance(example, Pair) else example.media.path or example.prompt
        report.add(f"unfit request: the policy {misfit}", where) if misfit else kept.append(example)
    return kept


def drop_short(examples: Sequence[Example], num_frames: int, report: DropReport) -> list[Example]:
    """Drop the examples with a file of fewer than `num_frames` frames; latents are kept."""
    kept, inspection = [], Inspection()
    for example in examples:
        media = [medium for medium in media_of(example) if not is_latent(medium)]
        counts = {str(medium.path): inspection.shape(medium)[2] for medium in media}
        short = [name for name in counts if counts[name] < num_frames]
        if short:
            report.add(f"too short: {counts[short[0]]} of {num_frames} frames", short[0])
        else:
            kept.append(example)
    return kept


def _read_preferences(
    dataset: Dataset, dimensions: Sequence[str], report: DropReport
) -> Iterator[tuple[str, Record, ByDimension]]:
    """Yield location, record and preferences of the usable rows; add the others to `report`."""
    schema, known = dataset.schema.name, set[str]()
    for where, record in _read_usable(dataset, report):
        ranks = {dim: [-rank for rank in ranks] for dim, ranks in record.ranks.items()}
        found: ByDimension = ranks
        if schema not in _TRAINING_SCHEMAS:
            found = {**record.ratings, **ranks, **record.votes}
        known |= found.keys()
        compared = [dim for dim in found if dim in record.ranks or dim in record.votes]
        chosen = dimensions or compared or found
        yield where, record, {dim: found[dim] for dim in chosen if dim in found}
    require_known(f"{dataset.name} has no dimension", dimensions, sorted(known))


def _read_usable(dataset: Dataset, report: DropReport) -> Iterator[tuple[str, Record]]:
    has_prompts = dataset.has_prompts()
    for where, record in dataset.iter_located():
        if record.problem:
            report.add(record.problem)  # the problem already names the row
        elif has_prompts and not record.prompt.strip():
            report.add("no prompt", where)
        elif problem := _find_problem(record, dataset.schema.name):
            report.add(problem, where)
        else:
            yield where, record


def _find_problem(record: Record, schema: str) -> str:
    """Return whether a file of the request is missing, or the rejected item scores higher."""
    try:
        record.request()
    except MediaProblem as problem:
        return str(problem)
    for dim in record.ranks if schema in _TRAINING_SCHEMAS else ():
        chosen, rejected = record.ratings.get(dim, (0.0, 0.0))
        if chosen < rejected:
            return f"the rejected item has the higher score: {dim} {chosen:g} < {rejected:g}"
    return ""


def _make_pairs(
    record: Record, preferences: ByDimension, where: str, report: DropReport
) -> Iterator[Pair]:
    """Yield all pairs with a preference, dimension by dimension; report the ties."""
    if len(record.media) < 2:
        report.add("single item", where)
    elif not preferences:
        report.add("no answer", where)
    else:
        samples = [_make_sample(record, i) for i in range(len(record.media))]
        for dim, values in preferences.items():
            for i, j in itertools.combinations(range(len(samples)), 2):
                if values[i] == values[j]:
                    report.add(f"tie: {dim}", where)
                else:
                    won, lost = (i, j) if values[i] > values[j] else (j, i)
                    gap, user = values[won] - values[lost], samples[won].user
                    yield Pair(samples[won], samples[lost], dim, gap, user=user, where=where)


def _add_pair_columns(pair: Pair, record: Record, schema: str) -> Pair:
    """Add the further columns of the row to a pair; the default gap is the score difference."""
    columns, dim = record.metadata, pair.dimension
    gap = columns.get("gap")
    if gap is None and dim in pair.chosen.scores:
        gap = pair.chosen.scores[dim] - pair.rejected.scores[dim]
    regenerated = schema == LOCAL_DPO.name and "strength" in columns
    strength = emphasis(columns["strength"]) if regenerated else 1.0
    return replace(
        pair,
        gap=gap,
        weight=columns.get("weight", 1.0),
        stage=columns.get("stage", 0),
        segments=[Segment(**segment) for segment in columns.get("segments", ())],
        mask=columns.get("mask"),
        mask_rejected=columns.get("mask_rejected"),
        mask_strength=strength,
        values_chosen=columns.get("values_chosen") or (),
        values_rejected=columns.get("values_rejected") or (),
        chosen=replace(pair.chosen, weight_map=columns.get("weight_map_chosen")),
        rejected=replace(pair.rejected, weight_map=columns.get("weight_map_rejected")),
    )


def _make_samples(record: Record, preferences: ByDimension) -> Iterator[Sample]:
    """Yield a sample per item of a record, labelled by the first dimension with comparisons."""
    values = next(iter(preferences.values())) if len(record.media) > 1 and preferences else ()
    for i in range(len(record.media)):
        sample = _make_sample(record, i)
        if not values:
            yield sample
        else:
            won, lost = values[i] > min(values), values[i] < max(values)
            yield replace(sample, desirable=won or (False if lost else None))


def _make_sample(record: Record, i: int) -> Sample:
    """Return item `i` as a sample. Only ratings become scores; ranks and votes are relative."""
    scores = {dim: float(values[i]) for dim, values in record.ratings.items()}
    request, columns = record.request(), record.metadata
    user = columns.get("user_id", "")
    return Sample(
        record.prompt,
        record.media[i],
        scores,
        columns.get("desirable"),
        str(user) if isinstance(user, str | int) else "",
        columns.get("weight_map"),
        request.references,
        request.mask,
    )


def _describe_missing_label(record: Record, schema: str) -> str:
    if schema != KTO.name or "desirable" in record.metadata:
        return ""
    return f"no label: {record.metadata.get('label')!r}, must be 0, 1, true or false"


def _describe_problem(pair: Pair, inspection: Inspection, mixed_shapes: bool) -> str:
    if pair.gap is not None and pair.gap <= 0:
        return f"{'negative gap' if pair.gap else 'tie'}: {pair.dimension} {pair.gap:g}"
    files = (pair.mask, pair.chosen.weight_map, pair.rejected.weight_map)
    missing = inspection.missing(*(file for file in files if file))
    return missing or inspection.of_pair(pair.chosen.media, pair.rejected.media, mixed_shapes)
