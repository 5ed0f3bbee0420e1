"""Wraps Wan 2.2 with two networks (A14B), for high and for low noise, as flowalign policies."""

from flowalign.types import Guidance, InputSpec, PositiveInt
from pipelines.families.wan import LORA, VIDEO, Wan
from pipelines.families.wan_experts import Experts
from pipelines.network.weights import Lora
from pipelines.policy import Precision
from pipelines.video import Memory, Video


class Wan22(Wan):
    """Wraps a `WanPipeline` folder with two networks (Wan 2.2 A14B) as a text-to-video policy.

    In all other respects it equals `Wan`. The 5B model of Wan 2.2 has one network, so use `Wan` for
    it. `guidance` is the scale of the high-noise network. If it is 1 or less, neither network is
    guided, as in the pipeline.

    The adapter of the first network is saved as usual, the adapter of the second one in the folder
    `transformer_2`: pipe.load_lora_weights(folder + "/transformer_2", load_into_transformer_2=True)
    """

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 4.0,
        experts: Experts = Experts(guidance_2=3.0),  # noqa: B008 (frozen)
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        self.divide(experts)


class Wan22I2V(Wan22):
    """Wraps a `WanImageToVideoPipeline` folder with two networks (Wan 2.2 A14B) as a policy.

    As in `WanI2V`, the first frame is a condition in addition to the state. As in `Wan22`, there
    are networks for high and low noise. Released folders have no encoder of image features.
    """

    pipeline_class = "WanImageToVideoPipeline"
    input_spec = InputSpec(references=(1, 1), kind="first_frame")
    sees_first_frame = True

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 3.5,
        experts: Experts = Experts(),  # noqa: B008 (frozen)
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        settings = lora, precision, max_sequence_length, memory
        super().__init__(path, video, guidance, experts, *settings)
