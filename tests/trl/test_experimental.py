"""TRL's experimental trainers: teachers and adapters whose heads are pending or not."""

import warnings

import pytest
import torch

from liger_losses import Head
from liger_losses.patching.pending import pending_product
from tests.project.test_examples import tiny_model
from tests.trl.trainers import sft, train


def pending(hidden_states, weight):
    return pending_product(hidden_states, Head(weight))


def test_a_teacher_whose_head_cannot_be_prepared_is_used_as_it_is():
    from liger_losses.patching.loss_head import is_head
    from liger_losses.places import around
    from liger_losses.trl.experimental import with_heads

    class Trainer:
        @around(with_heads)
        def __init__(self, model, teacher_model):
            self.model, self.teacher_model = model, teacher_model

    model, teacher = tiny_model()[0], tiny_model()[0]
    teacher.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"backward hooks.*\): as teacher_model, it computes"):
        Trainer(model, teacher)
    assert is_head(model.lm_head)
    with pytest.raises(TypeError, match="train it outside"):
        Trainer(teacher, model)


@pytest.mark.parametrize(
    ("targets", "error", "parameter"),
    [(("q_proj", "lm_head"), ValueError, "lm_head.lora"), (("some tokens",), AttributeError, "trainable_tokens_delta")],
)
def test_adapters_on_the_head_train(targets, error, parameter, tmp_path):
    """TRL refuses them; here the adapter is part of the logits, as tests of patched heads have it in all kinds."""
    with pytest.raises(error):
        train(sft, tmp_path / "plain", False, adapter=targets)
    _, trained = train(sft, tmp_path / "ours", True, adapter=targets)
    assert any(parameter in name for name in trained)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_asynchronous_distillation(beta, tail):
    """Its rollouts come from elsewhere; what it computes of them is one function."""
    import trl.experimental.async_distillation.async_distillation_trainer as module

    from liger_losses.trl.divergences import chunked_jsd_loss

    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((11, 6), (23, 6), (23,)))
    columns = torch.stack([torch.randperm(23, generator=g)[:4] for _ in range(11)])
    teacher = torch.randn(11, 23, generator=g).log_softmax(-1).gather(1, columns)
    there = torch.rand(11, 4, generator=g) < 0.7
    there[:, 0] = True
    columns = torch.where(there, columns, -1)
    results = []
    for function in (module._chunked_jsd_loss, chunked_jsd_loss):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        loss, *sums = function(*leaves, 1.3, 5.0, columns, teacher, there, beta, 0.7, tail, torch.arange(11) % 2, 2, 4)
        results.append([loss.detach(), *sums, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results[::-1], rtol=1e-4, atol=1e-5)
    # As with a head that is kept in fp32; TRL's product is in fp32 then.
    leaves = [t.requires_grad_() for t in (hidden.bfloat16(), weight, bias)]
    loss, *_ = chunked_jsd_loss(*leaves, 1.3, 5.0, columns, teacher, there, beta, 0.7, tail, None, 2, 4)
    assert [g.dtype for g in torch.autograd.grad(loss, leaves)] == [t.dtype for t in leaves]


def test_another_divergence_than_the_jsd():
    """``enable(divergence=)`` is what all functions take, until ``disable``."""
    from liger_losses import Divergence, functional
    from liger_losses.trl import disable, enable, enabled
    from liger_losses.trl.divergences import chunked_divergence_loss
    from liger_losses.trl.experimental import full_logit_self_distillation

    hidden, wide, student, teacher = torch.randn(2, 5, 6), torch.randn(2, 5, 8), torch.randn(23, 6), torch.randn(23, 8)
    log_p, log_q = (hidden @ student.T).log_softmax(-1), (wide @ teacher.T).log_softmax(-1)
    which = Divergence.kl_by_entropy(1.0, 0.5)
    for chosen, expected in ((which, functional.divergence(log_p, log_q, which)), (None, functional.jsd(log_p, log_q))):
        with enabled(divergence=chosen):
            loss, *_ = chunked_divergence_loss(hidden, wide, student, teacher, torch.ones(2, 5), 0.5)
            torch.testing.assert_close(loss, expected.mean())
            given = pending(hidden, student), wide @ teacher.T
            torch.testing.assert_close(full_logit_self_distillation(*given, distillation_alpha=0.5), expected)
    enable(divergence=which)
    try:
        with pytest.raises(RuntimeError, match="another divergence"):
            enable(divergence=Divergence.reverse_kl())
        with pytest.raises(TypeError, match="must be a Divergence"):
            enable(divergence="reverse_kl")
    finally:
        disable()


def test_models_of_other_vocabularies_are_refused_as_by_trl():
    """GKD's function raises where the numbers of columns differ, be it by one; the trainer of distillation does, and
    its function takes the first rows of a teacher that has more."""
    import trl.trainer.distillation_trainer as module
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    from liger_losses.trl import divergences, experimental

    student, other = torch.randn(23, 6), torch.randn(24, 8)
    hidden, wide, mask = torch.randn(2, 5, 6), torch.randn(2, 5, 8), torch.ones(2, 5)
    options = {"teacher_lm_head_bias": torch.randn(24), "student_logit_scale": 0.6, "teacher_logit_scale": 1.7}
    options |= {"student_final_logit_softcapping": 2.0, "teacher_final_logit_softcapping": 3.0, "temperature": 0.8}
    functions = module._chunked_divergence_loss, divergences.chunked_divergence_loss
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        theirs, ours = (function(hidden, wide, student, other, mask, 0.5, **options)[0] for function in functions)
    torch.testing.assert_close(ours, theirs)
    for function in functions:
        with pytest.raises((RuntimeError, ValueError)):
            function(hidden, wide, student, other[:22], mask, 0.5)
    logits = pending(hidden, student)
    with pytest.raises(RuntimeError):
        GKDTrainer.generalized_jsd_loss(hidden @ student.T, wide @ other.T, mask.long())
    for given in (wide @ other.T, pending(wide, other)):
        said = "the student has 23 columns and the teacher 24, and TRL compares all columns of both"
        with pytest.raises(ValueError, match=said):
            experimental.generalized_jsd_loss(logits, given, mask.long())
        with pytest.raises(ValueError, match=said):
            experimental.full_logit_self_distillation(logits, given, distillation_alpha=0.5)
