"""A token's forward statistics have the same bits in any batch: any number of tokens, order, mask and workspace."""

import pytest
import torch
import torch.nn.functional as F

import liger_losses as ll
from tests.kernels.cases import interpreted
from tests.reference import NAMES, problem

pytestmark = pytest.mark.usefixtures("products_of_one_order")
POOL = 90


def statistics(tokens, names, head, options, masked=0, gradient=True):
    """The statistics of some tokens of the pool, ``[names, tokens]``; ``masked`` others lie between them."""
    hidden, labels, temperature = (part[tokens] for part in pool(head))
    if masked:  # a masked token in front of each
        hidden = torch.stack([hidden.flip(0) * 3, hidden], 1).flatten(0, 1)
        labels = torch.stack([torch.full_like(labels, -100), labels], 1).flatten()
        temperature = temperature.repeat_interleave(2)
    head = head.with_fields(transform=ll.LogitTransform(temperature, 1.2, 8.0))
    with torch.set_grad_enabled(gradient):
        found = ll.linear_statistics(hidden.requires_grad_(gradient), head, labels, names, options=options)
    values = torch.stack([getattr(found, name).detach() for name in names])
    return values[:, 1::2] if masked else values


def pool(head):
    hidden, _, labels, _ = problem(POOL, head.hidden_size, head.vocab_size, dtype=head.weight.dtype, masked=0.0, seed=9)
    return hidden.detach(), labels, torch.linspace(0.5, 2.0, POOL)


def head_of(dtype, hidden_size, vocab_size, invariant, needs=False):
    _, weight, _, bias = problem(1, hidden_size, vocab_size, dtype=dtype, bias=True)
    return ll.Head(weight.detach().requires_grad_(needs), bias.detach(), batch_invariant=invariant)


def differing(head, draws, names, backend):
    """How many statistics of drawn batches differ in bits from those of the whole pool."""
    expected = statistics(torch.arange(POOL), names, head, ll.EngineOptions(backend=backend), gradient=False)
    wrong = 0
    for tokens, chunk_size, workspace, passes, masked in draws:
        tokens = torch.tensor(tokens)
        strategy = "two_pass" if passes == 2 else None
        options = ll.EngineOptions(backend=backend, chunk_size=chunk_size, workspace=workspace, strategy=strategy)
        found = statistics(tokens, names, head, options, masked, gradient=passes > 0)
        wrong += int((found != expected[:, tokens]).sum())
    return wrong


#: A batch beside the pool of 90 tokens: more row tiles, other splits; without a gradient, and in one pass or two.
DRAWS = [
    ([4], None, None, 0, False),
    ([*range(60), *range(90)], None, None, 0, False),
    ([4, 80, 3], None, None, 1, True),
    ([5, 4], 1, None, 2, False),
]
ON_A_CPU = [([7] * 40, 7, None, 0, True), (list(range(5)), 1, 400_000, 0, False)]


KERNELS = {"backend": "triton", "names": ("logp", "entropy"), "sizes": (16, 600), "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        *({"dtype": dtype} for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        {"sizes": (64, 2100)},
        *(pytest.param({**KERNELS, **more}, marks=interpreted) for more in ({}, {"names": NAMES[:5]}, {"needs": True})),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_batch(options):
    """And without the setting they do, so that the test sees it: but not in the kernels of rows alone, for rows that
    interpreted products give the same."""
    given = {"dtype": torch.float64, "sizes": (33, 150), "names": NAMES, "backend": "torch", "needs": False, **options}
    needs = given["needs"]  # blocks keep exponentials
    heads = {setting: head_of(given["dtype"], *given["sizes"], setting, needs) for setting in (True, False)}
    draws = DRAWS if given["backend"] == "triton" else [*DRAWS, *ON_A_CPU]
    assert differing(heads[True], draws, given["names"], given["backend"]) == 0
    if given["backend"] == "torch":
        assert differing(heads[False], draws, given["names"], given["backend"]) > 0


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "torch"), pytest.param(torch.bfloat16, "triton", marks=interpreted)]
)
@pytest.mark.parametrize("form", [ll.Divergence.forward_kl(), ll.Divergence.cosine()], ids=str)
def test_divergences(form, dtype, backend):
    """Of any part of the tokens, one alone included, in any workspace, with a gradient or without."""
    count, columns = (POOL, 600) if backend == "torch" else (40, 70)
    hidden, weight, labels, bias = problem(count, 16, columns, dtype=dtype, masked=0.0, bias=True)
    teacher_hidden, teacher_weight, *_ = problem(count, 12, columns, dtype=dtype, seed=3)
    head = ll.Head(weight.detach(), bias.detach(), batch_invariant=True)
    temperature = torch.linspace(0.5, 2.0, count)

    def found(tokens, workspace=None, gradient=False):
        states = hidden.detach()[tokens].requires_grad_(gradient)
        teacher = ll.Teacher(teacher_hidden.detach()[tokens], teacher_weight.detach())
        options = ll.EngineOptions(workspace=workspace, backend=backend)
        values = ll.linear_divergence(
            states, head, labels[tokens], teacher, form, logp=True, temperature=temperature[tokens], options=options
        )
        return values.divergence.detach(), values.logp.detach()

    expected = found(torch.arange(count))
    some = torch.randperm(count, generator=torch.Generator().manual_seed(1))[:37]
    for tokens, workspace, gradient in ((some, None, True), (some, 60_000, False), (torch.tensor([31]), None, True)):
        for value, right in zip(found(tokens, workspace, gradient), expected, strict=True):
            assert torch.equal(value, right[tokens])


def test_the_environment_variable_and_what_is_refused(monkeypatch):
    weight = torch.randn(31, 8)
    assert not ll.Head(weight).batch_invariant
    monkeypatch.setattr("liger_losses.chunked.core.head._BATCH_INVARIANT", True)
    assert ll.Head(weight).batch_invariant
    assert ll.Head.of(ll.Head(weight), transform=ll.LogitTransform(0.7)).batch_invariant
    assert not ll.Head(weight, batch_invariant=False).batch_invariant


def test_kept_columns_are_padded_as_the_batch_asks():
    hidden, weight, labels, _ = problem(9, 16, 500, masked=0.0)
    ids = torch.stack([labels, (labels + 7) % 500], -1)
    head = ll.Head(weight, batch_invariant=True)
    few, many = (
        ll.linear_logps(hidden, head, labels, support=ll.TokenSupport(F.pad(ids, (0, padding), value=-1)), lse=True)
        for padding in (0, 200)
    )
    assert torch.equal(few.logp, many.logp)
    assert torch.equal(few.lse, many.lse)
