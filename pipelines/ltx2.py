"""Wraps LTX-2 (text to video with sound) as a flowalign policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import DTYPES, Precision
from pipelines.encoding import digest
from pipelines.guidance import NEGATIVE, read_with_negatives
from pipelines.ltx import LORA
from pipelines.ltx2_guidance import Streams, guided_streams
from pipelines.ltx2_sound import WithSound
from pipelines.ltx2_state import audio_tokens
from pipelines.rows import stacked
from pipelines.video import Memory, Video
from pipelines.weights import Lora


class LTX2(WithSound):
    """Wraps an `LTX2Pipeline` folder or hub identifier as a policy of clips with their sound.

    Each of guidance, `streams.perturbed` and `streams.modality` that is in use costs an evaluation
    beside the conditional one.
    """

    pipeline_class: Any = LTX2Pipeline
    transformer_class = LTX2VideoTransformer3DModel

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
        self.streams = streams
        self.evaluations_per_velocity = 1 + len(streams.weights(guidance))

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        shape = super().shape_of_latents(transformer, vae)
        self.streams.check_blocks(transformer["num_layers"], self.path)
        return shape

    @property
    def others(self) -> Mapping[str, tuple[float, float]]:
        """Return what is guided away from, with its weights in video and audio.

        A copy of this policy without guidance makes one evaluation.
        """
        return self.streams.weights(self.guidance) if self.evaluations_per_velocity > 1 else {}

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        needed = "negative" in self.others
        with self.text_encoders():
            return read_with_negatives(self._read, prompts_of(requests), "", needed)

    def _read(self, prompts: list[str]) -> dict[str, Tensor]:
        different = {prompt: self._connected(prompt) for prompt in dict.fromkeys(prompts)}
        return stacked([different[prompt] for prompt in prompts])

    def _connected(self, prompt: str) -> dict[str, Tensor]:
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
        sigma, states = sigma.expand(len(x)), self.state_parts.split(x)
        v, others = self._evaluated(*states, sigma, cond), self.others
        found = [(w, self._evaluated(*states, sigma, cond, name)) for name, w in others.items()]
        return guided_streams(states, sigma, v, found, self.streams.rescale)

    def _evaluated(
        self, video: Tensor, audio: Tensor, sigma: Tensor, cond: Cond, way: str = ""
    ) -> list[Tensor]:
        """Return the flat velocities of video and audio in the evaluation of this name."""
        ending, (frames, height, width) = NEGATIVE if way == "negative" else "", self.grid
        v, v_audio = self.outputs(
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
