"""Benchmarks: speed and memory of the losses beside plain PyTorch, other libraries and the bare matrix products."""

import os

# The profiler that measures memory on a CPU announces itself on stderr otherwise; it reads this when torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
