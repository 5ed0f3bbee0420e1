from . import credit as credit, losses as losses, rewards as rewards
from .api.toy import toy_pipeline as toy_pipeline
from .api.trainer import Result as Result, Trainer as Trainer, align as align
from .runs.session import Callback as Callback

__version__: str
