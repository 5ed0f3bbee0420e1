"""Sample rollouts for a training process: the program of a rollout worker.

Arguments: the run file, the file descriptor of the connection, and the number of CPU threads.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowalign.distributed.processes import join
from flowalign.runs.config import Run, load
from flowalign.training.recipe import Sampler
from flowalign.training.workers.process import digest_tensors
from flowalign.utils.costs import Costs
from flowalign.utils.files import atomic_write
from flowalign.utils.parent_watchdog import end_with_parent


def main(words: Sequence[str]) -> None:
    """Load the policy of a run file, and answer messages until the connection closes."""
    end_with_parent()
    torch.set_num_threads(int(words[2]))
    connection = Connection(int(words[1]))
    run, _ = load(words[0])
    serve(run, connection, Path(words[0]).parent)


def serve(run: Run, connection: Connection, folder: Path) -> None:
    """Load the policy, then set weights and sample as messages request; write files to `folder`."""
    costs, alone = Costs(), join(run.device)
    run.load_policy(alone, costs)
    run.encode_prompts(alone)
    own = run.policy.denoiser.named_parameters()
    trained = {name: p for name, p in own if p.requires_grad}
    sampler = run.recipe.open_sampler(run.context(run.build_rewards()))
    _send(connection, {})
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if "weights" in message:
            _send(connection, set_weights(trained, message["weights"]))
        else:
            _send(connection, _sample(sampler, message, costs, folder))


def set_weights(trained: Mapping[str, nn.Parameter], path: str) -> dict[str, Any]:
    """Set the trained parameters to those of a file; return what they are afterwards.

    Raises:
        ValueError: The file has other names.
    """
    sent = load_file(path)
    if sent.keys() != trained.keys():
        different = sorted(sent.keys() ^ trained.keys())
        raise ValueError(f"the trained parameters of run and worker differ: {different[:3]}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(sent[name])
    return {"count": len(trained), "digest": digest_tensors(trained), "weights": path}


def _sample(sampler: Sampler, job: Mapping[str, Any], costs: Costs, folder: Path) -> dict[str, Any]:
    """Sample the requests of a job; return the file of the tensors, the seconds and the costs."""
    before, start = asdict(costs), time.perf_counter()
    tensors = sampler.sample(job["step"], job["places"])
    path = folder / f"rollouts-{os.getpid()}-{job['step']}-{job['places'][0]}.safetensors"
    with atomic_write(path, alone=True) as partial:
        save_file({name: _pack(value) for name, value in tensors.items()}, partial)
    spent = {name: count - before[name] for name, count in asdict(costs).items()}
    return {"file": str(path), "seconds": time.perf_counter() - start, "costs": spent}


def _pack(tensor: Tensor) -> Tensor:
    """Return a tensor in main memory that shares no storage with another one."""
    return tensor.detach().cpu().contiguous().clone()


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
