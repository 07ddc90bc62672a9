"""Settings of the whole test suite."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by child processes: two threads each on busy cores cost 5 times the CPU

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # repeatable results

# Tests do not fail on a slow or busy machine.
settings.register_profile("esper", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("esper")
