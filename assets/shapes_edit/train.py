"""Train the toy editing model of Shapes from scratch and write it to `kontext/`.

    PYTHONPATH=assets/shapes python assets/shapes_edit/train.py    # on one CPU core, seeded

The autoencoder comes from the toy text-to-image model. A FluxTransformer2DModel and both text
encoders (T5 for tokens, CLIP for the pooled vector) learn the latents of edited images by
conditional flow matching, with the tokens of the source appended as in FLUX.1 Kontext. The *unseen*
combinations never occur. In a share of the pairs the target equals the source, as in collected
data. The model therefore often returns the source unchanged, which leaves room for alignment.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from build import whole_words
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from edited_world import EDITS, WAYS, Edit, combinations, edits, picture, splits
from torch import Tensor, nn
from torch.nn.functional import pixel_unshuffle
from toy_training import FlowTraining, decode_pictures, sample, save, small_clip
from transformers import (
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from flowalign.types import MediaBatch
from reward_models.verifiers.shapes import COLOURS, RELATIONS, SHAPES
from reward_models.verifiers.shapes_edit import ShapeObject, ShapesEditVerifier

HERE = Path(__file__).parent
TOKENS = 13
"""Padded length of an instruction, enough for the longest. The model learns no other length."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of instructions."""
    texts = [*EDITS, *COLOURS, *SHAPES, *RELATIONS, *WAYS.values(), "a the it"]
    return whole_words({word for text in texts for word in text.split()}, TOKENS)


def clip(vocab: int) -> CLIPTextModel:
    """Return a CLIP text tower of width 48; FLUX.1 uses its pooled output."""
    return CLIPTextModel(small_clip(vocab, 1, TOKENS))


def t5(vocab: int) -> T5EncoderModel:
    """Return a T5 encoder of width 64 for the tokens of the instruction."""
    return T5EncoderModel(
        T5Config(
            vocab_size=vocab,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=3,
            is_encoder_decoder=False,
            use_cache=False,
        )
    )


def new_pipeline(args: argparse.Namespace) -> FluxKontextPipeline:
    """Build the untrained pipeline around the autoencoder of the text-to-image model."""
    words = tokenizer()
    vae = AutoencoderKL.from_pretrained(args.vae, subfolder="vae", torch_dtype=torch.float32)
    transformer = FluxTransformer2DModel(
        in_channels=4 * vae.config.latent_channels,
        num_layers=args.double_layers,
        num_single_layers=args.single_layers,
        attention_head_dim=16,
        num_attention_heads=args.width // 16,
        joint_attention_dim=64,
        pooled_projection_dim=48,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=False,
    )
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=clip(len(words)),
        tokenizer=words,
        text_encoder_2=t5(len(words)),
        tokenizer_2=words,
        transformer=transformer,
    )


@torch.no_grad()
def encode(vae: AutoencoderKL, scenes: Sequence[Sequence[ShapeObject]]) -> Tensor:
    """Return the normalised latents of images, packed into tokens of 2 x 2."""
    parts = []
    for i in range(0, len(scenes), 256):
        pictures = torch.stack([picture(scene) for scene in scenes[i : i + 256]])
        latents = vae.encode(pictures * 2 - 1).latent_dist.mode()
        parts.append((latents - vae.config.shift_factor) * vae.config.scaling_factor)
    return pixel_unshuffle(torch.cat(parts), 2).flatten(2).mT.contiguous()


class Editor(nn.Module):
    """Trained networks, which predict velocities as in the pipeline."""

    def __init__(self, pipe: FluxKontextPipeline):
        super().__init__()
        self.transformer, self.clip, self.t5 = (
            pipe.transformer,
            pipe.text_encoder,
            pipe.text_encoder_2,
        )
        ids = pipe._prepare_latent_image_ids(1, 4, 4, torch.device("cpu"), torch.float32)
        self.ids = torch.cat([ids, ids + torch.tensor([1.0, 0, 0])])

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and the pooled vector of instructions, as `encode_prompt` does."""
        return self.t5(ids)[0], self.clip(ids).pooler_output

    def velocity(
        self, x: Tensor, sigma: Tensor, source: Tensor, text: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the velocity of target tokens, given the tokens of their source."""
        return self.transformer(
            hidden_states=torch.cat([x, source], 1),
            timestep=sigma,
            encoder_hidden_states=text[0],
            pooled_projections=text[1],
            txt_ids=torch.zeros(TOKENS, 3),
            img_ids=self.ids,
            return_dict=False,
        )[0][:, : x.shape[1]]


def train(pipe: FluxKontextPipeline, some: list[Edit], args: argparse.Namespace) -> None:
    """Train transformer and text encoders by flow matching; keep the averaged weights."""
    source = encode(pipe.vae, [edit.change.source for edit in some])
    target = encode(pipe.vae, [edit.change.target for edit in some])
    ids = words_of(pipe, some)
    editor = Editor(pipe)
    training = FlowTraining(editor, args.lr)
    generator, schedule = training.generator, training.schedule(args.steps)
    for step in range(args.steps):
        pick = torch.randint(len(target), (args.batch,), generator=generator)
        failed = torch.rand(args.batch, 1, 1, generator=generator) < args.unedited
        data = torch.where(failed, source[pick], target[pick])
        noise = torch.randn(data.shape, generator=generator)
        sigma = torch.rand(args.batch, generator=generator)  # uniform: high noise decides the edit
        share = sigma[:, None, None]
        text = editor.embed(ids[pick])
        velocity = editor.velocity((1 - share) * data + share * noise, sigma, source[pick], text)
        training.descend(velocity, noise - data, step)
        schedule.step()
        if step % 200 == 0:
            training.log(step, args.steps)
        if step and step % 500 == 0:
            accuracy(pipe, training.average, "train")
    editor.load_state_dict(training.average.state_dict())
    editor.eval()


def words_of(pipe: FluxKontextPipeline, some: list[Edit]) -> Tensor:
    """Return the token ids of instructions."""
    texts = [edit.instruction for edit in some]
    return pipe.tokenizer_2(texts, padding="max_length", return_tensors="pt").input_ids


@torch.no_grad()
def accuracy(pipe: FluxKontextPipeline, editor: Editor, split: str, steps: int = 8) -> float:
    """Print every dimension of the verifier, averaged and by verb; return exact_match."""
    some = splits()[split]
    source = encode(pipe.vae, [edit.change.source for edit in some])
    text = editor.embed(words_of(pipe, some))
    x = torch.randn(source.shape, generator=torch.Generator().manual_seed(3))
    pipe.scheduler.set_timesteps(steps)
    x = sample(lambda x, sigma: editor.velocity(x, sigma, source, text), x, pipe.scheduler.sigmas)
    latents = pipe._unpack_latents(x, 32, 32, pipe.vae_scale_factor)
    batch = MediaBatch(
        decode_pictures(pipe.vae, latents),
        [edit.instruction for edit in some],
        [edit.change.metadata() for edit in some],
        references=[[picture(edit.change.source)] for edit in some],
    )
    verifier = ShapesEditVerifier()
    values = verifier.score(batch).values
    means = dict(zip(verifier.spec.dims, values.mean(0).tolist(), strict=True))
    verbs = {verb: float(values[i :: len(EDITS), -1].mean()) for i, verb in enumerate(EDITS)}
    parts = " ".join(f"{name} {value:.3f}" for name, value in (means | verbs).items())
    print(f"{split}: {parts}", flush=True)  # noqa: T201
    return means["exact_match"]


def main() -> None:
    """Parse the options, train, measure and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "kontext")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--edits", type=int, default=12_000)
    parser.add_argument("--vae", type=Path, default=HERE.parent / "shapes" / "sd3")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--double-layers", type=int, default=1)
    parser.add_argument("--single-layers", type=int, default=4)
    parser.add_argument(
        "--unedited", type=float, default=0.4, help="share of pairs with the source as target"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pipe = new_pipeline(args)
    train(pipe, edits(combinations()[0], args.edits, seed=0), args)
    for split in splits():
        accuracy(pipe, Editor(pipe), split)
    save(pipe, args.out)


if __name__ == "__main__":
    main()
