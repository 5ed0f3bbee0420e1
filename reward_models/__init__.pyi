from .backbones.backbones import PooledFrames as PooledFrames
from .backbones.detection import TransformersDetector as TransformersDetector
from .backbones.drm import ConvHead as ConvHead, DenoiserMap as DenoiserMap
from .backbones.encoders import (
    EfficientNet as EfficientNet,
    HuggingFaceClip as HuggingFaceClip,
    OpenClip as OpenClip,
)
from .backbones.first_blocks import FirstBlocks as FirstBlocks
from .backbones.heads import MLP as MLP, Linear as Linear, PromptGated as PromptGated
from .backbones.yes_no_judges import QwenYesNo as QwenYesNo
from .chat.edit_score import EditScore as EditScore
from .chat.first_token import (
    Levels as Levels,
    ServedYesNo as ServedYesNo,
    YesNo as YesNo,
    deqa as deqa,
)
from .chat.magic_assessor import ArtefactMap as ArtefactMap, MagicAssessor as MagicAssessor
from .chat.one_reward import OneReward as OneReward
from .chat.pair_judges import WinRate as WinRate
from .chat.rational_rewards import RationalPair as RationalPair, RationalRewards as RationalRewards
from .chat.unified_reward import (
    UnifiedRewardEdit as UnifiedRewardEdit,
    UnifiedRewardPair as UnifiedRewardPair,
    UnifiedRewardPoint as UnifiedRewardPoint,
)
from .chat.video_score2 import VideoScore2 as VideoScore2
from .detection.counting import Counting as Counting, SoftCounting as SoftCounting
from .detection.geneval import GenEval as GenEval
from .detection.ocr import (
    OCR as OCR,
    DdddOCR as DdddOCR,
    RapidOCR as RapidOCR,
    RapidOCRLine as RapidOCRLine,
)
from .detection.region_reward import RegionReward as RegionReward
from .detection.safety import NudeNet as NudeNet
from .detection.subject_focus import SubjectFocus as SubjectFocus
from .detection.text_likelihood import TextLikelihood as TextLikelihood
from .preference.anime_reward import AnimeReward as AnimeReward
from .preference.clip_rewards import (
    Aesthetic as Aesthetic,
    CLIPScore as CLIPScore,
    HPSv2 as HPSv2,
    PickScore as PickScore,
)
from .preference.edit_reward import EditReward as EditReward
from .preference.hpsv3 import HPSv3 as HPSv3, HPSv3PlusPlus as HPSv3PlusPlus
from .preference.image_reward import ImageReward as ImageReward
from .preference.internvl2 import InternVL2 as InternVL2
from .preference.ixc_reward import IXCReward as IXCReward
from .preference.mj_video import MJVideo as MJVideo
from .preference.video_reward import VideoReward as VideoReward
from .questions.checklist import (
    Checklist as Checklist,
    vision_reward_image as vision_reward_image,
    vision_reward_video as vision_reward_video,
)
from .questions.context_consistency import ContextConsistency as ContextConsistency
from .questions.soft_tifa import SoftTIFA as SoftTIFA
from .questions.spectra_reward import SpectraReward as SpectraReward
from .questions.vqa_score import (
    ClipFlanT5 as ClipFlanT5,
    VQAScore as VQAScore,
    YesNoOdds as YesNoOdds,
)
from .signals.clap import CLAP as CLAP
from .signals.jpeg import JpegSize as JpegSize
from .signals.source_consistency import (
    SourceConsistency as SourceConsistency,
    UnchangedPixels as UnchangedPixels,
)
from .signals.temporal import (
    DynamicDegree as DynamicDegree,
    FlowSmoothness as FlowSmoothness,
    SubjectConsistency as SubjectConsistency,
    TemporalFlicker as TemporalFlicker,
)
from .verifiers.moving_shapes import MovingShapesVerifier as MovingShapesVerifier
from .verifiers.shapes import ShapesVerifier as ShapesVerifier
from .verifiers.shapes_edit import ShapesEditVerifier as ShapesEditVerifier
from .verifiers.truth import (
    ShapesDetector as ShapesDetector,
    ShapesMap as ShapesMap,
    WordsMap as WordsMap,
)
from .verifiers.words import WordsVerifier as WordsVerifier
from .wrappers.composed import (
    Drift as Drift,
    Gated as Gated,
    PerFrame as PerFrame,
    Shifted as Shifted,
)
from .wrappers.d2_align import D2Align as D2Align
from .wrappers.out_of_process import (
    RayScorers as RayScorers,
    RemoteReward as RemoteReward,
    ScorerProcess as ScorerProcess,
)
from .wrappers.trained import (
    TrainedLatentReward as TrainedLatentReward,
    TrainedReward as TrainedReward,
)
