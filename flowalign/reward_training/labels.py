"""Gather records of preference datasets into one table, and compare scores with its labels."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.data.media_record import Record
from flowalign.functional.agreement import (
    accuracy_with_ties,
    accuracy_without_ties,
    best_tie_threshold,
    reliability,
    spearman,
    temperature,
)
from flowalign.reward_training.embeddings import RewardSample
from flowalign.reward_training.losses import LabelKind, label_pairs

Part = Literal["train", "held_out", "test"]
PARTS: tuple[Part, ...] = ("train", "held_out", "test")


@dataclass(frozen=True)
class Preferences:
    """B records with up to m candidates each, and human labels in R dimensions."""

    samples: Sequence[RewardSample]
    """Candidates of all records, one after the other."""
    candidate: Int[Tensor, "B m"]
    """Row of each candidate in `samples`; -1 if a record has fewer than m."""
    labels: Float[Tensor, "B m R"]
    """Rank, share of votes or rating of each candidate; NaN if there is no label."""
    part: Int[Tensor, "B"]
    """Index into PARTS; records with the same prompt and source are in the same part."""
    num_unlabelled: int = 0
    """Number of records without a label in any dimension; they are left out."""
    problems: Sequence[str] = ()
    """Problems of records that could not be read; they are left out."""

    def rows(self, part: Part) -> Int[Tensor, "n"]:
        """Return the indices of the records of a part."""
        return (self.part == PARTS.index(part)).nonzero().flatten()

    def fingerprint(self) -> str:
        """Return a hash of all prompts, labels and parts, but not of the images or videos."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.prompt.encode() + b"\0")
        for table in (self.candidate, self.labels.nan_to_num(-12345.0), self.part):
            digest.update(table.numpy().tobytes())
        return digest.hexdigest()[:16]

    def exclude(self, failed: Iterable[int]) -> "Preferences":
        """Return a copy without the labels of the candidates in these rows of `samples`."""
        gone = torch.isin(self.candidate, torch.tensor(sorted(failed), dtype=torch.long))
        labels = self.labels.masked_fill(gone[..., None], torch.nan)
        return replace(self, labels=labels)


def gather_preferences(
    records: Iterable[Record],
    kinds: Mapping[str, LabelKind],
    seed: int,
    shares: tuple[float, float],
) -> Preferences:
    """Gather all records with a label in at least one dimension into a table.

    `shares` are the shares of the prompts in the held-out part and in the test part.

    Raises:
        ValueError: A dimension has no label at all, or there are too few prompts to divide.
    """
    records, kept = list(records), list[Record]()
    has_prompts = any(record.prompt.strip() for record in records)
    problems: list[str] = []
    unlabelled = 0
    for record in records:
        missing = "" if record.prompt.strip() or not has_prompts else f"no prompt: {record.id}"
        if problem := record.problem or missing:
            problems.append(problem)
        elif any(_labels(record, dim, kind) for dim, kind in kinds.items()):
            kept.append(record)
        else:
            unlabelled += 1
    if not kept:
        wanted = ", ".join(f"{kind} of {dim}" for dim, kind in kinds.items())
        raise ValueError(f"no record of the data has {wanted}")
    widest = max(len(r.media) for r in kept)
    candidate = torch.full((len(kept), widest), -1)
    labels = torch.full((len(kept), widest, len(kinds)), torch.nan)
    samples: list[RewardSample] = []
    for i, record in enumerate(kept):
        m = len(record.media)
        candidate[i, :m] = torch.arange(len(samples), len(samples) + m)
        samples += [
            RewardSample(medium, record.prompt, record.references) for medium in record.media
        ]
        for d, (dim, kind) in enumerate(kinds.items()):
            if found := _labels(record, dim, kind):
                labels[i, :m, d] = torch.tensor(found, dtype=torch.float32)
    _check(labels, kinds, kept)
    part = _parts([_request_key(record) for record in kept], seed, shares)
    return Preferences(samples, candidate, labels, part, unlabelled, problems)


def _labels(record: Record, dim: str, kind: LabelKind) -> Sequence[float]:
    """Return ranks, votes or ratings of a dimension; empty if there is nothing to compare."""
    found = getattr(record, kind).get(dim, ())
    return found if kind == "ratings" or len(found) > 1 else ()


def _check(
    labels: Float[Tensor, "B m R"], kinds: Mapping[str, LabelKind], records: Sequence[Record]
) -> None:
    given = labels.isfinite().flatten(0, 1).any(0)
    for (dim, kind), some in zip(kinds.items(), given.tolist(), strict=True):
        if not some:
            named = sorted({name for record in records for name in getattr(record, kind)})
            raise ValueError(
                f"no record has {kind} of {dim!r}; the data have {kind} of {named or 'nothing'}"
            )


def _request_key(record: Record) -> str:
    """Return the prompt of a record in lower case, followed by the names of its sources."""
    prompt = " ".join(record.prompt.casefold().split())
    sources = [m.path or hashlib.sha256(m.data or b"").hexdigest() for m in record.references]
    return "\0".join([prompt, *sources])


def _parts(plain: Sequence[str], seed: int, shares: tuple[float, float]) -> Int[Tensor, "B"]:
    """Return the part of each record; all records with the same request are in one part."""
    order = sorted(set(plain), key=lambda p: hashlib.sha256(f"{seed}:{p}".encode()).digest())
    sizes = [max(round(share * len(order)), 1) if share else 0 for share in shares]
    if sum(sizes) >= len(order) or not sizes[0]:
        wanted = f"shares of {shares[0]:g} held out, {shares[1]:g} for the test, and the rest"
        raise ValueError(f"{len(order)} prompts are too few for {wanted} for training")
    held, test = set(order[: sizes[0]]), set(order[sizes[0] : sum(sizes)])
    return torch.tensor([1 if p in held else 2 if p in test else 0 for p in plain])


def measure_agreement(
    score: Float[Tensor, "B m"],
    labels: Float[Tensor, "B m"],
    kind: LabelKind,
    fit_tie_threshold: float | None = None,
) -> Mapping[str, float]:
    """Compute accuracy over pairs without and with ties, the number of pairs, and calibration.

    Leads up to `fit_tie_threshold` count as ties. None: the threshold with the highest accuracy on
    these pairs, which is optimistic. Votes decide for the majority. Ratings add Spearman's
    correlation.
    """
    lead, target = _list_leads(score, labels, kind)
    human = (target - 0.5).sign().long()
    if fit_tie_threshold is None:
        fit_tie_threshold = best_tie_threshold(lead, human).threshold
    found = {
        "accuracy": accuracy_without_ties(lead, human),
        "accuracy_with_ties": accuracy_with_ties(lead, human, fit_tie_threshold),
        "ties": float((human == 0).double().mean()) if len(human) else math.nan,
        "pairs": float(len(lead)),
        "calibration_error": reliability(lead, target).error,
    }
    if kind == "ratings":
        given = labels.isfinite()
        found |= {"spearman": spearman(score[given], labels[given]), "ratings": float(given.sum())}
    return found


def fit_tie_threshold(
    score: Float[Tensor, "B m"], labels: Float[Tensor, "B m"], kind: LabelKind
) -> float:
    """Return the largest lead that should count as a tie; -1 if none should, NaN without pairs."""
    lead, target = _list_leads(score, labels, kind)
    return best_tie_threshold(lead, (target - 0.5).sign().long()).threshold


def _list_leads(
    score: Float[Tensor, "B m"], labels: Float[Tensor, "B m"], kind: LabelKind
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return the lead a - b of every labelled pair, and the probability that a is better."""
    pairs = label_pairs(labels, kind)
    a, b = pairs.of(score)
    return a - b, pairs.target


def fit_temperature(
    score: Float[Tensor, "B m"], labels: Float[Tensor, "B m"], kind: LabelKind
) -> float | None:
    """Return the temperature T that maximises the likelihood of sigmoid((a - b) / T) on the pairs.

    The result is None without pairs, and if no finite T above 0 is best: the scores are
    uninformative or never wrong.
    """
    found = temperature(*_list_leads(score, labels, kind))
    return found if 0 < found < math.inf else None


def fit_units(
    scores: Float[Tensor, "B m R"], labels: Float[Tensor, "B m R"]
) -> tuple[Float[Tensor, "R"], Float[Tensor, "R"]]:
    """Return mean and standard deviation per dimension, over the candidates with a label.

    A constant dimension gets the standard deviation 1.
    """
    mask = labels.isfinite()
    count = mask.sum((0, 1)).clamp(min=1)
    mean = torch.where(mask, scores, 0.0).sum((0, 1)) / count
    variance = torch.where(mask, (scores - mean).square(), 0.0).sum((0, 1)) / count
    return mean, torch.where(variance > 1e-12, variance.sqrt(), 1.0)
