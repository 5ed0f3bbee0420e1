"""Split the trained steps of a rollout into spans: runs of consecutive steps."""

from collections.abc import Sequence


def find_spans(trained: Sequence[int], longest: int) -> list[list[int]]:
    """Return the spans of at most `longest` consecutive steps in an increasing list of steps.

    If a run does not divide evenly, its last span is shorter.
    """
    spans: list[list[int]] = []
    for k in trained:
        if spans and spans[-1][-1] == k - 1 and len(spans[-1]) < longest:
            spans[-1].append(k)
        else:
            spans.append([k])
    return spans
