"""Flow-GRPO on Shapes, the bundled toy model: the whole training loop in one file.

    python docs/examples/minimal_grpo.py              60 steps, a few minutes on one CPU core
    python docs/examples/minimal_grpo.py --steps 2    a quick look

Each stage is the library function that `flowalign train` calls, and the same engine makes the
updates, flowalign/training/engine.py:

    requests -> trajectory -> values -> credit -> advantages -> loss -> update

This file leaves out these parts of `flowalign train configs/models/toy_shapes.yaml`:

- Run files, checkpoints, resuming and reports. They do not change the numbers.
- Several processes. One process holds all samples of a step, so nothing has to be gathered.
- Checks and failing rewards. The verifier never fails, and the ratio is printed and must be 1.
- Several updates per rollout and a KL term. With one update the ratio is 1, so nothing is clipped.
- Averaged weights. The learning rate falls to 0 instead.

For step-level credit replace `Outcome()` by `Gain()`.
"""

import argparse
import time
from functools import partial

import torch

from flowalign.credit import Outcome
from flowalign.data import Requests, read_requests
from flowalign.distributed.processes import join
from flowalign.functional.advantage import advantages
from flowalign.losses import GRPO, PPOClip
from flowalign.rewards import Rewards
from flowalign.sampling import Fixed, Sampling, complete, sample
from flowalign.training.engine import make_update
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.policy_gradient.batches import RolloutBatch, policy_term
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, Completion
from flowalign.utils.files import bundled
from flowalign.utils.seeds import generator
from pipelines.families.sd3 import SD3
from pipelines.network.weights import Lora
from reward_models.verifiers.shapes import ShapesVerifier

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=60, help="steps of the loop, one update each")
parser.add_argument("--held_out", type=int, default=512, help="images of an evaluation")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)  # more threads are slower for such a tiny model

# The policy is a StableDiffusion3Pipeline with 1.6 million parameters. A LoRA is trained.
lora = Lora(rank=16, alpha=32)
policy = SD3(bundled("assets/shapes/sd3"), 32, 32, 1.0, lora, "fp32", max_sequence_length=1)
policy.load(torch.device("cpu"))
adamw = Optimizer(learning_rate=2e-3, decay="linear")
learner = Learner(policy, adamw, join("cpu"), args.steps)

# The reward is a rule that finds the objects of an image and compares them with the prompt.
weights = {
    "exact_match": 0.5,
    "colour": 0.1,
    "shape": 0.1,
    "count": 0.1,
    "position": 0.1,
    "clean": 0.1,
}
rewards = Rewards([ShapesVerifier()], weights)

# The first three of six denoising steps are stochastic. These three are trained.
sampling = Sampling(
    num_steps=6, samples_per_prompt=12, eta=1.0, sde_window=Fixed(start=0, stop=3), micro_batch=96
)
credit_method = Outcome()
algorithm = GRPO(PPOClip(clip=1e-2))
requests = Requests(read_requests("assets/shapes/prompts/train.txt"), args.seed)


def measure() -> dict[str, float]:
    """Return reward and accuracy on held-out prompts, with the deterministic sampler."""
    splits = {name: f"assets/shapes/prompts/{name}.txt" for name in ("seen", "unseen")}
    how = Evaluation(prompts=splits, num_prompts=args.held_out, num_steps=8, micro_batch=256)
    metrics = evaluate(policy, rewards, how, learner.processes).metrics
    reward = sum(weight * metrics[f"eval/{dim}"] for dim, weight in weights.items())
    return {"reward": reward, "exact_match": metrics["eval/exact_match"]}


before, start = measure(), time.perf_counter()
for step in range(args.steps):
    # requests -> trajectory. Seed, step and position of a request determine its noise.
    asked = requests.batch(step, 8)
    window = sampling.sde_window.steps(6, step, generator(args.seed, "window", step))
    noise = [generator(args.seed, "noise", step, i) for i in range(len(asked))]
    trajectory = sample(policy, asked, sampling, window, noise)

    # trajectory -> values -> credit. `Outcome` needs the reward of the final image only.
    finish = partial(complete, policy, trajectory, micro_batch=96)
    values = CompletionValues(policy, rewards, trajectory, finish, Completion(), micro_batch=96)
    credit = credit_method(trajectory, values)  # value [B, T, R], group [B, T], mask [B, T]

    # credit -> advantages. Weighted dimensions are compared within each group.
    advantage = advantages(
        credit.value, credit.group, credit.mask, rewards.weights, combine="advantage_of_sum"
    ).clamp(-5, 5)

    # advantages -> loss -> update. The engine splits rows of transitions into micro-batches.
    samples = Batch({"advantage": advantage, "mask": credit.mask})
    steps = Batch({"weight": torch.ones(sampling.num_steps)})
    batch = RolloutBatch(trajectory, samples, steps, credit.mask)
    everyone = torch.arange(len(credit.mask))
    metrics = make_update(
        learner, [policy_term(algorithm, batch, everyone, learner, micro_batch=96)]
    )

    reward = float((values([sampling.num_steps])[:, 0] @ rewards.weights).mean())
    ratio, norm = metrics["ratio_mean"], metrics["optim/grad_norm"]
    print(f"step {step:2d}  reward {reward:.6f}  ratio {ratio:.6f}  gradient norm {norm:.6f}")

seconds, after = time.perf_counter() - start, measure()
for name in before:
    print(f"held-out {name}: {before[name]:.3f} -> {after[name]:.3f}")
print(f"{args.steps} steps in {seconds:.0f} seconds")
