"""What assert_no_logits raises for, and what it does not."""

import re

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from liger_losses import Head, assert_no_logits, linear_logps, patch
from tests.losses import CE, DPO
from tests.models import small
from tests.reference import problem

V = 61


def plain_loss(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels)


def test_the_error_has_the_operation_and_the_line():
    hidden, weight, labels, _ = problem(v=V)
    expected = r"aten\.mm\.default makes logits: \(13, 61\), torch\.float32, 0\.0 MiB.*\(3000 bytes\).*"
    with (
        assert_no_logits(V, 3000),
        pytest.raises(AssertionError, match=expected + rf"{re.escape(__file__)}:\d+ in plain_"),
    ):
        plain_loss(hidden, weight, labels)
    with assert_no_logits(V, 4 * 13 * V):
        plain_loss(hidden, weight, labels).backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_backward_is_checked(device):
    """And what checkpointing computes again there. On a GPU it runs in a thread of autograd, where the line is that of
    the thread that waits."""
    hidden, weight, labels, _ = (t if t is None else t.detach().to(device) for t in problem(v=V))
    loss = plain_loss(hidden.requires_grad_(), weight, labels)
    again = checkpoint(plain_loss, hidden, weight, labels, use_reentrant=False)
    line = rf"backward.* makes logits.*{re.escape(__file__)}:\d+ in test_backward_is_checked"
    for of, words in ((loss, line), (again, "mm.default makes logits.* in plain_loss")):
        with assert_no_logits(V, 1), pytest.raises(AssertionError, match=words):
            of.backward()


def test_tensors_without_memory_count_and_their_views_do_not():
    hidden, weight = torch.empty(8, 4, device="meta"), torch.empty(V, 4, device="meta")
    with assert_no_logits(V, 1):
        weight.t()
        with pytest.raises(AssertionError, match="mm.default makes logits"):
            hidden @ weight.t()


@pytest.mark.parametrize("workspace", [None, 20000])
def test_blocks_of_the_library_do_not_count(workspace):
    hidden, weight, labels, bias = problem(n=40, v=V, bias=True, shape=(4, 10))
    with assert_no_logits(Head(weight, bias), 1):
        CE(workspace=workspace)(weight, hidden, labels, bias).backward()
        checkpoint(CE(workspace=workspace), weight, hidden, labels, bias, use_reentrant=False).backward()
        DPO(use_ref_model=False, workspace=workspace)(weight, hidden, labels, bias)[0].backward()
        linear_logps(hidden, weight, labels, entropy=True, workspace=workspace).logp.sum().backward()


def test_logits_of_a_patched_model_count_where_they_are_computed():
    model = small()
    patch(model)
    ids = torch.randint(model.config.vocab_size, (2, 8))
    with assert_no_logits(model, 1):
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(AssertionError, match="makes logits"):
            model(input_ids=ids)


def test_compiled_functions_run_without_compilation(nothing_compiled):
    hidden, weight, labels, _ = problem(v=V)
    compiled = torch.compile(plain_loss, backend="eager")
    compiled(hidden, weight, labels)
    with assert_no_logits(weight, 1), pytest.raises(AssertionError, match="makes logits.* in plain_loss"):
        compiled(hidden, weight, labels)


def test_a_view_and_a_change_in_place_make_nothing():
    logits = torch.zeros(8, V)
    with assert_no_logits(V, 1):
        logits.view(2, 4, V).expand(3, 2, 4, V)[0].add_(1)
        with pytest.raises(AssertionError, match="aten.clone"):
            logits.clone()


def test_a_model_without_an_output_layer():
    with pytest.raises(ValueError, match="LlamaModel has no output layer"), assert_no_logits(small().model):
        pass
