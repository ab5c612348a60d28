"""TRL's experimental trainers: teachers and adapters whose heads are pending or not."""

import warnings

import pytest
import torch

from liger_losses import Divergence, Head, functional
from liger_losses.patching.operations import NeedsValues
from liger_losses.patching.pending import PendingLogits, pending_product
from liger_losses.places import around
from liger_losses.trl import enable, enabled, experimental
from liger_losses.trl.divergences import chunked_divergence_loss
from tests.models import tiny_model
from tests.trl.trainers import sft, train


def pending(hidden_states, weight):
    return pending_product(hidden_states, Head(weight))


def test_a_head_that_cannot_be_prepared_is_used_as_it_is():
    class Trainer:
        @around(experimental.with_pending_logits)
        def compute(self):
            return [type(model(input_ids=torch.ones(1, 2, dtype=torch.long)).logits) for model in vars(self).values()]

    trainer = Trainer()
    trainer.model, trainer.teacher_model = tiny_model()[0], tiny_model()[0]
    trainer.teacher_model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"backward hooks.*\): the teacher_model computes"):
        assert trainer.compute() == [PendingLogits, torch.Tensor]


def test_ordinary_logits_take_trls_function():
    from trl.trainer import utils

    ours, theirs = (module.selective_log_softmax_and_entropy for module in (experimental, utils))
    hidden, weight, ids = torch.randn(2, 5, 6, requires_grad=True), torch.randn(23, 6), torch.randint(23, (2, 5))
    expected = theirs(hidden @ weight.T, ids, entropy_requires_grad=False)
    for logits in (hidden @ weight.T, pending(hidden, weight)):
        found = experimental.with_replacement(ours, theirs, logits, ids, entropy_requires_grad=False)
        torch.testing.assert_close(found, expected)
        assert [values.requires_grad for values in found] == [True, False]
    with pytest.raises(NeedsValues):  # of each token
        experimental.generalized_jsd_loss(logits, hidden @ weight.T, ids, reduction="none")


def test_trainable_tokens_of_a_tied_head_train(tmp_path):
    """TRL's head cannot train them; here they are part of the logits, with the gradient of the model's own loss."""
    with pytest.raises(AttributeError):
        train(sft, tmp_path / "plain", False, adapter=("some tokens",))
    _, trained = train(sft, tmp_path / "ours", True, adapter=("some tokens",))
    assert any("trainable_tokens_delta" in name for name in trained)


def test_another_divergence_than_the_jsd():
    """``enable(divergence=)`` is what all functions take, until ``disable``."""
    hidden, wide, student, teacher = torch.randn(2, 5, 6), torch.randn(2, 5, 8), torch.randn(23, 6), torch.randn(23, 8)
    log_p, log_q = (hidden @ student.T).log_softmax(-1), (wide @ teacher.T).log_softmax(-1)
    which = Divergence.kl_by_entropy(1.0, 0.5)
    for chosen, expected in ((which, functional.divergence(log_p, log_q, which)), (None, functional.jsd(log_p, log_q))):
        with enabled(divergence=chosen):
            loss, *_ = chunked_divergence_loss(hidden, wide, student, teacher, torch.ones(2, 5), 0.5)
            torch.testing.assert_close(loss, expected.mean())
            given = pending(hidden, student), wide @ teacher.T
            found = experimental.full_logit_self_distillation(*given, distillation_alpha=0.5)
            torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="must be a Divergence"):
        enable(divergence="reverse_kl")


def test_models_of_other_vocabularies_are_refused_as_by_trl():
    """GKD's function raises where the numbers of columns differ, be it by one; the trainer of distillation does, and
    its function takes the first rows of a teacher that has more."""
    import trl.trainer.distillation_trainer as module
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, other = torch.randn(23, 6), torch.randn(24, 8)
    hidden, wide, mask = torch.randn(2, 5, 6), torch.randn(2, 5, 8), torch.ones(2, 5)
    options = {"teacher_lm_head_bias": torch.randn(24), "student_logit_scale": 0.6, "teacher_logit_scale": 1.7}
    options |= {"student_final_logit_softcapping": 2.0, "teacher_final_logit_softcapping": 3.0, "temperature": 0.8}
    functions = module._chunked_divergence_loss, chunked_divergence_loss
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
