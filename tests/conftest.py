"""Settings of the whole suite."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # results are repeatable

# A slow or busy machine is no failure.
settings.register_profile("esper", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("esper")
