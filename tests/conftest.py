"""Keep torch to one thread, so that results are repeatable."""

import torch

torch.set_num_threads(1)
