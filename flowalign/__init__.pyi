from . import credit as credit, losses as losses, rewards as rewards
from .api.trainer import Result as Result, Trainer as Trainer, align as align
from .runs.session import Callback as Callback

__version__: str
