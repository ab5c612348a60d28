"""Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for before they are defined."""

import os

import pytest
import torch

pytest.register_assert_rewrite("tests", "benchmarks.coverage")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
