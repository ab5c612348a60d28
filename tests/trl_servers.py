"""What stands in for servers, and for what asks them, in the tests of TRL's trainers."""

import queue
import time

import torch


class Server:
    """Stands in for a teacher behind a URL: log-probabilities that depend on the position alone."""

    def __init__(self, *args, **kwargs):
        pass

    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature, **kwargs):
        lengths = [len(ids) - prompt for ids, prompt in zip(sequences, prompt_lengths, strict=True)]
        best = [-1.0 - 0.5 * k for k in range(top_logprobs)]
        columns = [[(3 + 5 * k + t) % 19 for k in range(top_logprobs)] for t in range(max(lengths, default=0))]
        return {
            "actual_logprobs": [[[-1.5 - 0.1 * t] for t in range(n)] for n in lengths],
            "logprobs": [[best for _ in range(n)] for n in lengths],
            "logprob_token_ids": [columns[:n] for n in lengths],
        }


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
