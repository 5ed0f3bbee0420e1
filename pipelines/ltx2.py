"""Wraps LTX-2 (text to video with sound) as a flowalign policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import DTYPES, Precision
from pipelines.encoding import digest
from pipelines.folder import config_of
from pipelines.ltx import LORA, LTX
from pipelines.ltx2_guidance import Streams, guided
from pipelines.ltx2_state import Parts, audio_shape, audio_tokens, waveform
from pipelines.video import Memory, Video
from pipelines.weights import Lora


class LTX2(LTX):
    """Wraps an `LTX2Pipeline` folder or hub identifier as a policy of clips with their sound.

    A state is one flat vector: latents of the video, then those of the audio, as they are drawn.
    `Parts` names them. Whoever samples, adds noise, compares or stores states then needs to know
    nothing of the second part, and densities are of both. `decode` gives the frames, `sound` the
    waveform. Stored clips have no sound here, so `embed` refuses them: pairs are made of rollouts.

    Each of guidance, `streams.perturbed` and `streams.modality` that is in use costs an evaluation
    beside the conditional one.
    """

    pipeline_class = LTX2Pipeline
    transformer_class = LTX2VideoTransformer3DModel
    no_media = (
        "denoises a clip with its sound, and stored clips are read without: train on rollouts"
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
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        self.streams, self.others = streams, streams.weights(guidance)
        self.evaluations_per_velocity = 1 + len(self.others)

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        clip = super().shape_of_latents(transformer, vae)
        if vae.get("timestep_conditioning"):
            raise ValueError(f"the decoder of {self.path} wants a time, which LTX2 does not give")
        depth, blocks = transformer["num_layers"], self.streams.perturbed_blocks
        if "perturbed" in self.others and not all(block < depth for block in blocks or [depth]):
            raise ValueError(
                f"streams.perturbed_blocks is {list(blocks)}; {self.path} has blocks 0 to "
                f"{depth - 1}: name some of them, or set streams.perturbed to 0"
            )
        audio = config_of(self.pipeline_class, self.path, "audio_vae")
        seconds = self.video.num_frames / self.video.fps
        self.state_parts = Parts(clip, audio_shape(audio, seconds))
        return (self.state_parts.size,)

    def clip_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002
        return self.state_parts.video

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:  # noqa: ARG002
        parts = self.state_parts
        return super().num_tokens(parts.video, transformer) + parts.audio[1]

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.state_parts.noise(num_samples, generator).to(self.denoiser.device)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoders():
            rows = [self._read(prompt) for prompt in prompts_of(requests)]
            cond = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            if "negative" in self.others:
                empty = self._read("").items()
                cond |= {f"{n}_neg": one.repeat_interleave(len(rows), 0) for n, one in empty}
        return cond

    def _read(self, prompt: str) -> dict[str, Tensor]:
        """Return what the connectors make of one prompt: states of all layers are large."""
        states, mask, *_ = self.pipe.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.denoiser.device,
        )
        found = self.pipe.connectors(states, mask, padding_side="left")
        return dict(zip(("text", "audio_text", "mask"), found, strict=True))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        sigma, settings = sigma.expand(len(x)), self.streams
        ways: dict[str, dict[str, Any]] = {
            "negative": {"ending": "_neg"},
            "perturbed": {"spatio_temporal_guidance_blocks": list(settings.perturbed_blocks)},
            "isolated": {"isolate_modalities": True},
        }
        v = self._evaluated(x, sigma, cond)
        found = [(w, self._evaluated(x, sigma, cond, **ways[n])) for n, w in self.others.items()]
        state = [part.flatten(1) for part in self.state_parts.split(x)]
        parts = [
            guided(state[k], sigma, v[k], [(w[k], u[k]) for w, u in found], settings.rescale)
            for k in range(2)
        ]
        return torch.cat(parts, 1)

    def _evaluated(
        self, x: Tensor, sigma: Tensor, cond: Cond, ending: str = "", **more: Any
    ) -> list[Tensor]:
        """Return the flat velocities of video and audio."""
        (video, audio), time, mask = self.state_parts.split(x), 1000 * sigma, cond[f"mask{ending}"]
        frames, height, width = self.grid
        v, v_audio = self.outputs(
            video.flatten(2).mT,
            audio_hidden_states=audio_tokens(audio).to(DTYPES[self.precision]),
            timestep=time,
            sigma=time,
            encoder_hidden_states=cond[f"text{ending}"],
            audio_encoder_hidden_states=cond[f"audio_text{ending}"],
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.video.fps,
            audio_num_frames=audio.shape[2],
            use_cross_timestep=True,
            **more,
        )
        parts = v.mT, self.state_parts.audio_of(v_audio)
        return [one.float().flatten(1) for one in parts]

    def decoded(self, x: Tensor) -> Tensor:
        return super().decoded(self.state_parts.split(x)[0])

    @torch.no_grad()
    def sound(self, x: Tensor) -> Tensor:
        """Decode the audio of clean states, [n, channels, samples] at the vocoder's rate."""
        parts = self.state_parts
        return waveform(self.pipe, parts.split(x)[1], parts)

    def embed(self, media: Tensor) -> Tensor:  # noqa: ARG002
        raise ValueError(f"{type(self).__name__} {self.no_media}")

    def encoders(self) -> tuple[str, str]:
        media, text = super().encoders()
        connectors, negative = self.pipe.connectors, "negative" in self.others
        return media, digest(connectors, connectors.config, text, negative)
