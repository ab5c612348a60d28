"""Attributes of losses: each is read at every call, and a value that does not fit is refused when it is set."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import Completions, DistillationLoss, Divergence, Head, LogitTransform, Teacher
from tests import losses
from tests.losses import BCO, CE, CPO, DPO, GRPO, JSD, KL, KTO, ORPO, AlphaBeta, MiniLLM, SimPO
from tests.reference import linear_of, tensors_of
from tests.results import golden
from tests.results.losses import HIDDEN, LOSSES, batch

D = batch(torch.float32)
HEAD, REF = Head(D["weight"]), Head(D["ref_weight"])


def generic(**options):
    return DistillationLoss(options.pop("divergence", Divergence.forward_kl()), **options)


#: Options that a case's others need, with the values that are set to another one.
BEFORE = {"max_completion_length": 3, "log_ratio_penalty": 0.1, "reward_alpha": 0.5, "label_smoothing": 0.3}
BEFORE |= {"alpha": 0.9, "beta": 0.9}
#: By loss and option: the first case of the golden results that has it.
SETTABLE = {
    (case.loss, name): case
    for case in reversed(golden.CASES.values())
    for name in case.options
    if hasattr(losses, case.loss)
}


@pytest.mark.parametrize(("loss", "name"), SETTABLE)
def test_setting_an_option_equals_building_with_it(loss, name, monkeypatch):
    case, build = SETTABLE[loss, name], getattr(losses, loss)
    expected = golden.computed(case)

    def set_later(**options):
        value = options.pop(name)
        made = build(**options, **({name: BEFORE[name]} if name in BEFORE else {}))
        setattr(made, name, value)
        return made

    monkeypatch.setattr(losses, loss, set_later)
    assert golden.computed(case) == expected


#: Losses, options with a value that does not fit, and the errors.
WRONG_VALUES = [
    (CE, {"reduction": "average"}, "mean, sum, none"),
    (CE, {"label_smoothing": 1.5}, r"label_smoothing must lie in \[0.0, 1.0\]"),
    (CE, {"softcap": 0.0}, "softcap must be a positive"),
    (CE, {"softcap": -1.0}, "softcap must be a positive"),
    (CE, {"temperature": -1.0}, "temperature must be a positive"),
    (CE, {"accum_dtype": torch.bfloat16}, "accum_dtype"),
    (CE, {"workspace": 0}, "workspace must be a positive integer"),
    (CE, {"backend": "cuda"}, "unknown backend 'cuda'"),
    (DPO, {"beta": 0.0}, "beta must lie in"),
    (DPO, {"beta": float("inf")}, "beta must lie in"),
    (DPO, {"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
    (DPO, {"loss_type": "exo_pair"}, "above 0 .*1e-3"),
    (DPO, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one entry per loss_type"),
    (DPO, {"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "sigmoid, sigmoid_norm"),
    (DPO, {"loss_type": "aot", "use_weighting": True}, "no pairs to weight"),
    (DPO, {"loss_type": "ipo", "average_log_prob": True}, "divide by lengths already"),
    (DPO, {"loss_type": []}, "unknown loss_type"),
    (DPO, {"ld_alpha": 2.0}, "ld_alpha"),
    (DPO, {"chunk_size": 0}, "chunk_size"),
    (DPO, {"discopop_tau": 0.0}, "discopop_tau"),
    (CPO, {"use_ref_model": True}, "leave out use_ref_model"),
    (ORPO, {"use_ref_model": True}, "leave out use_ref_model"),
    (SimPO, {"use_ref_model": True}, "leave out use_ref_model"),
    (KTO, {"loss_type": "bco"}, "loss_type"),
    (KTO, {"desirable_weight": -1.0}, "desirable_weight"),
    (BCO, {"desirable_weight": -1.0}, "desirable_weight"),
    (GRPO, {"loss_type": "grpoo"}, "unknown loss_type"),
    (GRPO, {"loss_type": "dr_grpo"}, "max_completion_length"),
    (GRPO, {"loss_type": "dr_grpo", "max_completion_length": "a"}, "max_completion_length"),
    (GRPO, {"loss_type": "sapo", "importance_sampling_level": "sequence"}, "defined for tokens"),
    (GRPO, {"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "of the level 'geometric'"),
    (GRPO, {"loss_type": "dro"}, "log_ratio_penalty="),
    (GRPO, {"delta": 0.0}, "delta"),
    (GRPO, {"sapo_temperature_pos": 0.0}, "sapo_temperature_pos"),
    (GRPO, {"vespo_k_pos": -1.0}, "vespo_k_pos"),
    (GRPO, {"beta": -1.0}, "beta"),
    (GRPO, {"epsilon_low": -1.0}, "epsilon_low"),
    (GRPO, {"top_entropy_quantile": 0.0}, "top_entropy_quantile"),
    (GRPO, {"temperature": 0.0}, "temperature"),
    (GRPO, {"chunk_size": 0}, "chunk_size"),
    (GRPO, {"shift": True}, "has no shift"),
    (GRPO, {"ignore_index": 0}, "must not be a token id"),
    (GRPO, {"token_mask": "tvv"}, "unknown token_mask"),
    (GRPO, {"normalizer": "limit"}, "max_completion_length"),
    (JSD, {"beta": 1.1}, "beta must lie in"),
    (JSD, {"convention": "other"}, "unknown convention"),
    (JSD, {"temperature": 0.0}, "temperature must be"),
    (JSD, {"weight_soft_loss": -1.0}, "weight_soft_loss must lie in"),
    (KL, {"skew": 1.0}, "must"),
    (KL, {"weight_hard_loss": -1.0}, "weight_hard_loss must lie in"),
    (KL, {"top_k": 0}, "positive integer"),
    (KL, {"top_k_of": "both"}, "unknown top_k_of"),
    (KL, {"tail": "rest"}, "unknown tail"),
    (KL, {"entry_limit": 0.0}, "entry_limit"),
    (KL, {"entry_limit": 0.1, "skew": 0.1}, "take a limit"),
    (AlphaBeta, {"alpha": 0.0, "beta": 0.0}, "must"),
    (MiniLLM, {"gamma": 1.5}, "gamma must lie in"),
    (MiniLLM, {"temperature": 2.0}, "temperature must be"),
    (MiniLLM, {"weight_hard_loss": 0.5}, "has no cross-entropy"),
]
WRONG_TYPES = [
    (CE, {"ignore_index": 1.5}, "must be an integer"),
    (GRPO, {"entropy_coef": "high"}, "must be a number"),
    (generic, {"divergence": "forward_kl"}, "must be a Divergence"),
]


@pytest.mark.parametrize(
    ("build", "options", "message", "error"),
    [*((*row, ValueError) for row in WRONG_VALUES), *((*row, TypeError) for row in WRONG_TYPES)],
)
def test_a_value_that_does_not_fit_raises_and_changes_nothing(build, options, message, error):
    with pytest.raises(error, match=message):
        build(**options)
    if len(options) == 1:
        ((name, value),), loss = options.items(), build()
        before = getattr(loss, name)
        with pytest.raises(error, match=message):
            setattr(loss, name, value)
        assert getattr(loss, name) == before


def test_what_follows_from_attributes_cannot_be_set():
    for name in ("transform", "options"):
        with pytest.raises(AttributeError):
            setattr(DPO(), name, None)
    with pytest.raises(AttributeError):
        JSD().divergence = Divergence.reverse_kl()


def test_a_subclass_may_assign_an_attribute_twice_before_the_options_are_there():
    class Twice(liger_losses.ChunkedLoss):
        def __init__(self, scale):
            self.scale = 1.0
            self.scale = scale
            super().__init__()

    loss = Twice(2.0)
    with pytest.raises(ValueError, match="temperature"):
        loss.temperature = -1.0
    assert (loss.scale, loss.temperature) == (2.0, 1.0)


def test_how_to_stream_is_read_at_each_call():
    for build in (CE, DPO, JSD):
        loss = build()
        loss.workspace, loss.backend, loss.compact, loss.accum_dtype = 10**6, "torch", False, torch.float32
        options = loss.options
        assert (options.workspace, options.backend, options.compact) == (10**6, "torch", False)
        assert options.accum_dtype == torch.float32
    loss = CE()
    loss.workspace = 100
    with pytest.raises(ValueError, match="workspace=100"):
        loss(HEAD, D["h"], D["y"])


def test_options_that_a_subclass_computes_are_read_at_each_call():
    schedule = {"beta": 0.9, "chunk_size": 2, "softcap": 9.0}

    def scheduled(name):
        return property(lambda self: schedule[name], lambda self, value: None)

    loss = type("Annealed", (JSD,), {name: scheduled(name) for name in schedule})()
    for values in ((0.9, 2, 9.0), (0.3, 4, 3.0)):
        schedule.update(zip(schedule, values, strict=True))
        assert loss.divergence == JSD(beta=values[0]).divergence
        assert (loss.options.chunk_size, loss.transform.softcap) == values[1:]


# --- Heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cross entropy", "DPO", "ORPO", "KTO", "GRPO", "JSD", "KL, top-k", "MiniLLM"])
def test_weights_may_be_tensors_modules_and_heads(name):
    weight, bias, theirs = D["weight"], D["bias"], D["ref_weight"]
    expected = tensors_of(LOSSES[name](Head(weight, bias), theirs, D, softcap=4.0))
    for make in (linear_of, Head):
        torch.testing.assert_close(
            tensors_of(LOSSES[name](make(weight, bias), make(theirs), D, softcap=4.0)), expected, equal_nan=True
        )
    with_its_own = Head(weight, bias, LogitTransform(softcap=4.0))
    torch.testing.assert_close(tensors_of(LOSSES[name](with_its_own, theirs, D, softcap=4.0)), expected, equal_nan=True)
    with pytest.raises(ValueError, match="softcap was given twice"):
        LOSSES[name](Head(weight, transform=LogitTransform(softcap=3.0)), theirs, D, softcap=4.0)
    with pytest.raises(TypeError, match=r"no nn\.Linear|must be a tensor"):
        LOSSES[name](nn.LayerNorm(HIDDEN), theirs, D)


def test_native_forms_take_heads():
    sides = [Completions(*(D[name][rows] for name in ("h", "y", "other"))) for rows in (slice(2), slice(2, None))]
    bias, others = D["bias"], {"ref_weight": D["ref_weight"], "ref_bias": D["bias"]}
    for loss, extra in ((DPO(), {}), (KTO(use_ref_model=True), {"kl_completions": sides[0]})):
        expected = loss(D["weight"], *sides, bias=bias, **others, **extra)[0]
        found = loss(Head(D["weight"], bias), *sides, ref_weight=linear_of(D["ref_weight"], bias), **extra)[0]
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="given twice"):
        loss(Head(D["weight"], bias), *sides, bias=bias, **others)


def test_a_teachers_head():
    head = Head(D["ref_weight"], D["bias"], LogitTransform(1.0, 1.1, 3.0))
    made = Teacher(D["other"], head)
    assert made.head.transform == head.transform
    assert (made.head.weight is head.weight, made.head.bias is head.bias) == (True, True)
    assert made.vocab_size == len(head.weight)
    with pytest.raises(ValueError, match="teacher's head has temperature 2"):
        LOSSES["JSD"](HEAD, Head(D["ref_weight"], transform=LogitTransform(2.0)), D)


# --- Copies, signatures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
@pytest.mark.parametrize("name", ["cross entropy", "DPO", "KTO", "BCO", "GRPO"])
def test_a_copy_has_options_of_its_own(name, copied):
    loss = LOSSES[name].made(D, temperature=0.7, backend="torch")
    other = copied(loss)
    assert (other.settings, repr(other)) == (loss.settings, repr(loss))
    assert other.state_dict().keys() == loss.state_dict().keys()
    other.temperature = 2.0
    assert (loss.temperature, other.temperature) == (0.7, 2.0)
    found, expected = LOSSES[name].call(other, HEAD, REF, D), LOSSES[name](HEAD, REF, D, temperature=2.0)
    torch.testing.assert_close(tensors_of(found), tensors_of(expected), rtol=0, atol=0, equal_nan=True)


def test_options_are_frozen_and_read_by_name():
    loss = DPO(beta=0.3, ld_alpha=0.5)
    assert (loss.settings.beta, loss.beta, loss.ld_alpha) == (0.3, 0.3, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.settings.beta = 0.4
    with pytest.raises(AttributeError, match="has no attribute 'bta'"):
        _ = loss.bta


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DPO(*[1] * 12), "takes at most 11 options by position, got 12: ignore_index, beta"),
        (lambda: DPO(-100, ignore_index=-1), "was given ignore_index by position and by name"),
        (lambda: GRPO(average_log_prob=True), "has no option 'average_log_prob'"),
    ],
)
def test_wrong_options(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_signatures_list_every_option():
    parameters = inspect.signature(DPO).parameters
    assert list(parameters)[:3] == ["ignore_index", "beta", "alpha"]
    assert (parameters["beta"].default, parameters["workspace"].default) == (0.1, None)
    assert parameters["workspace"].kind is inspect.Parameter.KEYWORD_ONLY
    assert next(iter(inspect.signature(DPO()).parameters)) != "ignore_index"

    class Own(JSD):
        def __init__(self, floor=0.0, **options):
            self.floor = floor
            super().__init__(**options)

    parameters = inspect.signature(Own).parameters
    assert next(iter(parameters)) == "floor"
    assert parameters["convention"].default == "gkd"
