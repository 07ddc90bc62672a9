"""Makes `tests/` importable (for `models`), and keeps torch to one thread so that results are repeatable."""

import torch

torch.set_num_threads(1)
