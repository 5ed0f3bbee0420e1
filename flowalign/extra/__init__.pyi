from .distillation.tdm_recipe import TDM as TDM
from .distillation.tdm_settings import Fake as Fake, RewardSurrogate as RewardSurrogate
