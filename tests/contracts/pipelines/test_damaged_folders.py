"""A folder that is damaged or of another family is refused in a few lines, by the part's name."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines import LTX, SD3, SD15, SDXL, CogVideoX, Flux1, HunyuanVideo, Wan, Wan22, WanI2V
from tests.fixtures.families import TINY_SD3
from tests.fixtures.tiny_flux import build_flux
from tests.fixtures.tiny_unet import build_sd15, build_sdxl
from tests.fixtures.tiny_video import build_wan, build_wan22, build_wan_i2v, tiny_video
from tests.fixtures.tiny_video_others import build_cogvideox, build_hunyuan, build_ltx, of_clips

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Kind:
    """A family: how its folder is built, and a policy on it that is not loaded."""

    build: Callable[[Path], Any]
    policy: Callable[..., Any]
    network: str = "transformer"

    def on(self, folder: Path) -> Any:
        return self.policy(str(folder))


def _copy_sd3(folder: Path) -> None:
    shutil.copytree(TINY_SD3["path"], folder)


PLAIN: dict[str, Any] = {"lora": None, "precision": "fp32"}
TOKENS = {"max_sequence_length": 24}
SQUARE = {"height": 64, "width": 64}
KINDS = {
    "sd3": Kind(_copy_sd3, partial(SD3, **PLAIN, **TOKENS, **SQUARE)),
    "flux1": Kind(build_flux, partial(Flux1, **PLAIN, **TOKENS, **SQUARE)),
    "sd15": Kind(build_sd15, partial(SD15, **PLAIN, **SQUARE), "unet"),
    "sdxl": Kind(build_sdxl, partial(SDXL, **PLAIN, **SQUARE), "unet"),
    "wan": Kind(build_wan, partial(tiny_video, Wan, **PLAIN, **TOKENS)),
    "wan22": Kind(build_wan22, partial(tiny_video, Wan22, **PLAIN, **TOKENS)),
    "wan_i2v": Kind(build_wan_i2v, partial(tiny_video, WanI2V, **PLAIN)),
    "ltx": Kind(build_ltx, partial(of_clips, LTX, **PLAIN, **TOKENS)),
    "hunyuan": Kind(build_hunyuan, partial(of_clips, HunyuanVideo, **PLAIN, **TOKENS)),
    "cogvideox": Kind(build_cogvideox, partial(of_clips, CogVideoX, **PLAIN)),
}
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 335000000\n"


def _cut(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def _weights(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def _edit(folder: Path, change: Callable[[dict[str, Any], str], None]) -> None:
    """Change the first matrix of the weights."""
    state = load_file(_weights(folder))
    change(state, min(name for name, tensor in state.items() if tensor.ndim == 2))
    save_file(state, _weights(folder), {"format": "pt"})


def _shorten(state: dict[str, Any], name: str) -> None:
    state[name] = state[name][:-1].contiguous()


def _spoil(state: dict[str, Any], name: str) -> None:
    state[name][0, 0] = float("nan")


def _rename(folder: Path) -> None:
    state = load_file(_weights(folder))
    save_file({f"x.{name}": t for name, t in state.items()}, _weights(folder), {"format": "pt"})


def _lose_a_shard(folder: Path) -> None:
    """Leave the table of two shards and the first of them."""
    file = _weights(folder)
    names = sorted(load_file(file))
    shards = [f"{file.stem}-0000{k}-of-00002.safetensors" for k in (1, 2)]
    where = {name: shards[k % 2] for k, name in enumerate(names)}
    table = {"metadata": {"total_size": file.stat().st_size}, "weight_map": where}
    (folder / f"{file.name}.index.json").write_text(json.dumps(table))
    kept = {n: t for n, t in load_file(file).items() if where[n] == shards[0]}
    save_file(kept, folder / shards[0], {"format": "pt"})
    file.unlink()


def _rename_to_variant(folder: Path) -> None:
    file = _weights(folder)
    file.rename(file.with_suffix(".fp16.safetensors"))


def _empty(file: Path) -> None:
    file.write_text("{}")


DAMAGES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "no network": ("plan", "network", shutil.rmtree),
    "no vae": ("plan", "vae", shutil.rmtree),
    "no scheduler": ("plan", "scheduler", shutil.rmtree),
    "no text encoder": ("plan", "text_encoder", shutil.rmtree),
    "no tokenizer": ("plan", "tokenizer", shutil.rmtree),
    "cut network config": ("plan", "network", lambda f: _cut(f / "config.json")),
    "cut vae config": ("plan", "vae", lambda f: _cut(f / "config.json")),
    "cut scheduler": ("plan", "scheduler", lambda f: _cut(f / "scheduler_config.json")),
    "empty scheduler": ("plan", "scheduler", lambda f: _empty(f / "scheduler_config.json")),
    "cut text encoder config": ("plan", "text_encoder", lambda f: _cut(f / "config.json")),
    "cut tokenizer": ("load", "tokenizer", lambda f: _cut(f / "tokenizer.json")),
    "cut network": ("plan", "network", lambda f: _cut(_weights(f))),
    "cut vae": ("plan", "vae", lambda f: _cut(_weights(f))),
    "cut text encoder": ("plan", "text_encoder", lambda f: _cut(_weights(f))),
    "pointer": ("plan", "network", lambda f: _weights(f).write_bytes(_POINTER)),
    "no weights": ("plan", "network", lambda f: _weights(f).unlink()),
    "only a variant": ("plan", "network", _rename_to_variant),
    "no shard": ("plan", "network", _lose_a_shard),
    "no shard of the text encoder": ("plan", "text_encoder", _lose_a_shard),
    "missing tensor": ("plan", "network", lambda f: _edit(f, lambda s, n: s.pop(n))),
    "missing tensor of the text encoder": (
        *("plan", "text_encoder: 1 tensors are missing"),
        lambda f: _edit(f, lambda s, n: s.pop(n)),
    ),
    "renamed tensors of the text encoder": ("plan", "tensors are missing", _rename),
    "wrong shape": ("plan", "network", lambda f: _edit(f, _shorten)),
    "wrong shape of the text encoder": ("plan", "text_encoder", lambda f: _edit(f, _shorten)),
    "NaN": ("load", "network", lambda f: _edit(f, _spoil)),
    "NaN in the text encoder": ("load", "text_encoder", lambda f: _edit(f, _spoil)),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    for name, kind in KINDS.items():
        kind.build(root / name)
    return {name: root / name for name in KINDS}


def refused(policy: Any, verb: str) -> str:
    """The policy's error message, which is short and names the folder."""
    with pytest.raises(ValueError, match=re.escape(policy.path)) as caught:
        policy.plan() if verb == "plan" else policy.load(torch.device("cpu"))
    message = str(caught.value)
    assert len(message.splitlines()) <= 5
    assert len(message) < 600
    return message


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_folder_is_planned_and_loaded(folders, name):
    policy = KINDS[name].on(folders[name])
    assert policy.plan().parameters > 0
    policy.load(torch.device("cpu"))


ALL_DAMAGES = "sd3", "sdxl", "wan22"
"""Families with every damage: a transformer with three encoders, a UNet, and two networks."""
EVERYWHERE = "no tokenizer", "cut network", "cut vae", "wrong shape of the text encoder"
"""Damages of every family: one of each part, since all parts are read by the same code."""


@pytest.mark.parametrize(
    ("name", "damage"),
    [(a, b) for a in KINDS for b in (DAMAGES if a in ALL_DAMAGES else EVERYWHERE)],
)
def test_a_damaged_part_is_refused_by_its_name(folders, tmp_path, name, damage):
    verb, part, work = DAMAGES[damage]
    kind = KINDS[name]
    part = kind.network if part == "network" else part
    folder = tmp_path / "damaged"
    shutil.copytree(folders[name], folder)
    work(folder / ("text_encoder" if "text encoder" in damage else part))
    verbs = ("plan", "load") if verb == "plan" else ("load",)
    assert all(part in refused(kind.on(folder), v) for v in verbs)


def test_a_tied_embedding_is_read_under_either_name_and_refused_without_both(folders, tmp_path):
    folder = tmp_path / "sd3"
    shutil.copytree(folders["sd3"], folder)
    file = _weights(folder / "text_encoder_3")
    state = load_file(file)
    shared = state.pop("shared.weight")
    save_file(state | {"encoder.embed_tokens.weight": shared}, file, {"format": "pt"})
    policy = KINDS["sd3"].on(folder)
    policy.load(torch.device("cpu"))
    assert torch.equal(policy.pipe.text_encoder_3.get_input_embeddings().weight, shared)
    save_file(state, file, {"format": "pt"})
    assert "text_encoder_3: 1 tensors are missing, for example shared.weight" in refused(
        KINDS["sd3"].on(folder), "load"
    )


RELATED_KINDS = ("sd3", "flux1"), ("sd15", "sdxl"), ("wan", "wan22", "wan_i2v")
OTHERS = [
    *itertools.pairwise([*KINDS, "sd3"]),
    *(pair for kinds in RELATED_KINDS for pair in itertools.permutations(kinds, 2)),
]
"""Each family on the folder of the next one, and on those of its relatives."""


@pytest.mark.parametrize(("name", "other"), sorted(set(OTHERS)))
def test_a_folder_of_another_family_is_refused(folders, name, other):
    for verb in ("plan", "load"):
        refused(KINDS[name].on(folders[other]), verb)


def test_a_folder_without_an_index_is_refused(tmp_path):
    assert "model_index.json is missing" in refused(KINDS["sd3"].on(tmp_path), "plan")


def test_a_folder_whose_index_is_damaged_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"transformer": [')
    assert "model_index.json is damaged" in refused(KINDS["sd3"].on(tmp_path), "load")


class Code:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("true",))


def test_a_pickle_in_place_of_weights_is_refused_without_advice_to_load_it(tmp_path):
    folder = tmp_path / "sd3"
    _copy_sd3(folder)
    (folder / "text_encoder" / "model.safetensors").unlink()
    torch.save({"weight": Code()}, folder / "text_encoder" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"text_encoder: a \.bin file holds more than") as refused:
        KINDS["sd3"].on(folder).load(torch.device("cpu"))
    assert "safetensors" in str(refused.value)
    assert "weights_only" not in str(refused.value)


def _change(**settings: Any) -> Callable[[Path], None]:
    def work(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return work


SCHEDULER = "scheduler/scheduler_config.json"
RELATED = {
    "an LCM": ("sd15", "unet/config.json", {"time_cond_proj_dim": 256}, "time_cond_proj_dim"),
    "classes": ("sd15", "unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type"),
    "a UNet for inpainting": ("sd15", "unet/config.json", {"in_channels": 9}, "takes 9 channels"),
    "noise of pure noise": (
        *("sd15", SCHEDULER, {"rescale_betas_zero_snr": True}),
        "prediction_type is epsilon, and the last sigma 1",
    ),
    "latent statistics": (
        *("sdxl", "vae/config.json", {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 4}),
        "latents_mean of its vae",
    ),
    "EDM": (
        *(
            "sdxl",
            SCHEDULER,
            {"_class_name": "EDMEulerScheduler", "sigma_min": 0.1, "sigma_max": 9},
        ),
        "(EDMEulerScheduler) sets no schedule of 10 steps",
    ),
    "Heun": (
        *("sd3", SCHEDULER, {"_class_name": "FlowMatchHeunDiscreteScheduler"}),
        "(FlowMatchHeunDiscreteScheduler) sets 20 sigmas for 10 steps",
    ),
    "Heun by size": (
        *("flux1", SCHEDULER, {"_class_name": "FlowMatchHeunDiscreteScheduler"}),
        "(FlowMatchHeunDiscreteScheduler) sets no schedule of 10 steps",
    ),
    "shift by size": ("sd3", SCHEDULER, {"use_dynamic_shifting": True}, "`mu` must be passed"),
    "rising sigmas": ("sd3", SCHEDULER, {"invert_sigmas": True}, "fall from at most 1 to 0"),
    "an end above 0": ("sd3", SCHEDULER, {"shift_terminal": 0.1}, "sigmas for 1 steps: nan, 0"),
    "no T5": ("sd3", "model_index.json", {"text_encoder_3": [None, None]}, "lacks text_encoder_3"),
}


@pytest.mark.parametrize("case", RELATED)
def test_a_related_model_with_another_formula_or_schedule_is_refused(folders, tmp_path, case):
    name, file, settings, message = RELATED[case]
    shutil.copytree(folders[name], tmp_path / "related")
    _change(**settings)(tmp_path / "related" / file)
    with pytest.raises(ValueError, match=re.escape(message)):
        [KINDS[name].on(tmp_path / "related").plan().sigmas(num) for num in (10, 1)]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda file: file.write_bytes(_POINTER), "is a pointer of Git LFS: run `git lfs pull`"),
        (
            lambda file: file.rename(file.with_suffix(".fp16.safetensors")),
            "model.safetensors is missing; there are config.json, "
            "diffusion_pytorch_model.fp16.safetensors",
        ),
    ],
)
def test_a_file_that_is_a_pointer_or_another_variant_is_named(folders, tmp_path, work, message):
    shutil.copytree(folders["sd15"], tmp_path / "sd15")
    work(_weights(tmp_path / "sd15" / "unet"))
    assert message in refused(KINDS["sd15"].on(tmp_path / "sd15"), "plan")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("~/models/sd3", f"id of a model: write {Path.home()}/models/sd3"),
        (
            "sd3.safetensors",
            "StableDiffusion3Pipeline.from_single_file('sd3.safetensors').save_pre",
        ),
    ],
)
def test_a_path_of_home_or_of_a_single_file_is_refused_with_the_remedy(
    tmp_path, monkeypatch, path, hint
):
    monkeypatch.chdir(tmp_path)
    Path("sd3.safetensors").write_bytes(b"")
    assert hint in refused(KINDS["sd3"].on(Path(path)), "plan")
