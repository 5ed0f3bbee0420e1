"""Wraps LTX-2 as flowalign policies: text to video with sound, and image to video with sound.

A state holds the latents of both streams, from which clips with sound are decoded.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowalign.types import (
    Cond,
    Guidance,
    PositiveInt,
    PromptCache,
    Request,
    Setup,
    Sound,
    SoundDecoder,
    prompts_of,
)
from flowalign.utils.imports import LazyModule
from pipelines.families.first_frame import (
    FixedFirstFrame,
    insert_first_frame,
    lead_to_first_frame,
)
from pipelines.families.ltx import LORA, LTXCodec, LTXPolicy
from pipelines.families.ltx2_guidance import (
    Parts,
    Streams,
    audio_shape,
    audio_tokens,
    guide_streams,
    scale_audio_gradients,
    waveform,
)
from pipelines.network.weights import DTYPES, Lora, Precision
from pipelines.parts.encoding import digest
from pipelines.parts.evaluation import NEGATIVE, read_with_negatives, stack_rows
from pipelines.parts.folder import Config
from pipelines.video import Memory, Video


class SoundCodec(LTXCodec, SoundDecoder):
    """Decodes the frames and the sound of a clip from one flat vector of latents.

    `state_parts` divides the vector. Code that samples, adds noise, compares or stores states
    handles only the vector, and densities include both parts.
    """

    state_parts: Parts
    pipe: Any
    """Loaded pipeline, whose audio VAE and vocoder decode the sound."""

    def clip_shape(self, latent_shape: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        return self.state_parts.video

    def decode(self, x: Tensor) -> Tensor:
        return super().decode(self.state_parts.split(x)[0])

    @torch.no_grad()
    def decode_sound(self, x: Tensor) -> list[Sound]:
        rate = self.pipe.vocoder.config.output_sampling_rate
        heard = waveform(self.pipe, self.state_parts.split(x)[1], self.state_parts).cpu()
        return [Sound(one, rate) for one in heard]


class LTX2(LTXPolicy):
    """Wraps an `LTX2Pipeline` folder or hub identifier as a policy of clips with sound.

    A state holds the latents of the frames followed by those of the sound, see `SoundCodec`.
    `decode` returns the frames, `sound_decoder` the sound. Stored clips are read without sound, so
    `embed` raises ValueError; preference pairs must come from rollouts.
    The conditional velocity takes one evaluation. `guidance`, `streams.perturbed` and
    `streams.modality` each take one more if they are in use.
    """

    pipeline_class = "LTX2Pipeline"
    transformer_class = "LTX2VideoTransformer3DModel"
    fixed = dict.fromkeys(["vae.timestep_conditioning"], False)
    no_media = (
        "denoises clips with sound, but stored clips are read without sound: train on rollouts"
    )

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 3.0,
        streams: Streams = Streams(),  # noqa: B008 (frozen)
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 1024,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        codec = SoundCodec(video, memory)
        super().__init__(path, codec, lora, precision, guidance, max_sequence_length)
        self.sound_decoder = self.sound_codec = cast(SoundCodec, self.codec)
        self.streams = streams
        self.evaluations_per_velocity = 1 + len(streams.weights(guidance))

    def take_setup(self, setup: Setup, rows: int, cache: PromptCache | None) -> None:
        super().take_setup(setup, rows, cache)
        self.sound_decoder = self.sound_codec = cast(SoundCodec, self.codec)

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        clip = super().shape_of_latents(transformer, vae)
        seconds = self.video.num_frames / self.video.fps
        parts = Parts(clip, audio_shape(self.folder.config("audio_vae"), seconds))
        self.state_parts = self.sound_codec.state_parts = parts
        self.modality_sizes = parts.sizes
        self.streams.check_blocks(transformer["num_layers"], self.path)
        return (parts.size,)

    def load(self, device: torch.device) -> None:
        super().load(device)
        self.sound_codec.pipe = self.pipe
        scale_audio_gradients(self.denoiser.transformer_blocks, self.streams.audio_gradient)

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:  # noqa: ARG002
        return super().num_tokens(self.state_parts.video, transformer) + self.state_parts.audio[1]

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.state_parts.noise(num_samples, generator).to(self.denoiser.device)

    def embed(self, media: Tensor) -> Tensor:  # noqa: ARG002
        raise ValueError(f"{type(self).__name__} {self.no_media}")

    @property
    def others(self) -> Mapping[str, tuple[float, float]]:
        """Return the evaluations to guide away from, with weights; none in an unguided copy."""
        return self.streams.weights(self.guidance) if self.evaluations_per_velocity > 1 else {}

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        needed = "negative" in self.others
        with self.text_encoder.on_device():
            return read_with_negatives(self._read, prompts_of(requests), "", needed)

    def _read(self, prompts: list[str]) -> dict[str, Tensor]:
        different = {prompt: self._connected(prompt) for prompt in dict.fromkeys(prompts)}
        return stack_rows([different[prompt] for prompt in prompts])

    def _connected(self, prompt: str) -> dict[str, Tensor]:
        """Return the connectors' outputs for one prompt; prompts are separate to save memory."""
        states, mask, *_ = self.pipe.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.denoiser.device,
        )
        found = self.pipe.connectors(states, mask, padding_side="left")
        return dict(zip(("text", "audio_text", "mask"), found, strict=True))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        sigma, states = sigma.expand(len(x)), self.state_parts.split(x)
        v, others = self._evaluated(*states, sigma, cond), self.others
        found = [(w, self._evaluated(*states, sigma, cond, name)) for name, w in others.items()]
        return guide_streams(states, sigma, v, found, self.streams.rescale)

    def _evaluated(
        self, video: Tensor, audio: Tensor, sigma: Tensor, cond: Cond, way: str = ""
    ) -> list[Tensor]:
        """Return the flat velocities of video and audio; `way` names the evaluation."""
        ending, (frames, height, width) = NEGATIVE if way == "negative" else "", self.grid
        v, v_audio = self.network.evaluate(
            self.denoiser,
            video.flatten(2).mT,
            audio_hidden_states=audio_tokens(audio).to(DTYPES[self.precision]),
            timestep=self.times(video, sigma),
            audio_timestep=1000 * sigma,
            sigma=1000 * sigma,
            encoder_hidden_states=cond[f"text{ending}"],
            audio_encoder_hidden_states=cond[f"audio_text{ending}"],
            encoder_attention_mask=cond[f"mask{ending}"],
            audio_encoder_attention_mask=cond[f"mask{ending}"],
            num_frames=frames,
            height=height,
            width=width,
            fps=self.video.fps,
            audio_num_frames=audio.shape[2],
            use_cross_timestep=True,
            **self.streams.inputs(way),
        )
        return [one.float().flatten(1) for one in (v.mT, self.state_parts.audio_of(v_audio))]

    def encoders(self) -> tuple[str, str]:
        media, text = super().encoders()
        connectors, negative = self.pipe.connectors, "negative" in self.others
        return media, digest(connectors, connectors.config, text, negative)


_utils = LazyModule("diffusers.pipelines.ltx2.utils")


class LTX2I2V(FixedFirstFrame, LTX2):
    """Wraps an `LTX2ImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The single reference of a request is the first frame. It replaces the first latent frame of the
    video, at time 0, see `first_frame`; all of the audio is denoised. As in the pipeline, the frame
    is compressed like the frames of clips that the model was trained on.
    """

    pipeline_class = "LTX2ImageToVideoPipeline"

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        if find_spec("av") is None:
            raise ValueError(
                "first frames of LTX-2 need av: pip install 'flowalign-diffusion[video]'"
            )
        return super().shape_of_latents(transformer, vae)

    def prepare_frame(self, frame: Image.Image) -> Image.Image:
        crf = _utils.resolve_default_image_crf(self.pipe.text_encoder)
        return Image.fromarray(_utils.apply_image_conditioning_crf(np.array(frame), crf))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        parts, first = self.state_parts, cond["first"]
        video, audio = parts.split(x)
        seen = parts.joined(insert_first_frame(video, first), audio)
        v, v_audio = parts.split(LTX2.velocity(self, seen, sigma, cond))
        return parts.joined(lead_to_first_frame(v, video, sigma, first), v_audio)
