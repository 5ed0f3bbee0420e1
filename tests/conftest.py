"""One thread: the suite must give the same numbers on every machine, and its tensors are tiny."""

import torch

torch.set_num_threads(1)
