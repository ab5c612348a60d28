"""Teachers: their logits, functions, top entries, and vocabularies of another size."""

import warnings

import pytest
import torch

from liger_losses import Teacher, TeacherLogits
from tests.losses import JSD, MiniLLM


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
@pytest.mark.parametrize(("student", "teacher"), [(300, 32_000), (1325, 300)])
def test_vocabularies_that_padding_does_not_explain_are_refused(student, teacher, loss):
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(student, 4), torch.randint(300, (2, 3))
    kinds = teachers_of(teacher)[: 1 if isinstance(loss, MiniLLM) else 3]
    said = rf"the student has {student} columns and the teacher {teacher}.*more than 1024.*columns_correspond=True"
    for given in kinds:
        with pytest.raises(ValueError, match=said):
            loss(weight, hidden, labels, given)
    if len(kinds) == 3:
        with pytest.raises(ValueError, match=said):  # liger-kernel's form
            loss(hidden, weight, torch.randn(2, 3, 5), torch.randn(teacher, 5), labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in teachers_of(teacher, columns_correspond=True)[: len(kinds)]:
            assert loss(weight, hidden, labels, given)[0].isfinite()


@pytest.mark.parametrize(("student", "teacher"), [(300, 301), (300, 1324), (1324, 300)])
def test_vocabularies_that_padding_explains_are_compared_with_a_warning(student, teacher):
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(student, 4), torch.randint(300, (2, 3))
    loss = JSD()
    for given in teachers_of(teacher):
        with pytest.warns(UserWarning, match=f"the student has {student} columns and the teacher {teacher}.*first 300"):
            loss(weight, hidden, labels, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in [*teachers_of(teacher, columns_correspond=True), *teachers_of(student)]:
            loss(weight, hidden, labels, given)
