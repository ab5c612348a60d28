"""Teachers: their logits, functions, top entries, and vocabularies of another size."""

import warnings

import pytest
import torch

from liger_losses import Divergence, EngineOptions, Teacher, TeacherLogits, linear_divergence
from tests.losses import JSD, MiniLLM
from tests.reference import problem


def teachers_of(columns, **options):
    states, weight = torch.randn(2, 3, 5), torch.randn(columns, 5)
    logits = states @ weight.T

    def function(positions):
        return logits.flatten(0, 1)[positions]

    return [
        Teacher(states, weight, **options),
        TeacherLogits(logits, **options),
        TeacherLogits(function, columns=columns, **options),
    ]


@pytest.mark.parametrize("loss", [JSD(), MiniLLM()], ids=["JSD", "MiniLLM"])
@pytest.mark.parametrize(
    ("student", "teacher", "explained"),
    [(300, 32_000, False), (1325, 300, False), (300, 301, True), (300, 1324, True), (1324, 300, True)],
)
def test_vocabularies_of_other_sizes(student, teacher, explained, loss):
    """What padding explains is compared with a warning, and the rest is refused."""
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(student, 4), torch.randint(300, (2, 3))
    kinds = slice(1 if isinstance(loss, MiniLLM) else 3)
    said = rf"the student has {student} columns and the teacher {teacher}.*"
    said += "first 300" if explained else "more than 1024.*columns_correspond=True"
    for given in teachers_of(teacher)[kinds]:
        with pytest.warns(UserWarning, match=said) if explained else pytest.raises(ValueError, match=said):
            loss(weight, hidden, labels, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in [*teachers_of(teacher, columns_correspond=True)[kinds], *teachers_of(student)[kinds]]:
            assert loss(weight, hidden, labels, given)[0].isfinite()


@pytest.mark.parametrize("kept", [True, False])
def test_a_function_is_asked_once_for_each_token_of_a_block(kept):
    """Not again where gradients of several blocks are collected, or where a block has lived until backward."""
    pytest.importorskip("triton")
    hidden, weight, labels, _ = problem(1400, 16, 97, dtype=torch.bfloat16, masked=0.1)
    logits, asked = torch.randn(1400, 97), []
    teacher = TeacherLogits(lambda at: asked.append(len(at)) or logits[at], columns=97)
    if kept:
        options = EngineOptions(backend="triton")
        linear_divergence(
            hidden, weight, labels, teacher, Divergence.jsd(), options=options
        ).divergence.sum().backward()
    else:
        JSD(backend="triton", workspace=700_000)(weight, hidden, labels, teacher)[0].backward()
    assert sum(asked) == int((labels != -100).sum())
    assert len(asked) == 1 if kept else len(asked) > 2
