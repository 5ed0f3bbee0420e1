from .config.loading import load as load
from .config.run import Ema as Ema, Run as Run
from .planning import plan as plan
from .session import Session as Session, start as start
from .train_session import train as train
