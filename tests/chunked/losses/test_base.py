"""Attributes of losses: each is read at every call, and a value that does not fit is refused when it is set."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import (
    AdaptiveEntropy,
    Completions,
    DistillationLoss,
    Divergence,
    Head,
    LogitTransform,
    Teacher,
    TeacherTopK,
)
from tests.losses import BCO, CE, CPO, DPO, GRPO, JSD, KL, KTO, ORPO, TVD, AlphaBeta, Cosine, MiniLLM, ReverseKL, SimPO
from tests.reference import linear_of, tensors_of

B, T, H, V = 4, 7, 12, 37
g = torch.Generator().manual_seed(3)
HIDDEN, REF_HIDDEN, TEACHER_HIDDEN = (torch.randn(B, T, H, generator=g) for _ in range(3))
WEIGHT, REF_WEIGHT, TEACHER_WEIGHT = (torch.randn(V, H, generator=g) / 3 for _ in range(3))
BIAS = torch.randn(V, generator=g)
LABELS = torch.randint(V - 1, (B, T), generator=g).masked_fill(torch.rand(B, T, generator=g) < 0.3, -100)
LABELS[0, 0], LABELS[3, 1] = V - 1, V - 1
MARKS, ADVANTAGES = torch.tensor([True, False, False, True]), torch.tensor([1.0, -0.5, 0.3, -1.0])
OLD = -3.6 + 0.5 * torch.randn(B, T, generator=g)


def labels_of(loss):
    return LABELS if loss.ignore_index == -100 else LABELS.clamp(min=0)


def teacher(weight=TEACHER_WEIGHT, **head):
    return Teacher(TEACHER_HIDDEN, weight, **head)


def sparse():
    logps, indices = (TEACHER_HIDDEN @ TEACHER_WEIGHT.T).log_softmax(-1).topk(5)
    return TeacherTopK(logps, indices)


def reference(weight, bias, used):
    return (REF_HIDDEN, weight, bias) if used else ()


# How each family is called with a policy's and another model's weight and bias.
def cross_entropy(loss, weight=WEIGHT, bias=None, other=REF_WEIGHT, other_bias=None):
    return loss(weight, HIDDEN, labels_of(loss), bias)


def pairs(loss, weight=WEIGHT, bias=None, other=REF_WEIGHT, other_bias=None):
    return loss(weight, HIDDEN, labels_of(loss), bias, *reference(other, other_bias, loss.use_ref_model))


def unpaired(loss, weight=WEIGHT, bias=None, other=REF_WEIGHT, other_bias=None):
    extra = {"kl": 0.3} if loss.loss_type == "kto" else {}
    return loss(
        HIDDEN, weight, labels_of(loss), bias, MARKS, *reference(other, other_bias, loss.use_ref_model), **extra
    )


def policy(loss, weight=WEIGHT, bias=None, other=REF_WEIGHT, other_bias=None):
    ids, names = LABELS.clamp(min=0), ("ref_input", "ref_weight", "ref_bias")
    extra = dict(zip(names, reference(other, other_bias, loss.use_ref_model), strict=False))
    return loss(HIDDEN, weight, ids, LABELS != -100, ADVANTAGES, bias, old_per_token_logps=OLD, **extra)


def distillation(loss, weight=WEIGHT, bias=None, other=TEACHER_WEIGHT, other_bias=None):
    return loss(weight, HIDDEN, LABELS, teacher=teacher(other, bias=other_bias), bias=bias)


def from_sparse(loss, weight=WEIGHT, bias=None, other=None, other_bias=None):
    return loss(weight, HIDDEN, LABELS, sparse(), bias=bias)


def generic(**options):
    return DistillationLoss(options.pop("divergence", Divergence.forward_kl()), **options)


def skewed(**options):
    return AlphaBeta(options.pop("alpha", 0.3), options.pop("beta", 0.6), **options)


ENGINE = {"ignore_index": V - 1, "temperature": 0.7, "logit_scale": 1.3, "softcap": 2.0, "shift": True}
POLICY = {k: v for k, v in ENGINE.items() if k not in ("ignore_index", "shift")}
DISTILLATION = {
    "weight_hard_loss": 0.9,
    "weight_soft_loss": 0.1,
    "temperature_squared": True,
    **{k: v for k, v in ENGINE.items() if k != "ignore_index"},
}
PAIRS = {"beta": 0.9, **ENGINE}
NLL = {"alpha": 0.3, "compute_nll_loss": False}
UNPAIRED = {"beta": 0.9, "average_log_prob": True, "desirable_weight": 2.0, "undesirable_weight": 0.5, **ENGINE}

#: How to build and call a loss, options that are given in any case, and the options that change its result.
CASES = [
    (
        CE,
        cross_entropy,
        {},
        {
            "ce_weight": torch.linspace(0.5, 1.5, V),
            "lse_square_scale": 0.1,
            "label_smoothing": 0.2,
            "reduction": "sum",
            "return_z_loss": True,
            "use_token_scaling": True,
            "return_token_accuracy": True,
            "return_predicted_tokens": True,
            **ENGINE,
        },
    ),
    (
        DPO,
        pairs,
        {"compute_nll_loss": True},
        {
            **PAIRS,
            **NLL,
            "average_log_prob": True,
            "use_ref_model": False,
            "loss_type": ["ipo", "sft"],
            "label_smoothing": 0.2,
            "loss_weights": [0.5],
            "f_divergence_type": "js_divergence",
            "ld_alpha": 0.3,
            "use_weighting": True,
        },
    ),
    (DPO, pairs, {"loss_type": "discopop", "beta": 0.5}, {"discopop_tau": 0.9}),
    (DPO, pairs, {"f_divergence_type": "alpha_divergence"}, {"f_alpha_divergence_coef": 0.4}),
    (
        CPO,
        pairs,
        {},
        {**PAIRS, **NLL, "average_log_prob": True, "loss_type": "ipo", "label_smoothing": 0.2, "reward_alpha": 0.2},
    ),
    (SimPO, pairs, {}, {**PAIRS, **NLL, "gamma": 0.9, "label_smoothing": 0.2}),
    (ORPO, pairs, {}, {**PAIRS, "compute_nll_loss": False}),
    (KTO, unpaired, {}, {**UNPAIRED, "use_ref_model": True, "loss_type": "apo_zero_unpaired"}),
    (BCO, unpaired, {}, {**UNPAIRED, "use_ref_model": False}),
    (
        GRPO,
        policy,
        {},
        {
            **POLICY,
            "beta": 0.9,
            "epsilon_low": 0.05,
            "epsilon_high": 0.05,
            "delta": 1.05,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "use_bias_correction_kl": True,
            "top_entropy_quantile": 0.4,
            "off_policy_mask_threshold": -0.1,
            "entropy_coef": 0.2,
        },
    ),
    (GRPO, policy, {"loss_type": "dr_grpo", "max_completion_length": 9}, {"max_completion_length": 3}),
    (GRPO, policy, {"loss_type": "sapo"}, {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 0.5}),
    (
        GRPO,
        policy,
        {"loss_type": "vespo"},
        {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
    ),
    (generic, distillation, {"temperature": 1.5}, {**DISTILLATION, "divergence": Divergence.reverse_kl()}),
    (generic, from_sparse, {"temperature": 1.5}, {**DISTILLATION, "divergence": Divergence.reverse_kl()}),
    (JSD, distillation, {"beta": 0.2, "temperature": 1.5}, {"beta": 0.7, "convention": "interpolated", **DISTILLATION}),
    (KL, distillation, {}, {"skew": 0.3, "weight_hard_loss": 0.9}),
    (ReverseKL, distillation, {}, {"skew": 0.3, "weight_hard_loss": 0.9}),
    (TVD, distillation, {}, {"weight_hard_loss": 0.9}),
    (skewed, distillation, {}, {"alpha": 0.5, "beta": 0.2, "weight_hard_loss": 0.9}),
    (Cosine, distillation, {}, {"beta": 0.7, "weight_hard_loss": 0.9}),
    (MiniLLM, distillation, {}, {"gamma": 0.5, "length_normalization": False, "single_step": False, "softcap": 2.0}),
]
CHANGES = [(b, c, given, n, v) for b, c, given, options in CASES for n, v in options.items()]
IDS = [
    f"{build.__name__.removeprefix('LigerFusedLinear')}-{call.__name__}-{name}" for build, call, _, name, _ in CHANGES
]


@pytest.mark.parametrize(("build", "call", "given", "name", "value"), CHANGES, ids=IDS)
def test_setting_an_option_equals_building_with_it(build, call, given, name, value):
    if name == "weight_hard_loss" and call is from_sparse:
        value = 0.2
    loss = build(**given)
    before = tensors_of(call(loss))
    loss = build(**given)
    setattr(loss, name, value)
    after, built = tensors_of(call(loss)), tensors_of(call(build(**{**given, name: value})))
    assert len(after) == len(built)
    torch.testing.assert_close(after, built, rtol=0, atol=0)
    changed = len(before) != len(after) or any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, after, strict=True)
    )
    assert changed, "the option changes nothing here, so that this test shows nothing"


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
    (DPO, {"loss_type": "dpo"}, "unknown loss_type"),
    (DPO, {"ld_alpha": 2.0}, "ld_alpha"),
    (DPO, {"chunk_size": 0}, "chunk_size"),
    (DPO, {"discopop_tau": 0.0}, "discopop_tau"),
    (CPO, {"loss_type": "alphapo"}, "reward_alpha"),
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
        cross_entropy(loss)


def test_an_option_of_a_divergence_that_a_subclass_computes():
    class Annealed(JSD):
        share = 0.9

        @property
        def beta(self):
            return self.share

        @beta.setter
        def beta(self, value):
            pass

    loss = Annealed()
    assert loss.divergence == JSD(beta=0.9).divergence
    loss.share = 0.3
    assert loss.divergence == JSD(beta=0.3).divergence


def test_options_that_a_subclass_computes_are_read_at_each_call():
    schedule = {"temperature": 1.0, "chunk_size": 2}

    class Annealed(liger_losses.ChunkedLoss):
        @property
        def temperature(self):
            return schedule["temperature"]

        @property
        def chunk_size(self):
            return schedule["chunk_size"]

        @temperature.setter
        def temperature(self, value):
            pass

        @chunk_size.setter
        def chunk_size(self, value):
            pass

    loss = Annealed()
    for temperature, chunk_size in ((1.0, 2), (3.0, 4)):
        schedule.update(temperature=temperature, chunk_size=chunk_size)
        assert (loss.transform.temperature, loss.options.chunk_size) == (temperature, chunk_size)


def test_an_adaptive_coefficient_may_be_set():
    loss = GRPO()
    loss.entropy_coef = AdaptiveEntropy(0.1, target=1.0)
    policy(loss)
    loss.entropy_coef.step()
    assert loss.entropy_coef.last_entropy > 0


# --- Heads ------------------------------------------------------------------------------------------------------------


HEADS = [
    (CE(softcap=4.0), cross_entropy),
    (DPO(softcap=4.0), pairs),
    (ORPO(softcap=4.0), pairs),
    (KTO(use_ref_model=True, softcap=4.0), unpaired),
    (GRPO(softcap=4.0), policy),
    (JSD(softcap=4.0), distillation),
    (KL(softcap=4.0), from_sparse),
    (MiniLLM(softcap=4.0), distillation),
]
HEAD_IDS = [f"{type(loss).__name__}-{call.__name__}" for loss, call in HEADS]


@pytest.mark.parametrize(("loss", "call"), HEADS, ids=HEAD_IDS)
def test_weights_may_be_tensors_modules_and_heads(loss, call):
    expected = tensors_of(call(loss, WEIGHT, BIAS, REF_WEIGHT, BIAS))
    for make in (linear_of, Head):
        found = tensors_of(call(loss, make(WEIGHT, BIAS), None, make(REF_WEIGHT, BIAS), None))
        torch.testing.assert_close(found, expected)
    with_its_own = Head(WEIGHT, BIAS, LogitTransform(softcap=4.0))
    torch.testing.assert_close(tensors_of(call(loss, with_its_own, None, REF_WEIGHT, BIAS)), expected)
    with pytest.raises(ValueError, match="given twice"):
        call(loss, Head(WEIGHT, BIAS), BIAS)
    with pytest.raises(ValueError, match="softcap was given twice"):
        call(loss, Head(WEIGHT, transform=LogitTransform(softcap=3.0)))
    with pytest.raises(TypeError, match=r"no nn\.Linear|must be a tensor"):
        call(loss, nn.LayerNorm(H))


@pytest.mark.parametrize(("loss", "call"), HEADS, ids=HEAD_IDS)
def test_each_head_is_made_once(loss, call, monkeypatch):
    made, make = [], Head.__init__

    def counted(self, weight, *others):
        made.append(weight)
        make(self, weight, *others)

    monkeypatch.setattr(Head, "__init__", counted)
    call(loss)
    heads = 1 if call in (cross_entropy, from_sparse) or not getattr(loss, "use_ref_model", True) else 2
    assert len(made) == heads
    assert len({id(weight) for weight in made}) == heads


def test_native_forms_take_heads():
    sides = [Completions(HIDDEN[rows], LABELS[rows], REF_HIDDEN[rows]) for rows in (slice(2), slice(2, None))]
    for loss, extra in ((DPO(), {}), (KTO(use_ref_model=True), {"kl_completions": sides[0]})):
        expected = loss(WEIGHT, *sides, bias=BIAS, ref_weight=REF_WEIGHT, ref_bias=BIAS, **extra)[0]
        found = loss(Head(WEIGHT, BIAS), *sides, ref_weight=linear_of(REF_WEIGHT, BIAS), **extra)[0]
        torch.testing.assert_close(found, expected)
    jsd = JSD()
    like_liger = jsd(HIDDEN, linear_of(WEIGHT, BIAS), TEACHER_HIDDEN, Head(TEACHER_WEIGHT, BIAS), LABELS)
    torch.testing.assert_close(like_liger, jsd(WEIGHT, HIDDEN, LABELS, teacher(bias=BIAS), bias=BIAS)[0])


def test_a_teachers_head():
    head = Head(TEACHER_WEIGHT, BIAS, LogitTransform(1.0, 1.1, 3.0))
    made = teacher(head)
    assert made.head.transform == head.transform
    assert (made.head.weight is TEACHER_WEIGHT, made.head.bias is BIAS) == (True, True)
    assert made.vocab_size == V
    assert teacher(bias=BIAS).head.bias is BIAS
    with pytest.raises(ValueError, match="teacher's head has temperature 2"):
        distillation(JSD(), other=Head(TEACHER_WEIGHT, transform=LogitTransform(2.0)))


# --- Copies, signatures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
@pytest.mark.parametrize(("build", "call"), [(build, call) for build, call, _, _ in CASES[:2] + CASES[7:10]])
def test_a_copy_has_options_of_its_own(build, call, copied):
    loss = build(temperature=0.7, backend="torch")
    other = copied(loss)
    assert (other.settings, repr(other)) == (loss.settings, repr(loss))
    assert other.state_dict().keys() == loss.state_dict().keys()
    other.temperature = 2.0
    assert (loss.temperature, other.temperature) == (0.7, 2.0)
    torch.testing.assert_close(tensors_of(call(other)), tensors_of(call(build(temperature=2.0))), rtol=0, atol=0)


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
        (lambda: AlphaBeta(), "alpha"),
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
