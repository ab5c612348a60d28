"""Wrong arguments of a loss or its constructor: the error says how it is called, or which options there are."""

import pytest

from liger_losses import (
    ChunkedLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearORPOLoss,
)
from tests.reference import problem

CE, DPO = LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss
MISTAKES = {
    "logits and labels": (lambda h, w, y: CE()(h @ w.t(), y), r"'target'; call it as loss\(head, hidden_.*no logits"),
    "labels=": (
        lambda h, w, y: CE()(w, h, labels=y),
        "CrossEntropyLoss: it has no labels=; call it as .*_input, target",
    ),
    "a loss on pairs": (lambda h, w, y: DPO()(w, h), r"DPOLoss.*'target'.*\(head, chosen, rejected\)"),
    "a loss that derives": (
        lambda h, w, y: LigerFusedLinearORPOLoss()(w, h),
        r"'target'.*\(head, chosen, reje",
    ),
    "one's own": (lambda h, w, y: ChunkedLoss()(w, h), r"'labels'; call it as loss\(head, hidden_states, labels\)"),
    "a reference model": (lambda h, w, y: DPO()(w, h, y, ref_model=w), r"no ref_model=; of .* loss_inputs\(ref_model"),
    "an option of the constructor": (
        lambda h, w, y: DPO()(w, h, y, beta=0.1),
        r"no beta=; beta= is an option of the constructor, LigerFusedLinearDPOLoss\(beta=\.\.\.\); call it as",
    ),
    "an option of the base class, and one that there is not": (
        lambda h, w, y: CE()(w, h, y, temperature=2.0, label_smoothing=0.1, x=1),
        r"no temp.*, x=; temperature=, label_smoothing= are options .*\(temperature=\.\.\., label_sm[^x]*; call",
    ),
    "an option": (lambda h, w, y: DPO(bta=1), "DPOLoss has no option 'bta' .*'beta'.*; its options are .*group"),
    "an option of JSD": (lambda h, w, y: LigerFusedLinearJSDLoss(x=1), "JSDLoss has no option 'x'; .*beta, convention"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_how_it_is_called(name):
    call, message = MISTAKES[name]
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    with pytest.raises(TypeError, match=message):
        call(hidden, weight, labels)


def test_a_type_error_inside_of_a_loss_stays_as_it_is():
    class Own(ChunkedLoss):
        def loss(self, statistics, mask):
            raise TypeError("of its own")

    hidden, weight, labels, _ = problem(shape=(4, 5))
    with pytest.raises(TypeError, match="^of its own$"):
        Own()(weight, hidden, labels)
