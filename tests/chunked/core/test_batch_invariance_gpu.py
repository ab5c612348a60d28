"""On a GPU: a temperature per token is exact, and a token's statistics have the same bits in any batch."""

import pytest
import torch

from liger_losses import Divergence, EngineOptions, Head, LogitTransform, Teacher, linear_divergence, linear_statistics
from tests.reference import NAMES, assert_as_exact_as_plain, double, on_gpu, plain_statistics, total

pytestmark = pytest.mark.gpu
MiB = 2**20


@pytest.mark.parametrize("names", [("logp", "lse"), NAMES[:4]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 12.0])
def test_a_temperature_per_token(names, dtype, softcap):
    hidden, weight, labels, _ = on_gpu(517, 576, 5031, dtype=dtype)
    t = torch.linspace(0.4, 2.0, 517, device="cuda")
    exact_in = double(hidden, weight)
    transform = {"logit_scale": 1.2, "softcap": softcap}
    plain = plain_statistics(hidden, weight, labels, temperature=t[:, None].to(dtype), **transform)
    exact = plain_statistics(*exact_in, labels, temperature=t[:, None].double(), **transform)
    plain_grads = torch.autograd.grad(total(plain, names), (hidden, weight))
    exact_grads = torch.autograd.grad(total(exact, names), exact_in)
    floor = 1e-5 if dtype == torch.float32 else None
    for options in (EngineOptions(), EngineOptions(strategy="two_pass", workspace=24 * MiB)):
        found = linear_statistics(
            hidden, weight, labels, names, transform=LogitTransform(t, **transform), options=options
        )
        for name in names:
            assert_as_exact_as_plain(getattr(found, name), plain[name], exact[name], name, floor=floor)
        ours = torch.autograd.grad(total(found._asdict(), names), (hidden, weight))
        for what, a, p, e in zip(("hidden", "weight"), ours, plain_grads, exact_grads, strict=True):
            assert_as_exact_as_plain(a, p, e, what, floor=floor)


@pytest.mark.parametrize("form", ["forward_kl", "reverse_kl", "cosine"])
def test_a_temperature_per_token_in_divergences(form):
    """Of one value for all, the same as a number; by rows of logits, and by tiles without the student's."""
    hidden, weight, labels, _ = on_gpu(600, 256, 8000, dtype=torch.bfloat16)
    states, other, _, _ = on_gpu(600, 128, 8000, dtype=torch.bfloat16, seed=1)
    teacher, which = Teacher(states.detach(), other.detach()), getattr(Divergence, form)()
    for workspace in (None, 8 * MiB):
        results = []
        for t in (1.5, torch.full((600,), 1.5, device="cuda")):
            options = EngineOptions(workspace=workspace)
            found = linear_divergence(hidden, weight, labels, teacher, which, logp=True, temperature=t, options=options)
            grads = torch.autograd.grad((found.divergence + found.logp).sum(), (hidden, weight))
            results.append((found.divergence, found.logp, *grads))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize(
    "names",
    [
        ("logp", "lse", "mean_logit", "entropy"),
        ("logp", "entropy", "lse"),
        ("logp", "entropy", "lse", "log_sum_sq_probs"),
    ],
    ids="_".join,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("sizes", "softcap"), [((256, 32003), None), ((256, 32003), 20.0), ((1032, 5031), 20.0)])
@pytest.mark.parametrize("trained", ["nothing", "hidden states", "head", "head and bias"])
def test_the_same_bits_in_any_batch(names, dtype, sizes, softcap, trained):
    hidden, weight, labels, bias = on_gpu(3000, *sizes, dtype=dtype, bias=True, masked=0.0)
    hidden.requires_grad_(trained == "hidden states")
    weight.requires_grad_(trained.startswith("head"))
    bias.requires_grad_(trained.endswith("bias"))
    differentiable, metrics = names[:2], names[2:]

    def statistics(tokens, head, mask=None, **options):
        t = torch.linspace(0.5, 2.0, 3000, device="cuda")[tokens]
        y = labels[tokens] if mask is None else labels[tokens].masked_fill(mask, -100)
        head = head.with_fields(transform=LogitTransform(t, 1.2, softcap))
        found = linear_statistics(
            hidden[tokens], head, y, differentiable, metrics=metrics, options=EngineOptions(**options)
        )
        return torch.stack([getattr(found, name).detach() for name in names])

    head = Head(weight, bias, batch_invariant=True)
    with torch.no_grad():
        expected = statistics(torch.arange(3000, device="cuda"), head)
    generator = torch.Generator("cuda").manual_seed(0)
    for count in (1, 2, 5, 127, 300, 1100, 2900):
        tokens = torch.randint(3000, (count,), generator=generator, device="cuda")
        mask = torch.rand(count, generator=generator, device="cuda") < 0.4
        for options in ({}, {"workspace": 64 * MiB}, {"compact": False}):
            assert torch.equal(statistics(tokens, head, **options), expected[:, tokens])
            assert torch.equal(statistics(tokens, head, mask, **options)[:, ~mask], expected[:, tokens[~mask]])
