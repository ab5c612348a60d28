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
