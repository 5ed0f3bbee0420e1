from .backbones.backbones import (
    EfficientNet as EfficientNet,
    HuggingFaceClip as HuggingFaceClip,
    OpenClip as OpenClip,
    PooledFrames as PooledFrames,
)
from .backbones.detection import TransformersDetector as TransformersDetector
from .backbones.drm import ConvHead as ConvHead, DenoiserMap as DenoiserMap
from .backbones.efficientnet import EfficientNetLite0 as EfficientNetLite0
from .backbones.first_blocks import FirstBlocks as FirstBlocks
from .backbones.heads import MLP as MLP, Linear as Linear, PromptGated as PromptGated
from .backbones.yes_no_judges import QwenYesNo as QwenYesNo
from .chat.edit_score import EditScore as EditScore
from .chat.levels import Levels as Levels, deqa as deqa
from .chat.magic_assessor import MagicAssessor as MagicAssessor
from .chat.one_reward import OneReward as OneReward
from .chat.pair_judges import WinRate as WinRate
from .chat.rational_pair import RationalPair as RationalPair
from .chat.rational_rewards import RationalRewards as RationalRewards
from .chat.served_yes_no import ServedYesNo as ServedYesNo
from .chat.unified_reward import (
    UnifiedRewardEdit as UnifiedRewardEdit,
    UnifiedRewardPair as UnifiedRewardPair,
    UnifiedRewardPoint as UnifiedRewardPoint,
)
from .chat.video_score2 import VideoScore2 as VideoScore2
from .chat.yes_no import YesNo as YesNo
from .detection.artefact_map import ArtefactMap as ArtefactMap
from .detection.counting import Counting as Counting
from .detection.dddd_ocr import DdddOCR as DdddOCR
from .detection.geneval import GenEval as GenEval
from .detection.ocr import OCR as OCR, RapidOCR as RapidOCR, RapidOCRLine as RapidOCRLine
from .detection.region_reward import RegionReward as RegionReward
from .detection.safety import NudeNet as NudeNet
from .detection.soft_counting import SoftCounting as SoftCounting
from .detection.subject_focus import SubjectFocus as SubjectFocus
from .detection.text_likelihood import TextLikelihood as TextLikelihood
from .preference.aesthetic import Aesthetic as Aesthetic
from .preference.anime_reward import AnimeReward as AnimeReward
from .preference.clip_score import CLIPScore as CLIPScore
from .preference.edit_reward import EditReward as EditReward
from .preference.hpsv2 import HPSv2 as HPSv2
from .preference.hpsv3 import HPSv3 as HPSv3
from .preference.hpsv3_plus_plus import HPSv3PlusPlus as HPSv3PlusPlus
from .preference.image_reward import ImageReward as ImageReward
from .preference.internvl2 import InternVL2 as InternVL2
from .preference.ixc_reward import IXCReward as IXCReward, chat as chat
from .preference.mj_video import MJVideo as MJVideo
from .preference.pickscore import PickScore as PickScore
from .preference.video_reward import VideoReward as VideoReward
from .preference.vision_reward import (
    vision_reward_image as vision_reward_image,
    vision_reward_video as vision_reward_video,
)
from .questions.checklist import Checklist as Checklist
from .questions.context_consistency import ContextConsistency as ContextConsistency
from .questions.soft_tifa import SoftTIFA as SoftTIFA
from .questions.vqa_score import ClipFlanT5 as ClipFlanT5, VQAScore as VQAScore
from .questions.yes_no_odds import YesNoOdds as YesNoOdds
from .signals.clap import CLAP as CLAP
from .signals.drift import Drift as Drift
from .signals.jpeg import JpegSize as JpegSize
from .signals.motion import DynamicDegree as DynamicDegree, FlowSmoothness as FlowSmoothness
from .signals.source_consistency import (
    SourceConsistency as SourceConsistency,
    UnchangedPixels as UnchangedPixels,
)
from .signals.temporal import (
    SubjectConsistency as SubjectConsistency,
    TemporalFlicker as TemporalFlicker,
)
from .verifiers.moving_shapes import MovingShapesVerifier as MovingShapesVerifier
from .verifiers.shapes import ShapesVerifier as ShapesVerifier
from .verifiers.shapes_detector import ShapesDetector as ShapesDetector
from .verifiers.shapes_edit import ShapesEditVerifier as ShapesEditVerifier
from .verifiers.truth_maps import ShapesMap as ShapesMap, WordsMap as WordsMap
from .verifiers.words import WordsVerifier as WordsVerifier
from .wrappers.d2_align import D2Align as D2Align
from .wrappers.gated import Gated as Gated
from .wrappers.latent import TrainedLatentReward as TrainedLatentReward
from .wrappers.per_frame import PerFrame as PerFrame
from .wrappers.ray_scorers import RayScorers as RayScorers
from .wrappers.remote import RemoteReward as RemoteReward
from .wrappers.scorer_process import ScorerProcess as ScorerProcess
from .wrappers.trained import TrainedReward as TrainedReward
