"""What stands in for servers, and for what asks them, in the tests of TRL's trainers."""

import contextlib
import queue
import threading
import time
import warnings
from types import SimpleNamespace
from unittest import mock

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


def rollouts(text, tokenizer):
    """Completions from the loop of TRL's own worker; the vLLM server that it asks is replaced by fixed answers."""
    import datasets
    from trl import chat_template_utils
    from trl.experimental.async_grpo import async_rollout_worker as module

    g = torch.Generator().manual_seed(0)

    class Loop(module._AsyncRolloutLoop):
        async def _post(self, path, payload, *arguments, **options):
            assert path == "/v1/completions"
            assert payload["prompt"]
            length = int(torch.randint(2, 6, (), generator=g))
            logps = (-2.0 - torch.rand(length, generator=g)).tolist()
            ids = torch.randint(3, 19, (length,), generator=g).tolist()
            return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logps}}]}

    class Session(contextlib.AsyncExitStack):
        def __init__(self, **options):
            super().__init__()

    class Buffer(queue.Queue):
        def put_nowait(self, sample):
            super().put_nowait(sample)
            if self.qsize() >= 64:
                loop._stop_event.set()

    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    value, event, results = SimpleNamespace(value=0), threading.Event(), Rollouts(0)
    results.rollout_buffer = Buffer()
    loop = Loop(
        model_name="model",
        dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": text(3)}]} for _ in range(16)]),
        reward_funcs=[lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids]],
        processing_class=tokenizer,
        eos_token_ids=[1],
        rollout_buffer=results.rollout_buffer,
        model_version_value=value,
        heartbeat_value=value,
        failed_event=event,
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=2,
        max_inflight_tasks=1,  # one after the other: both runs get them in the same order
    )
    client = SimpleNamespace(ClientSession=Session, TCPConnector=lambda **_: None)
    with mock.patch.object(module, "aiohttp", client, create=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.run()
    assert not event.is_set()
    return results


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
