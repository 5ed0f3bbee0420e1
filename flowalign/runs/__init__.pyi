from .config.run import Ema as Ema, Run as Run
from .config.loading import load as load
from .planning.plan import plan as plan
from .session.session import Session as Session, start as start
from .session.train_session import train as train
