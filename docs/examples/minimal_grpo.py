"""Flow-GRPO on the embedded shapes model: the whole loop in one file, read from top to bottom.

    python docs/examples/minimal_grpo.py              60 steps, a few minutes on one CPU core
    python docs/examples/minimal_grpo.py --steps 2    a quick look

Every stage is a function of the library, called as flowalign/training/policy_gradient does it:

    requests -> trajectory -> values -> credit -> advantages -> loss -> update

What `flowalign train configs/models/shapes.yaml` adds, and why it is left out here:

- Run files, checkpoints, resuming and reports: they change no number.
- Several processes: one process holds all samples of a step, so nothing has to be gathered.
- Checks, and rewards that fail: the ratio is printed and must be 1; the verifier always answers.
- Several updates per rollout, and a KL term: with one update the ratio is 1 and no clip acts.
- Averaged weights: the learning rate falls to 0 instead.

Step-level credit is one line away: replace `Outcome()` by `Gain()`.
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
from flowalign.training.evaluate import Evaluation, evaluate
from flowalign.training.policy_gradient.batches import TrainBatch, minibatches
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Completion
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
torch.set_num_threads(1)  # the model is tiny: more threads only get in each other's way

# The policy is a StableDiffusion3Pipeline of 1.6 million parameters; a LoRA of it is trained.
lora = Lora(rank=16, alpha=32)
policy = SD3(bundled("assets/shapes/sd3"), 32, 32, 1.0, lora, "fp32", max_sequence_length=1)
policy.load(torch.device("cpu"))
parameters = [p for p in policy.denoiser.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, weight_decay=1e-4)

# The reward is a rule that knows the truth: it finds the objects of an image.
weights = {
    "exact_match": 0.5,
    "colour": 0.1,
    "shape": 0.1,
    "count": 0.1,
    "position": 0.1,
    "clean": 0.1,
}
rewards = Rewards([ShapesVerifier()], weights)

# Of six denoising steps the first three are stochastic, and these are trained.
sampling = Sampling(
    num_steps=6, samples_per_prompt=12, eta=1.0, sde_window=Fixed(start=0, stop=3), micro_batch=96
)
credit_method = Outcome()
algorithm = GRPO(PPOClip(clip=1e-2))
requests = Requests(read_requests("assets/shapes/prompts/train.txt"), args.seed)


def measure() -> dict[str, float]:
    """Held-out reward and accuracy: other prompts, the deterministic sampler, fixed noise."""
    splits = {name: f"assets/shapes/prompts/{name}.txt" for name in ("seen", "unseen")}
    how = Evaluation(prompts=splits, num_prompts=args.held_out, num_steps=8, micro_batch=256)
    metrics = evaluate(policy, rewards, how, join("cpu")).metrics
    reward = sum(weight * metrics[f"eval/{dim}"] for dim, weight in weights.items())
    return {"reward": reward, "exact_match": metrics["eval/exact_match"]}


before, start = measure(), time.perf_counter()
for step in range(args.steps):
    # requests -> trajectory. The noise of a request follows from seed, step and its position.
    asked = requests.batch(step, 8)
    window = sampling.sde_window.steps(6, step, generator(args.seed, "window", step))
    noise = [generator(args.seed, "noise", step, i) for i in range(len(asked))]
    trajectory = sample(policy, asked, sampling, window, noise)

    # trajectory -> values -> credit. `Outcome` asks for the reward of the finished image alone.
    finish = partial(complete, policy, trajectory, micro_batch=96)
    values = CompletionValues(policy, rewards, trajectory, finish, Completion(), micro_batch=96)
    credit = credit_method(trajectory, values)  # value [B, T, R], group [B, T], mask [B, T]

    # credit -> advantages: dimensions are weighed; then samples are compared with their group.
    advantage = advantages(
        credit.value, credit.group, credit.mask, rewards.weights, combine="advantage_of_sum"
    ).clamp(-5, 5)

    # advantages -> loss -> update. A minibatch holds transition k of some samples.
    step_weight = torch.ones(sampling.num_steps)
    batch = TrainBatch(trajectory, advantage, credit.mask, step_weight, credit.mask, rank_offset=0)
    num_trained, ratio = int(credit.mask.sum()), 0.0
    for minibatch in minibatches(batch, torch.arange(len(credit.mask)), size=96):
        loss, stats = algorithm.loss(policy, policy, minibatch)
        share = len(minibatch.x) / num_trained
        (share * loss).backward()
        ratio += share * float(stats["ratio_mean"])
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / args.steps)
    optimizer.step()
    optimizer.zero_grad()

    reward = float((values([sampling.num_steps])[:, 0] @ rewards.weights).mean())
    print(f"step {step:2d}  reward {reward:.6f}  ratio {ratio:.6f}  gradient norm {norm:.6f}")

seconds, after = time.perf_counter() - start, measure()
for name in before:
    print(f"held-out {name}: {before[name]:.3f} -> {after[name]:.3f}")
print(f"{args.steps} steps in {seconds:.0f} seconds")
