"""Vote on images of the toy model by a rule, through the pages that a person uses.

    flowalign vote runs/pictures --ask rank --candidates 8
    python assets/shapes/vote.py http://127.0.0.1:8413 --votes 600

The rule is the demo's reward: half exact match, half the mean of the five other dimensions of the
verifier. Equal images get equal ranks. `--errors` is the share of votes with a random order.
"""

import argparse
import io
import json
import random
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowalign.types import MediaBatch
from reward_models.verifiers.shapes import ShapesVerifier

WEIGHTS = {"colour": 0.1, "shape": 0.1, "count": 0.1, "position": 0.1, "clean": 0.1}
WEIGHTS |= {"exact_match": 0.5}


def ask(url: str, content: Mapping[str, Any] | None = None) -> bytes:
    """Send a GET request, or a POST request with JSON, and return the answer."""
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def score(verifier: ShapesVerifier, pictures: Tensor, prompt: str) -> Tensor:
    """Return the weighted sum of the verifier's dimensions."""
    values = verifier.score(MediaBatch(pictures[:, None], [prompt] * len(pictures))).values
    return values @ torch.tensor([WEIGHTS.get(dim, 0.0) for dim in verifier.spec.dims])


def load(url: str) -> Tensor:
    """Return the image at an address as RGB [3, H, W] in [0, 1]."""
    image = Image.open(io.BytesIO(ask(url))).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def vote(url: str, votes: int, annotator: str, errors: float) -> int:
    """Answer up to `votes` questions, and return the number of answers."""
    verifier, draw = ShapesVerifier(), random.Random(0)
    address = f"{url}/next?{urllib.parse.urlencode({'annotator': annotator})}"
    for done in range(votes):
        question = json.loads(ask(address))["question"]
        if question is None:
            return done
        shown = sorted(question["candidates"], key=lambda one: one["index"])
        pictures = torch.stack([load(url + one["address"]) for one in shown])
        scores = score(verifier, pictures, question["prompt"])
        if draw.random() < errors:
            scores = torch.tensor([draw.random() for _ in shown])
        ranks = [1 + int((scores > own + 1e-6).sum()) for own in scores]
        answer = {"annotator": annotator, "question": question["id"], "seconds": 0.0}
        ask(f"{url}/vote", answer | {"answers": {"overall": ranks}})
    return votes


def main() -> None:
    """Vote, and print the number of votes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--votes", type=int, default=600)
    parser.add_argument("--annotator", default="rule")
    parser.add_argument("--errors", type=float, default=0.0, help="share of random votes")
    args = parser.parse_args()
    print(f"{vote(args.url, args.votes, args.annotator, args.errors)} votes")  # noqa: T201


if __name__ == "__main__":
    main()
