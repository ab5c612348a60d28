"""What stands in for a server's completions in the tests of TRL's trainers."""

import queue
import time

import torch


class Rollouts:
    """Stands in for the worker that asynchronous GRPO gets its completions from."""

    def __init__(self, count):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        g = torch.Generator().manual_seed(0)
        for i in range(count):
            length = 6 + i % 4
            ids = torch.randint(3, 19, (length,), generator=g).numpy()
            completion = (torch.arange(length) >= 3).numpy().astype("int64")
            logps = (-2.0 - torch.rand(length, generator=g)).numpy() * completion
            sample = RolloutSample([], [], ids, completion, logps, (-1.0) ** i, 0, i // 2, {}, time.time())
            self.rollout_buffer.put(sample)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None
