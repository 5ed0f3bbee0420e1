"""Converts the records of any preference dataset to pairs, or to single samples, to train on."""

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.pairs import Example, Pair, Sample, Segment, requests_of
from flowalign.data.preference.validate import Inspection
from flowalign.data.readers import Dataset, open_dataset
from flowalign.data.readers.dense_dpo import DENSE_DPO
from flowalign.data.readers.kto import KTO
from flowalign.data.readers.local_dpo import LOCAL_DPO, emphasis
from flowalign.data.readers.preferences import CHOSEN_REJECTED
from flowalign.data.records import Record
from flowalign.media.decode import MediaProblem
from flowalign.media.media import Media
from flowalign.types import Takes

ByDimension = Mapping[str, Sequence[float]]
"""For each dimension one number per medium of a record; higher is better."""
Keep = Callable[[Media], Media]
"""Replaces a medium that is used, such as by one without its bytes, once these were validated."""
_TRAINING_SCHEMAS = (CHOSEN_REJECTED.name, LOCAL_DPO.name, DENSE_DPO.name)
"""Schemas whose rows name the chosen medium and may hold the further columns of a pair."""


def read_pairs(
    path: str,
    schema: str = "auto",
    root: str | None = None,
    dimensions: Sequence[str] = (),
    mixed_shapes: bool = False,
    keep: Keep = lambda medium: medium,
) -> tuple[list[Pair], DropReport]:
    """Read all usable pairs of a dataset, and report what was dropped.

    Any two media of a record between which people had a preference are a pair, in each of the named
    dimensions. If a dimension has votes, ranks and ratings, the first of these decides. Without
    names, all dimensions in which people compared count, or else those in which they rated. Ties,
    equal media, pairs that contradict their own scores, and repeated ones are dropped; so are media
    of different sizes or numbers of frames, unless `mixed_shapes`. Bytes of media that the dataset
    holds stay in memory unless `keep` drops them.

    Raises:
        ValueError: The dataset does not exist, or has no such dimension.
    """
    dataset = open_dataset(path, schema, root)
    report, inspection, known = DropReport(), Inspection(), set()
    pairs: dict[bytes, Pair] = {}
    for where, record in _usable(dataset, report):
        preferences = _preferences(record, dataset.schema.name)
        known |= preferences.keys()
        for pair in _pairs(record, _selected(preferences, record, dimensions), where, report):
            if dataset.schema.name in _TRAINING_SCHEMAS:
                pair = _with_pair_columns(pair, record, dataset.schema.name)
            if problem := _problem(pair, inspection, mixed_shapes):
                report.add(problem, where)
            elif (key := _pair_key(pair, inspection)) in pairs:
                report.add("repeated pair", where)
            else:
                chosen, rejected = (_kept(sample, keep) for sample in (pair.chosen, pair.rejected))
                pairs[key] = replace(pair, chosen=chosen, rejected=rejected)
    _check_dimensions(path, dimensions, known)
    return list(pairs.values()), report


def read_samples(
    path: str,
    schema: str = "auto",
    root: str | None = None,
    dimensions: Sequence[str] = (),
    labelled: bool = False,
    keep: Keep = lambda medium: medium,
) -> tuple[list[Sample], DropReport]:
    """Read all usable single media of a dataset, and report what was dropped.

    A thumb up is desirable. Media that won at least one comparison are desirable; media that only
    lost are not; the rest are unlabelled, and skipped if `labelled`. A medium is one sample,
    however often it was compared.

    Raises:
        ValueError: The dataset does not exist, or has no such dimension.
    """
    dataset = open_dataset(path, schema, root)
    report, inspection, known = DropReport(), Inspection(), set()
    samples: dict[bytes, Sample] = {}
    for where, record in _usable(dataset, report):
        preferences = _preferences(record, dataset.schema.name)
        known |= preferences.keys()
        for sample in _samples(record, _selected(preferences, record, dimensions)):
            problem = _unlabelled(record, dataset.schema.name) or inspection.of_one(sample.media)
            key = b"" if problem else _key(sample, inspection, len(record.media) == 1)
            if problem or (key in samples and len(record.media) == 1):
                report.add(problem or "repeated medium", where)
            else:
                earlier = samples[key] if key in samples else _kept(sample, keep)
                samples[key] = _merged_label(earlier, sample)
    _check_dimensions(path, dimensions, known)
    found = list(samples.values())
    return _only_labelled(found, report) if labelled else found, report


def fitting(examples: Sequence[Example], takes: Takes, report: DropReport) -> list[Example]:
    """Drop the examples whose request does not have what a policy takes."""
    kept = []
    for example in examples:
        misfit = takes.misfit(requests_of(example)[0])
        where = example.where if isinstance(example, Pair) else example.media.path or example.prompt
        report.add(f"unfit request: the policy {misfit}", where) if misfit else kept.append(example)
    return kept


def _only_labelled(samples: Sequence[Sample], report: DropReport) -> list[Sample]:
    """Drop samples without a label."""
    for sample in samples:
        if sample.desirable is None:
            report.add("neither liked nor disliked", sample.media.path or sample.prompt)
    return [sample for sample in samples if sample.desirable is not None]


def _kept(sample: Sample, keep: Keep) -> Sample:
    return replace(sample, media=keep(sample.media))


def _usable(dataset: Dataset, report: DropReport) -> Iterator[tuple[str, Record]]:
    for where, record in dataset.located():
        if record.problem:
            report.add(record.problem)  # which names the row
        elif problem := _missing_reference(record) or _contradiction(record, dataset.schema.name):
            report.add(problem, where)
        else:
            yield where, record


def _missing_reference(record: Record) -> str:
    try:
        record.request()
    except MediaProblem as problem:
        return str(problem)
    return ""


def _contradiction(record: Record, schema: str) -> str:
    """Describe a rejected medium that scores higher than the chosen one; empty if there is none."""
    for dim in record.ranks if schema in _TRAINING_SCHEMAS else ():
        chosen, rejected = record.ratings.get(dim, (0.0, 0.0))
        if chosen < rejected:
            return f"the rejected one has the higher score: {dim} {chosen:g} < {rejected:g}"
    return ""


def _preferences(record: Record, schema: str) -> ByDimension:
    ranks = {dim: [-rank for rank in ranks] for dim, ranks in record.ranks.items()}
    return ranks if schema in _TRAINING_SCHEMAS else {**record.ratings, **ranks, **record.votes}


def _selected(found: ByDimension, record: Record, dimensions: Sequence[str]) -> ByDimension:
    compared = [dim for dim in found if dim in record.ranks or dim in record.votes]
    return {dim: found[dim] for dim in dimensions or compared or found if dim in found}


def _pairs(
    record: Record, preferences: ByDimension, where: str, report: DropReport
) -> Iterator[Pair]:
    """Yield every two media of which one is preferred, dimension by dimension; report the ties."""
    if len(record.media) < 2:
        report.add("single medium", where)
    elif not preferences:
        report.add("no answer", where)
    else:
        samples = [_sample(record, i) for i in range(len(record.media))]
        for dim, values in preferences.items():
            for i, j in itertools.combinations(range(len(samples)), 2):
                if values[i] == values[j]:
                    report.add(f"tie: {dim}", where)
                else:
                    i, j = (i, j) if values[i] > values[j] else (j, i)
                    gap = values[i] - values[j]
                    user = samples[i].user
                    yield Pair(samples[i], samples[j], dim, gap, user=user, where=where)


def _with_pair_columns(pair: Pair, record: Record, schema: str) -> Pair:
    """Fill in the further columns of the row; without a gap, that of the scores is taken."""
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
        chosen=replace(pair.chosen, weight_map=columns.get("weight_map_chosen")),
        rejected=replace(pair.rejected, weight_map=columns.get("weight_map_rejected")),
    )


def _samples(record: Record, preferences: ByDimension) -> Iterator[Sample]:
    """Yield the media of a record, labelled by the first dimension in which they were compared."""
    values = next(iter(preferences.values())) if len(record.media) > 1 and preferences else ()
    for i in range(len(record.media)):
        sample = _sample(record, i)
        if not values:
            yield sample
        else:
            won, lost = values[i] > min(values), values[i] < max(values)
            yield replace(sample, desirable=won or (False if lost else None))


def _merged_label(earlier: Sample, later: Sample) -> Sample:
    """Merge the labels of a repeated medium: it is desirable if it won any comparison."""
    if later.desirable or earlier.desirable is None:
        return replace(earlier, desirable=later.desirable)
    return earlier


def _sample(record: Record, i: int) -> Sample:
    """Make a sample of one medium. Only ratings become scores: ranks and votes are relative."""
    scores = {dim: float(values[i]) for dim, values in record.ratings.items()}
    request = record.request()
    return Sample(
        record.prompt,
        record.media[i],
        scores,
        record.metadata.get("desirable"),
        _user(record.metadata),
        record.metadata.get("weight_map"),
        request.references,
        request.mask,
    )


def _user(metadata: Mapping[str, Any]) -> str:
    user = metadata.get("user_id", "")
    return str(user) if isinstance(user, str | int) else ""


def _unlabelled(record: Record, schema: str) -> str:
    if schema != KTO.name or "desirable" in record.metadata:
        return ""
    return f"no label: {record.metadata.get('label')!r} is none of 0, 1, true and false"


def _problem(pair: Pair, inspection: Inspection, mixed_shapes: bool) -> str:
    if pair.gap is not None and pair.gap <= 0:
        return f"{'negative gap' if pair.gap else 'tie'}: {pair.dimension} {pair.gap:g}"
    files = (pair.mask, pair.chosen.weight_map, pair.rejected.weight_map)
    missing = inspection.missing(*(file for file in files if file))
    return missing or inspection.of_pair(pair.chosen.media, pair.rejected.media, mixed_shapes)


def _pair_key(pair: Pair, inspection: Inspection) -> bytes:
    """Hash prompt, media, dimension and person: equal for repeated pairs."""
    samples = [_key(sample, inspection) for sample in (pair.chosen, pair.rejected)]
    return _hashed(*samples, pair.dimension.encode(), pair.user.encode())


def _key(sample: Sample, inspection: Inspection, judged_alone: bool = False) -> bytes:
    """Hash prompt and medium; for a medium judged alone, person and label too."""
    path = sample.media.path
    medium = path.encode() if path else inspection.digest(sample.media)
    judgement = f"{sample.user} {sample.desirable}" if judged_alone else ""
    return _hashed(sample.request.given, medium, judgement.encode())


def _hashed(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.digest()


def _check_dimensions(path: str, requested: Sequence[str], known: Set[str]) -> None:
    for name in requested:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            there = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{path} has no dimension {name!r}{hint}\nthere are {there}")
