"""Implements CLAP: cosine similarity of a clip's sound and its prompt.

Source: Wu et al. 2023, arXiv:2211.06687v4, as implemented in transformers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

from flowalign.types import MediaBatch, RewardSpec, Sound
from flowalign.utils.imports import import_optional
from reward_models.backbones.checkpoints import find_folder, fingerprint_of, read_transformers
from reward_models.backbones.reward_bases import NetworkReward


@dataclass(eq=False, repr=False)
class CLAP(NetworkReward):
    """Scores the cosine similarity in [-1, 1] of the sound and the prompt.

    Channels are averaged, the sound is resampled to the model's rate, and the first ten seconds
    count. `model` is a Hugging Face folder or hub repository of a CLAP model. It needs the sound of
    the policy, so it scores neither images nor models without sound.
    """

    model: str = "laion/clap-htsat-unfused"

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="clap",
            dims=("clap",),
            modality="video",
            scale=(-1.0, 1.0),
            licence="Apache-2.0",
            needs=("prompt", "sound"),
            version=fingerprint_of(self.model),
        )

    def read(self) -> nn.Module:
        """Read both towers, the tokenizer and the spectrogram's settings."""
        folder = find_folder(self.model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.extractor: Any = ClapFeatureExtractor.from_pretrained(folder, local_files_only=True)
        return read_transformers(ClapModel, self.model)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return cos(sound, text)."""
        rate, longest = self.extractor.sampling_rate, self.extractor.nb_max_samples
        heard = [to_mono(one, rate)[:longest] for one in batch.sound if one is not None]
        fused = self.network.config.audio_config.enable_fusion
        how = {"truncation": "fusion" if fused else "rand_trunc", "sampling_rate": rate}
        sounds = self.extractor(heard, **how, return_tensors="pt").to(self.place)
        sound = self.network.get_audio_features(**sounds).pooler_output
        limit = self.network.config.text_config.max_position_embeddings - 2  # as in RoBERTa
        padded = {"padding": True, "truncation": True, "max_length": limit}
        texts = self.tokenizer([*batch.prompts], **padded, return_tensors="pt").to(self.place)
        text = self.network.get_text_features(**texts).pooler_output
        return (text * sound).sum(1, keepdim=True)


def to_mono(sound: Sound, rate: int) -> Float[np.ndarray, "s"]:
    """Return the mean of the channels, resampled to `rate`."""
    mono = sound.waveform.float().mean(0, keepdim=True).cpu().contiguous().numpy()
    if sound.rate == rate:
        return mono[0]
    av = import_optional("av", "video")
    frame = av.AudioFrame.from_ndarray(mono, format="fltp", layout="mono")
    frame.sample_rate = sound.rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray()[0] for part in parts])
