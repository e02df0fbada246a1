"""What every test shares: one thread, no surprises from Hypothesis, nothing drawn at random."""

import torch
from hypothesis import HealthCheck, settings

# Tensors here are tiny; a second thread costs more than it brings, and CI has two cores for two of us.
torch.set_num_threads(1)

settings.register_profile(
    "house",
    deadline=None,  # machines differ; no test asserts a time
    derandomize=True,  # the same examples on every machine
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("house")
