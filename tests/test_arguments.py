"""Wrong arguments of a loss, its constructor, or a function: the error says how it is called, or what there is."""

import pytest
import torch

import liger_losses
from liger_losses import ChunkedLoss, Completions, Head, Teacher, linear_labels_loss, linear_logps
from tests import losses
from tests.losses import CE, DPO, GRPO, KTO, ORPO
from tests.reference import problem

MARKS = torch.tensor([True, False, False, True])


NO_REFERENCE = {"use_ref_model": False}


def test_a_forward_that_passes_all_on_takes_the_names_that_it_passes_on():
    class Doubled(CE):
        def forward(self, *arguments, **keywords):
            return 2 * super().forward(*arguments, **keywords)

    h, w, y, _ = problem(shape=(4, 5), masked=0.2)
    assert Doubled()(head=w, hidden_states=h, labels=y) == 2 * CE()(w, h, y)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("loss", "call", "message"),
    [
        (CE(), lambda loss, h, w, y: loss(w, h, targets=y), "CrossEntropyLoss: it has no targets= "),
        (DPO(), lambda loss, h, w, y: loss(w, h), r"DPOLoss.*'rejected'.*\(head, chosen, rejected\)"),
        (ORPO(), lambda loss, h, w, y: loss(w, h), r"'rejected'.*\(head, chosen, reje"),
        (ChunkedLoss(), lambda loss, h, w, y: loss(w, h), "'labels'; call it as"),
        (None, lambda _, h, w, y: linear_logps(h, w, y, tmperature=2.0), "linear_logps: it has no tmperature= "),
    ],
)
def test_a_compiled_function_says_the_same(loss, call, message):
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    function = lambda h: call(loss, h, weight, labels)  # noqa: E731
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


#: What constructors and calls need beside the documented arguments.
OPTIONS = {"AlphaBeta": {"alpha": 0.5}, "GRPO": {"beta": 0.0}, "DPO": NO_REFERENCE, "BCO": NO_REFERENCE}
LOSSES = [name for name in liger_losses.__all__ if name.startswith("LigerFusedLinear")]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_the_documented_names_of_each_form(name):
    loss = getattr(liger_losses, name)
    short = name.removeprefix("LigerFusedLinear").removesuffix("Loss")
    h, w, y, _ = problem(shape=(4, 5), masked=0.2)
    sides = (h[:2], y[:2]), (h[2:], y[2:])
    values = {"head": w, "hidden_states": h, "labels": y, "teacher": Teacher(h.detach() * 1.1, w.detach())}
    values |= {"chosen": sides[0], "rejected": sides[1], "desirable": sides[0], "undesirable": sides[1]}
    values |= {"completions": (h, y), "selected_token_ids": y.clamp(min=0), "attention_mask": y >= 0}
    values |= {"mask": y >= 0, "advantages": h[:, 0, 0].detach()}
    assert len(LOSSES) > 14
    for form in loss.forms:
        also = {"kl": 0.0} if short == "KTO" else {}
        if short in ("KTO", "BCO") and "desirable" not in form:
            also["preference_labels"] = MARKS
        given = {each: values[each] for each in form}
        given |= {"labels": y.clamp(min=0)} if "mask" in form else {}
        called = [loss(**OPTIONS.get(short, {})) for _ in range(2)]  # BCO has a state
        by_position, by_name = called[0](*given.values(), **also), called[1](**given, **also)
        assert torch.equal(
            *(found if isinstance(found, torch.Tensor) else found[0] for found in (by_position, by_name))
        )


@pytest.mark.parametrize("name", ["GRPO", "KTO", "BCO"])
def test_head_and_hidden_states_may_come_in_either_order(name):
    loss, (h, w, y, _) = getattr(losses, name), problem(shape=(4, 5), masked=0.0)
    more = {"attention_mask": y >= 0, "advantages": h[:, 0, 0].detach()}
    more = more if name == "GRPO" else {"preference_labels": MARKS, **({"kl": 0.0} if name == "KTO" else {})}
    of_layer = torch.nn.Linear(*w.shape[::-1], bias=False, dtype=w.dtype)
    of_layer.weight.data.copy_(w)
    for pair in ((h, w), (w, h), (of_layer, h), (Head(w), h)):
        value, _ = loss(**OPTIONS.get(name, {}))(*pair, y, **more)
        assert value == loss(**OPTIONS.get(name, {}))(h, w, y, **more)[0]
    for mixed in ({"lin_weight": w, "hidden_states": h}, {"head": w, "_input": h}):
        assert value == loss(**OPTIONS.get(name, {}))(**mixed, labels=y, **more)[0]


#: By what is constant, its shape and a call that takes it.
CONSTANTS = {
    "token_weights": ((2, 5), lambda h, w, y, t: CE()(w, h, y, token_weights=t)),
    "weights": ((2, 5, 3), lambda h, w, y, t: linear_labels_loss(h, w, y[..., None].expand(2, 5, 3), t)),
    "sample_weights": (2, lambda h, w, y, t: KTO()(w, (h, y), preference_labels=t > 2, kl=0.0, sample_weights=t)),
    "ref_logps": (
        2,
        lambda h, w, y, t: DPO()(w, Completions(h, y, ref_logps=t), Completions(h, y, ref_logps=t.detach())),
    ),
    "advantages": (2, lambda h, w, y, t: GRPO(beta=0.0)(h, w, y, torch.ones(2, 5), t)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_requires_a_gradient_is_warned_of(name, recwarn):
    (shape, call), inputs = CONSTANTS[name], problem(shape=(2, 5), masked=0.0)[:3]
    constant = torch.rand(shape, requires_grad=True)
    call(*inputs, constant.detach())
    with torch.no_grad():
        call(*inputs, constant)
    assert not recwarn.list
    call(*inputs, constant)
    (warning,) = recwarn.list
    assert str(warning.message).startswith(f"{name} requires a gradient, but gets none")
    assert warning.filename == __file__
