"""Losses of policies on a GPU are those on a CPU."""

import pytest
import torch

from liger_losses.chunked.losses.policy_tables import LOSS_TYPES
from tests.chunked.core.test_stream_gpu import gradients, on
from tests.losses import GRPO

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_losses_equal_those_on_a_cpu(loss_type, level):
    from tests.chunked.losses.test_policy import needed
    from tests.chunked.losses.test_policy import problem as policy

    if level == "sequence" and LOSS_TYPES[loss_type].of_tokens:
        pytest.skip("not defined")
    if loss_type == "clip_cov":
        pytest.skip("which tokens it drops depends on the last bits of their covariances")
    results = []
    for device in ("cpu", "cuda"):
        hidden, weight, bias, ids, mask, advantages, logps, noise = (on(device, t) for t in policy())
        options, inputs = needed(loss_type, logps + 0.05 * noise)
        inputs = {name: on(device, value) for name, value in inputs.items()}
        options |= {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, "use_ref_model": True}
        module = GRPO(**options)
        old, reference = logps + 0.1 * noise, logps + 0.2 * noise.flip(0)
        loss, _ = module(
            hidden,
            weight,
            ids,
            mask,
            advantages,
            bias,
            ref_per_token_logps=reference,
            old_per_token_logps=old,
            **inputs,
        )
        results.append([t.cpu() for t in (loss.detach(), *gradients(loss, (hidden, weight, bias)))])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
