"""The pipeline of a script is trained in place, and given back as it was."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from PIL import Image

import flowalign
from flowalign.api.notebook import notebook_callbacks
from flowalign.api.objects import share_rewards
from flowalign.rewards.checked import RewardError
from flowalign.training.learner import TrainingFailure
from tests.fixtures.scripts import (
    EVALUATED,
    PROMPTS,
    SIZE,
    SMALL,
    adapter,
    assert_no_shell,
    new_trainer,
    open_sd3,
    redness,
)

pytestmark = pytest.mark.slow


def describe(pipe):
    """Everything that training may change, except the values of weights."""
    found = {"scheduler": id(pipe.scheduler)}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            found |= {
                f"{name}.{n}": (p.dtype, p.requires_grad, float(p.detach().float().sum()))
                for n, p in part.named_parameters()
            }
            modules = [(m.training, len(m._forward_hooks)) for m in part.modules()]
            found[name] = modules, [getattr(m, "gradient_checkpointing", 0) for m in part.modules()]
    return found


def encode_once(pipe):
    """Let transformers install its own hooks, which are no part of training."""
    pipe.encode_prompt("a", None, None)
    return pipe


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A pipeline of all tests that leave it as it was."""
    return encode_once(open_sd3(tmp_path_factory.mktemp("shared")))


@pytest.fixture
def unchanged(shared):
    """The shared pipeline; the test fails if it changes."""
    before = describe(shared)
    yield shared
    assert describe(shared) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_failure_leaves_the_pipeline_as_it_was(dtype, tmp_path):
    pipe = encode_once(open_sd3(tmp_path, torch_dtype=dtype))
    before = describe(pipe)

    def fails(images, prompts):
        raise RuntimeError("out of paint")

    with pytest.raises(RuntimeError, match=r"reward 'fails'.*out of paint"):
        new_trainer(pipe, tmp_path, fails).train()
    assert describe(pipe) == before


def test_a_script_is_told_what_would_save_memory(unchanged, tmp_path, monkeypatch):
    def backward(self, loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("flowalign.training.learner.Learner.backward", backward)
    with pytest.raises(TrainingFailure, match="for activations") as failed:
        new_trainer(unchanged, tmp_path).train()
    assert "\ntry: " in str(failed.value)
    assert "--" not in str(failed.value)


def test_success_adds_one_adapter_and_changes_nothing_else(tmp_path):
    pipe = encode_once(open_sd3(tmp_path))
    before = describe(pipe)
    new_trainer(pipe, tmp_path).train()
    assert adapter(pipe)
    with pytest.raises(ValueError, match="already has an adapter called 'default'"):
        new_trainer(pipe, tmp_path, overwrite=True)
    pipe.transformer.unload_lora()
    assert describe(pipe) == before


def test_ctrl_c_saves_a_checkpoint_and_a_later_call_continues_it(tmp_path):
    pipe = encode_once(open_sd3(tmp_path))
    before = describe(pipe)

    class Stops(flowalign.Callback):
        def on_step(self, step, metrics):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        new_trainer(pipe, tmp_path, callbacks=[Stops()], num_steps=3).train()
    assert describe(pipe) == before
    resumed = new_trainer(pipe, tmp_path, num_steps=3, resume=True).train()
    whole = new_trainer(open_sd3(tmp_path / "other"), tmp_path / "other", num_steps=3).train()
    for name, tensor in adapter(whole.pipe).items():
        assert torch.equal(tensor, adapter(resumed.pipe)[name]), name


def test_a_run_with_fewer_updates_than_an_average_needs_returns_its_weights(tmp_path):
    settings = {"threads": 1, "ema.every": 8}
    result = new_trainer(open_sd3(tmp_path), tmp_path, settings=settings).train()
    assert any(one.abs().max() > 0 for n, one in adapter(result.pipe).items() if "lora_B" in n)


def test_a_notebook_shows_the_samples_of_evaluations(monkeypatch):
    shown = []
    shell, display = SimpleNamespace(kernel=1), SimpleNamespace(display=shown.append)
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    (callback,) = notebook_callbacks()
    red, blue = (Image.new("RGB", (4, 6), colour) for colour in ("red", "blue"))
    callback.on_samples(0, [red, [blue, red]], ["a", "b"])
    assert [row.size for row in shown] == [(12, 6)]
    assert shown[0].getpixel((0, 0)) == (255, 0, 0)
    assert shown[0].getpixel((6, 0)) == (0, 0, 255)
    shell.__dict__.clear()
    assert notebook_callbacks() == []


def test_steps_can_be_iterated_and_left(unchanged, tmp_path):
    trainer = new_trainer(unchanged, tmp_path)
    with pytest.raises(ValueError, match="eval_prompts is not given"):
        trainer.evaluate()
    steps = iter(trainer)
    assert "reward/redness" in next(steps)
    steps.close()


def test_an_evaluation_between_steps_measures_the_current_weights(tmp_path):
    more = EVALUATED | {"eval_prompts": PROMPTS, "learning_rate": 0.1}
    trainer = new_trainer(open_sd3(tmp_path), tmp_path, **more)
    between = [trainer.evaluate()["eval/redness"] for _ in trainer]
    assert between[0] != between[1]
    assert trainer.evaluate()["eval/redness"] == pytest.approx(between[1])


def test_an_adapter_of_the_script_keeps_acting_and_is_not_trained(tmp_path):
    pipe = open_sd3(tmp_path)
    torch.manual_seed(0)
    style = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    pipe.transformer.add_adapter(style, "style")
    before = adapter(pipe)
    new_trainer(pipe, tmp_path).train()
    after = adapter(pipe)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert any(".default." in name for name in after)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    assert sorted(layer.active_adapters) == ["default", "style"]


PAIRS = {
    **{"method": "flow_dpo", "rewards": None, "prompts": None, "samples_per_prompt": None},
    **{"prompts_per_step": None, "num_inference_steps": None, "batch_size": 1},
    "settings": {"threads": 1},
}
WRONG = {
    "no prompts": ({"prompts": []}, "prompts: .* holds no prompt"),
    "row without prompt": ({"prompts": [{"text": "a"}]}, "prompts: .* text field 'prompt'"),
    "method": ({"method": "dense_grop"}, "did you mean"),
    "gradient": ({"method": "draft_lv", "samples_per_prompt": None}, "gradient"),
    "device": ({"device": "cuda"}, "is on cpu, not on cuda"),
    "precision": ({"model": {"precision": "bf16"}}, "has fp32"),
    "weights": ({"reward_weights": {"blue": 1.0}}, "names blue"),
    "data": ({"method": "diffusion_dpo", "samples_per_prompt": None}, "needs data"),
    "columns": (
        PAIRS | {"data": [{"prompt": "a", "good": Image.new("RGB", (32, 32))}]},
        "no schema fits the columns good, prompt",
    ),
    "evaluation": ({"eval_steps": 1}, "needs eval_prompts"),
    "frames": ({"num_frames": 5}, "makes images"),
    "folder": ({"settings": {"output_dir": "b"}}, "output_dir cannot be set: give output_dir="),
    "path": ({"model": {"path": "b"}}, "policy.path cannot be set"),
    "moved": ({"settings": {"device": "cuda"}}, r"device cannot be set: .* pipe.to"),
    "steps": ({"num_steps": 0}, "^num_steps is 0; it must be at least 1"),
    "class": ({"model": {"class_path": "pipelines.Nope"}}, "model=.*'pipelines.Nope'.* no class"),
    "quantized": ({"settings": {"quantization.denoiser": "int8"}}, "already loaded"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_the_pipeline_changes(name, unchanged, tmp_path):
    changes, message = WRONG[name]
    given = SMALL | SIZE | {"output_dir": str(tmp_path / "run")} | changes
    rewards, prompts = given.pop("rewards", redness), given.pop("prompts", PROMPTS)
    given = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(ValueError, match=message) as error:
        flowalign.Trainer(unchanged, rewards, prompts, **given)
    assert len(str(error.value).splitlines()) <= 5
    assert_no_shell(str(error.value))


def test_an_earlier_run_is_continued_or_replaced_by_arguments(tmp_path, capsys):
    def train(name, **changes):
        return new_trainer(open_sd3(tmp_path / name), tmp_path, **changes).train()

    train("first", num_steps=1)
    assert "│ smallest GPU " in capsys.readouterr().out  # the short plan, as in the shell
    with pytest.raises(ValueError, match="Add resume=True to continue it, overwrite=True") as error:
        train("again")
    assert_no_shell(str(error.value))
    train("continued", num_steps=2, resume=True)
    first, newest = sorted((tmp_path / "run/checkpoints").iterdir())
    file = newest / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"to resume from it: resume='{first}'") as error:
        train("damaged", num_steps=3, resume=True)
    assert_no_shell(str(error.value))
    assert train("older", num_steps=3, resume=str(first)).summary["steps"] == 3


def test_a_reward_with_a_wrong_number_of_scores_ends_the_run_before_an_update(unchanged, tmp_path):
    message = r"reward 'few'.* returned 1 scores for 4 samples; it must return a list"
    with pytest.raises(RewardError, match=message) as error:
        new_trainer(unchanged, tmp_path, {"few": lambda images: [1.0]}).train()
    assert len(str(error.value).splitlines()) <= 5
    assert not (tmp_path / "run/metrics.jsonl").read_text()


def test_a_reward_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="reward x is int"):
        share_rewards({"x": 3})


def test_an_unknown_argument_names_a_similar_one(tmp_path):
    with pytest.raises(TypeError, match="did you mean 'learning_rate'"):
        flowalign.Trainer(None, redness, PROMPTS, learing_rate=1.0)


def test_a_pipeline_without_a_policy_names_any_flow(tmp_path):
    pipe = open_sd3(tmp_path)
    pipe.__class__ = type("NewPipeline", (type(pipe),), {})
    with pytest.raises(ValueError, match="AnyFlow"):
        new_trainer(pipe, tmp_path)
