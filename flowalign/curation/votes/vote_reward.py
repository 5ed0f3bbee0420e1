"""Ask annotators about the samples of a training run, and return their votes as a reward."""

import hashlib
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.curation.votes.poll import Poll
from flowalign.curation.votes.questions import Question, divide, hash_names
from flowalign.functional.pairing import beaten_share
from flowalign.rewards.batching import Queue
from flowalign.types import MediaBatch, RewardOutput, RewardSpec
from flowalign.utils.media.encode import write_clip, write_picture
from flowalign.utils.media.media import Media
from flowalign.utils.media.pixels import EXACT, UNKNOWN_RATE, to_bytes

NAME = "votes"


class VoteReward(Queue):
    """Reward that writes samples to a folder, adds questions about them, and waits for the votes.

    Each request waits in a separate thread, so that annotators see the questions of all of them.

    The score of a sample in a ranking is the share of the other candidates that it beats; ties
    count half. Ratings are averaged. Files and questions are named by content, so samples that a
    resumed run makes again get the earlier votes.
    """

    late = "not enough votes"

    def __init__(self, poll: Poll, folder: Path, most: int):
        self.poll, self.folder, self.most = poll, folder, most
        settings = poll.settings
        rates = settings.kind == "rate"
        self.spec = RewardSpec(
            name=NAME,
            dims=tuple(settings.dimensions),
            scale=(1.0, float(settings.scale)) if rates else (0.0, 1.0),
            licence="votes of the user's annotators",
            needs=("prompt",) if rates else ("prompt", "groups"),
            version=f"{settings.kind} {most}",
        )

    def submit(self, batch: MediaBatch, deadline: float) -> "Future[RewardOutput]":  # noqa: ARG002
        """Ask about samples; return a future of their scores, which ends the wait if cancelled."""
        result: Future[RewardOutput] = Future()
        # Daemon threads, so that the process can exit while requests wait for votes.
        threading.Thread(target=self._work, args=(batch, result), daemon=True).start()
        return result

    def _work(self, batch: MediaBatch, result: "Future[RewardOutput]") -> None:
        failed = self.spec.screen(batch)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        with suppress(InvalidStateError):  # the request was cancelled
            try:
                for question, rows in self._ask(batch, failed):
                    for files, score in zip(rows, self._wait(question, result), strict=True):
                        values[files] = score
            except (ValueError, OSError, RuntimeError) as error:
                failure = RuntimeError(str(error))
                failure.__cause__ = error
                return result.set_exception(failure)
            result.set_result(RewardOutput.build(self.spec, values, failed))

    def _ask(
        self, batch: MediaBatch, failed: dict[int, str]
    ) -> list[tuple[Question, list[list[int]]]]:
        """Add a question for every group, and return it with the rows of each candidate."""
        self.folder.mkdir(parents=True, exist_ok=True)
        groups: dict[Any, dict[str, list[int]]] = {}
        for i, prompt in enumerate(batch.prompts):
            if i not in failed:
                key = batch.groups[i] if batch.groups else prompt
                file = self._write(batch.media[i], batch.fps[i] if batch.fps else UNKNOWN_RATE)
                groups.setdefault(key, {}).setdefault(file, []).append(i)
        found = []
        for samples in groups.values():
            if len(samples) < 2:
                rows = next(iter(samples.values()))
                failed |= dict.fromkeys(rows, "no different sample of its prompt to compare with")
                continue
            first = next(iter(samples.values()))[0]
            sources = batch.references[first] if batch.references else ()
            references = [Media(str(self.folder / self._write(one[None], 1.0))) for one in sources]
            for part in divide(sorted(samples), self.most):
                id = hash_names(batch.prompts[first], part)
                media = [Media(str(self.folder / file)) for file in part]
                question = Question(id, batch.prompts[first], media, references)
                self.poll.add(question)
                found.append((question, [samples[file] for file in part]))
        return found

    def _write(self, frames: Tensor, fps: float) -> str:
        """Write a sample unless its file exists, and return the name of the file."""
        digest = hashlib.sha256(to_bytes(frames).numpy().tobytes()).hexdigest()[:20]
        clip = ".webp" if max(frames.shape[-2:]) <= EXACT else ".mp4"
        path = self.folder / f"{digest}{clip if len(frames) > 1 else '.png'}"
        if not path.exists():
            if len(frames) > 1:
                write_clip(path, frames, fps)
            else:
                write_picture(path, frames[0], alone=True)
        return path.name

    def _wait(self, question: Question, result: "Future[RewardOutput]") -> Tensor:
        """Return the mean scores [candidates, dimensions] of a question.

        Raises:
            InvalidStateError: `result` was cancelled.
        """
        with self.poll.changed:
            while not self.poll.is_answered(question.id):
                if result.cancelled():
                    raise InvalidStateError
                self.poll.changed.wait(1.0)
            votes = self.poll.answers(question.id)
        by_dimension = [[vote[dim] for vote in votes] for dim in self.spec.dims]
        if self.poll.settings.kind == "rate":
            return torch.tensor(by_dimension).float().mean(1).T
        return torch.stack([beaten_share(torch.tensor(ranks)) for ranks in by_dimension], 1).float()
