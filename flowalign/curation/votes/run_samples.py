"""Turn the fixed prompts of a training run into questions: samples of earlier and later steps."""

from pathlib import Path

from PIL import Image

from flowalign.curation.votes.questions import Question, hash_names
from flowalign.data.media.media import Media
from flowalign.data.media.thumbnails import spread_frames
from flowalign.reports.records import read_json
from flowalign.reports.samples import cut_grid
from flowalign.utils.files import atomic_write


def find_run_questions(run: Path, out: Path, most: int) -> list[Question]:
    """Return a question per fixed prompt of a run, with samples of up to `most` evaluations.

    Images are cut out of the grids and written to `out`.

    Raises:
        ValueError: The run has no prompt, or fewer than two evaluations with samples.
    """
    folder = run / "samples"
    index = read_json(folder / "index.json")
    prompts, steps = index.get("prompts", []), sorted(index.get("steps", []))
    if not prompts or len(steps) < 2:
        raise ValueError(f"{run} has samples of {len(steps)} evaluations; a vote needs two or more")
    chosen = [steps[i] for i in spread_frames(len(steps), most)]
    clips = bool(index.get("fps"))
    if not clips:
        for step in chosen:
            _cut(folder, out, step, len(prompts), index.get("columns", 1))
    questions = []
    for i, prompt in enumerate(prompts):
        source = folder / "sources" / f"{i:03}.png"
        files = [
            folder / f"step-{step:06}" / f"{i:03}.webp" if clips else out / _name(step, i)
            for step in chosen
        ]
        questions.append(
            Question(
                hash_names(prompt, [str(step) for step in chosen]),
                prompt,
                [Media(str(file)) for file in files],
                [Media(str(source))] if source.is_file() else [],
            )
        )
    return questions


def _name(step: int, number: int) -> str:
    return f"step-{step:06}-{number:03}.png"


def _cut(folder: Path, out: Path, step: int, count: int, columns: int) -> None:
    with Image.open(folder / f"step-{step:06}.png") as grid:
        for i, picture in enumerate(cut_grid(grid.convert("RGB"), count, columns)):
            path = out / _name(step, i)
            if not path.exists():
                with atomic_write(path) as partial:
                    picture.save(partial, "PNG")
