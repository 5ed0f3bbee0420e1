from .loading import LoadedRun as LoadedRun, load as load, load_with_origins as load_with_origins
from .run import Run as Run
