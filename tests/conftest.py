"""What every test shares: one thread, no surprises from Hypothesis, nothing drawn at random."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from mamba_kernels.backend import triton_mode

# Tensors here are tiny; a second thread costs more than it brings, and CI has two cores for two of us.
torch.set_num_threads(1)

settings.register_profile(
    "house",
    deadline=None,  # machines differ; no test asserts a time
    derandomize=True,  # the same examples on every machine
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `make test-long`: new examples every time, and many more of them in the state machines.
settings.register_profile("long", settings.get_profile("house"), derandomize=False)
settings.load_profile("house")


def pytest_runtest_setup(item: pytest.Item) -> None:
    mode = triton_mode()
    if item.get_closest_marker("interpreter") and mode != "interpret":
        pytest.skip(f"Triton mode is {mode!r}: the kernels are not checked under the interpreter here")
    if item.get_closest_marker("aot") and mode == "absent":
        pytest.skip("triton is not installed: nothing is compiled for named GPUs here")
