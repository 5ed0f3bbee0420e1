from . import (
    credit as credit,
    losses as losses,
    rewards as rewards,
    sampling as sampling,
    training as training,
)
from .api.result import Result as Result
from .api.scoring import Pairs as Pairs, Table as Table, make_pairs as make_pairs, score as score
from .api.toy import toy_pipeline as toy_pipeline
from .api.trainer import Trainer as Trainer, align as align
from .runs.session import Callback as Callback

__version__: str
