"""Wrong arguments of a loss, its constructor, or a function: the error says how it is called, or what there is."""

import pytest
import torch

from liger_losses import (
    ChunkedLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearORPOLoss,
    functional,
    linear_logps,
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
    "an option of JSD": (
        lambda h, w, y: LigerFusedLinearJSDLoss(x=1),
        "JSDLoss has no option 'x'; .*beta, .*convention",
    ),
    "an operation": (
        lambda h, w, y: linear_logps(h, w, y, tmperature=2.0),
        r"linear_logps: it has no tmperature= \(did you mean 'temperature'\?\); its arguments are hidden_states, ",
    ),
    "a function": (
        lambda h, w, y: functional.dpo_loss(*[h[0, 0]] * 4, bta=1),
        r"^dpo_loss has no argument 'bta' \(did you mean 'beta'\?\); its .* chosen_logps, .*chosen_nll, beta, label_",
    ),
    "a policy's function": (
        lambda h, w, y: functional.grpo_loss(h[..., 0], h[:, 0, 0], y >= 0, epsilon=1),
        r"^grpo_loss has no argument 'epsilon' \(did .*'epsilon_low'.* logps, advantages, mask, .*loss_type, beta",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_how_it_is_called(name):
    call, message = MISTAKES[name]
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    with pytest.raises(TypeError, match=message):
        call(hidden, weight, labels)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("name", ["labels=", "a loss on pairs", "a loss that derives", "one's own", "an operation"])
def test_a_compiled_function_says_the_same(name):
    call, message = MISTAKES[name]
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    losses = {"labels=": CE, "a loss on pairs": DPO, "a loss that derives": LigerFusedLinearORPOLoss}
    loss = losses.get(name, ChunkedLoss)()
    calls = {
        "labels=": lambda h: loss(weight, h, labels=labels),
        "an operation": lambda h: call(h, weight, labels),
    }
    function = calls.get(name, lambda h: loss(weight, h))
    with pytest.raises(TypeError, match=message):
        torch.compile(function, backend="eager")(hidden)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=message):
        torch.compile(function, backend="eager", fullgraph=True)(hidden)


def test_a_type_error_inside_of_a_loss_stays_as_it_is():
    class Own(ChunkedLoss):
        def loss(self, statistics, mask):
            raise TypeError("of its own")

    hidden, weight, labels, _ = problem(shape=(4, 5))
    with pytest.raises(TypeError, match="^of its own$"):
        Own()(weight, hidden, labels)
