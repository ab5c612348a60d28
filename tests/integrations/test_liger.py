"""liger-kernel's names, replaced by this library: the same results as liger-kernel's, where it runs without a GPU."""

import importlib
import importlib.machinery
import inspect
import re
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import liger_losses
from liger_losses.chunked.losses.dpo import DPO_LOSSES
from liger_losses.integrations import liger, loading
from liger_losses.integrations.liger import losses, models, score_centering
from liger_losses.integrations.liger.chunked import _FUNCTIONS, CHUNKED, LOSSES
from liger_losses.patching.swap import replacement_of
from tests.integrations.models import is_patched, llama
from tests.reference import assert_close_gradients, problem

pytestmark = pytest.mark.filterwarnings("ignore:.*was imported before liger_losses.integrations:UserWarning")


@pytest.fixture
def installed():
    pytest.importorskip("liger_kernel.transformers", reason="liger-kernel is not installed")
    liger.install()
    yield
    liger.uninstall()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def both(call):
    """What ``call`` returns with liger-kernel, and with this library in its place."""
    pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    theirs = call()
    liger.install()
    try:
        return theirs, call()
    finally:
        liger.uninstall()


#: Of DPO's and GRPO's functions: the loss type, the level of ratios, delta, and whether the divergence is corrected.
TYPES = {f"DPO, {name}": (name,) for name in DPO_LOSSES if name not in ("ipo", "aot", "aot_unpaired", "sft")}
TYPES |= {
    "GRPO": ("grpo", "token", None, False),
    "GRPO, bnpo": ("bnpo", "token", 1.5, False),
    "GRPO, sequences": ("dapo", "sequence", None, False),
    "GRPO, corrected": ("dapo", "token", None, True),
    **{f"GRPO, {name}": (name, "token", None, False) for name in ("dr_grpo", "cispo", "sapo", "vespo")},
}
del TYPES["DPO, sigmoid_norm"]  # which mean something else there, or that there are not
_OTHERS = ("ORPO", "CPO", "SimPO", "JSD", "CosineSimilarity", "KTO", "ScaledCrossEntropy")


def arguments_of(name):
    """Of liger-kernel's autograd functions: inputs and options, and which of the inputs are trained."""
    (loss_type, *others), name = TYPES.get(name, ("",)), name.partition(",")[0]
    hidden, weight, labels, bias = problem(n=20, shape=(4, 5), bias=True)
    labels[:, -1], labels[:, 0] = -100, 3
    flat = hidden.detach().flatten(0, 1).requires_grad_()
    old, near = -normal(4, 5, seed=1).abs(), hidden.detach() + 0.1 * normal(4, 5, 24, seed=8)
    reference = normal(4, 5, 24, seed=3), normal(61, 24, seed=4), normal(61, seed=5)
    preferred = torch.tensor([True, False, True, False])
    grpo = labels.clamp(min=0), labels != -100, normal(4, seed=2), None, old - 0.1, old, None, None, None
    level, delta, corrected = others or (None, None, None)
    ratios = 0.5 + normal(4, 5, seed=9).sigmoid()
    smoothing = 0.0 if loss_type == "sigmoid" else 0.1  # which they ignore there
    arguments = {
        "DPO": (labels, bias, *reference, -100, 0.2, True, False, True, not smoothing, 1, loss_type, smoothing),
        "ORPO": (labels, bias, -100, 0.2, True, None, False),
        "CPO": (labels, bias, -100, 0.2, 0.5, 0.1, True, False),
        "SimPO": (labels, bias, -100, 0.2, 1.0, 0.0, False, False, 0.7),
        "KTO": (labels, preferred, None, near, weight.detach(), None, None, -100, 0.2, False, True),
        "GRPO": (*grpo, 0.1, 0.2, 0.3, loss_type, 5, level, 1.0, 1.05, 0.9, False, True, 1, ratios, delta, corrected),
    }
    teacher = normal(20, 24, seed=6), normal(61, 24, seed=7), labels.flatten(), None, None, 0.3, 0.7, 0.2
    of_flat = dict.fromkeys(("JSD", "CosineSimilarity"), (*teacher, -100, 2.0, False, 1024, True))
    counted = labels.flatten().where(labels.flatten() != -100, -7)
    of_flat["ScaledCrossEntropy"] = counted, 0.7, -7, 1, True, torch.tensor([5, 0, 5])
    trained = (hidden, weight) if name in arguments else (flat, weight)
    return (*trained, *(arguments | of_flat)[name]), trained


@pytest.mark.peers
@pytest.mark.parametrize("name", [*TYPES, *_OTHERS])
def test_autograd_functions(name):
    """Loss, gradients and metrics, with prompts and padding in the batch."""
    (arguments, trained), name = arguments_of(name), name.partition(",")[0]
    module = {"ScaledCrossEntropy": "ops", "CosineSimilarity": "chunked_loss.cosine_similarity_loss"}
    module = module.get(name, f"chunked_loss.{name.lower()}_loss")

    def call():
        found = getattr(importlib.import_module(f"liger_kernel.{module}"), f"LigerFusedLinear{name}Function")
        result = found.apply(*arguments)
        loss, *metrics = result if isinstance(result, tuple) else (result,)
        metrics = [*metrics[0]] if metrics and isinstance(metrics[0], tuple) else metrics
        return loss.detach(), metrics, torch.autograd.grad(loss.sum(), trained)

    theirs, ours = both(call)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.peers
@pytest.mark.parametrize("middle", LOSSES)
def test_classes_have_liger_kernels_keywords_and_positions(middle):
    theirs = importlib.import_module("liger_kernel.chunked_loss")
    ours, theirs = LOSSES[middle], getattr(theirs, f"LigerFusedLinear{middle}Loss")
    options = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(ours).parameters)[: len(options)] == options
    for function in (lambda c: c.__init__, lambda c: c.forward):
        takes = inspect.signature(function(ours)).parameters
        missing = set(inspect.signature(function(theirs)).parameters) - {*takes, *ours.parameters_named}
        assert not missing or any(p.kind is p.VAR_KEYWORD for p in takes.values()), missing


@pytest.mark.peers
def test_cispo_has_liger_kernels_default_bound():
    arguments, _ = arguments_of("GRPO")

    def call():
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        return LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, loss_type="cispo")(*arguments[:7])[0]

    theirs, ours = both(call)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.peers
def test_names_are_replaced_and_restored():
    """Also those that were imported before, of which a warning says that their users keep them."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    import liger_kernel.ops.fused_linear_cross_entropy as defining
    from liger_kernel import ops
    from liger_kernel.transformers import functional as liger_functional

    names = {chunked: "LigerFusedLinearDPOLoss", defining: "LigerFusedLinearCrossEntropyFunction"}
    names |= {ops: names[defining], liger_functional: "liger_fused_linear_jsd"}
    theirs = [getattr(module, name) for module, name in names.items()]
    said = r"liger_kernel\.\S+ was imported before .*install\(\).* Call install\(\) first"
    with pytest.warns(UserWarning, match=said):
        liger.install()
    ours, count = [getattr(module, name) for module, name in names.items()], len(liger._replaced)
    liger.install()
    assert len(liger._replaced) == count
    assert issubclass(ours[0], liger_losses.LigerFusedLinearDPOLoss)
    assert ours[1] is ours[2]
    assert ours[3].__module__.startswith("liger_losses.")
    liger.uninstall()
    assert not liger.is_installed()
    assert [getattr(module, name) for module, name in names.items()] == theirs


@pytest.mark.peers
def test_fused_linear_cross_entropy_by_each_of_its_names(installed):
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    hidden, weight, labels, _ = problem(shape=(2, 6))
    flat, targets = hidden.flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(flat @ weight.t(), targets)
    loss, z_loss, accuracy, predicted = LigerFusedLinearCrossEntropyFunction.apply(flat, weight, targets)
    torch.testing.assert_close(loss, expected)
    assert z_loss is accuracy is predicted is None
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss()(weight, flat, targets), expected)
    # What liger-kernel's own model forwards call, which get the answer through its functional module.
    loss = LigerForCausalLMLoss(hidden, weight, None, hidden.shape[-1], num_items_in_batch=5, shift_labels=labels)
    torch.testing.assert_close(loss, F.cross_entropy(flat @ weight.t(), targets, reduction="sum") / 5)
    options = {"label_smoothing": 0.3, "ce_weight": torch.linspace(0.5, 2.0, 61)}
    loss = LigerForCausalLMLoss(hidden, weight, None, hidden.shape[-1], shift_labels=labels, **options)
    expected = F.cross_entropy(flat @ weight.t(), targets, options["ce_weight"], label_smoothing=0.3)
    torch.testing.assert_close(loss, expected)


@pytest.mark.peers
def test_fused_linear_jsd(installed):
    from liger_kernel.transformers import LigerFusedLinearJSD

    labels = torch.tensor([-100, 1, 2, 3, -100, 5])
    hidden, weight, wide = normal(6, 8, seed=3), normal(17, 8, seed=4), normal(6, 17, seed=5).requires_grad_()
    student, teacher = (hidden @ weight.t() / 2.0).log_softmax(-1), (wide.detach() / 2.0).log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([teacher + torch.tensor(0.3).log(), student + torch.tensor(0.7).log()]), 0)
    terms = 0.3 * teacher.exp() * (teacher - mixture) + 0.7 * student.exp() * (student - mixture)
    loss = LigerFusedLinearJSD(0.3, temperature=2.0)
    for given, expected in ((labels, terms.sum(-1)[labels != -100]), (None, terms.sum(-1))):
        found = loss(hidden.requires_grad_(), weight, wide, torch.eye(17), given)
        torch.testing.assert_close(found.detach(), expected.mean())
        assert torch.autograd.grad(found, (hidden, wide), allow_unused=True)[1] is None


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", [losses.LigerFusedLinearJSD, losses.LigerFusedLinearKLDivLoss])
def test_labels_that_only_mask_may_ignore_0(kind, given):
    hidden, weight, wide = normal(4, 8), normal(17, 8, seed=1), normal(4, 17, seed=2)
    labels = torch.tensor([0, 1, 2, 0])
    taught = (wide, torch.eye(17)) if kind is losses.LigerFusedLinearJSD else (wide.softmax(-1),)
    found = kind(ignore_index=0)(hidden, weight, *taught, labels if given else None)
    expected = kind()(hidden, weight, *taught, labels.masked_fill(labels == 0, -100) if given else None)
    torch.testing.assert_close(found, expected)
    assert found > 0


@pytest.mark.parametrize("correction", [None, (0.0, 1.3, "clamp"), (0.8, 1.3), (0.8, 1.2, "drop", "ppo")])
@pytest.mark.parametrize("centers", [True, False])
def test_score_centering(correction, centers):
    """The paper's loss and the means that liger-kernel returns, over the whole vocabulary; with tokens that do not
    count, and without any."""
    correction = None if correction is None else score_centering.ISCorrection(*correction)
    hidden, weight, labels, bias = problem(shape=(3, 5), dtype=torch.float64, bias=True)
    ids, mask, a = labels.clamp(min=0), labels >= 0, torch.tensor([0.7, -1.0, 0.0])
    log_p = ((hidden @ weight.t() + bias) / 0.8).log_softmax(-1)
    log_q = (log_p.detach() + 0.5 * normal(3, 5, 61, dtype=torch.float64)).log_softmax(-1)
    top = log_q.topk(7)
    p, q = log_p.detach().exp(), log_q.exp()
    said = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, top.indices, 1)
    rest = (q * ~said).sum(-1, keepdim=True) / (p * ~said).sum(-1, keepdim=True)
    q = torch.where(said, q, rest * p)

    def weights(ratio, a):
        if correction is None:
            return torch.ones_like(ratio)
        low, high, outside, sign = correction
        if sign == "ppo":
            return ratio * torch.where(a >= 0, ratio <= high, (ratio >= low) & (ratio <= 3))
        kept = ratio * ((ratio >= low) & (ratio <= high))
        return ratio.clamp(low, high) if outside == "clamp" else kept

    logp, logq = (x.gather(-1, ids[..., None])[..., 0] for x in (log_p, log_q))
    w = weights((logp.detach() - logq).exp(), a[:, None])
    score = w * logp - centers * (q * weights(p / q, a[:, None, None]) * log_p).sum(-1)
    expected = -(a[:, None] * score * mask).sum() / 9
    kl = (torch.where(said, q * (q / p).log(), 0.0)).sum(-1) + (q * ~said).sum(-1) * rest[..., 0].log()
    means = {"entropy": -(p * log_p).sum(-1), "kl_head": kl, "frac_masked": w == 0}
    loss = score_centering.LigerFusedLinearScoreCenteringLoss(centers, correction, temperature=0.8)
    junk = torch.where(mask[..., None], top.values, torch.nan)
    call = hidden, weight, ids, mask.long(), a, torch.where(mask, logq, torch.inf), top.indices, junk, bias
    value, metrics = loss(*call, num_items_in_batch=9)
    torch.testing.assert_close(value, expected)
    assert_close_gradients(value, expected, (hidden, weight, bias))
    expected_means = {name: (x * mask).sum().detach() / mask.sum() for name, x in means.items()}
    torch.testing.assert_close(metrics, expected_means, check_dtype=False)
    nothing = (*call[:3], torch.zeros_like(mask), *call[4:])
    loss, means = score_centering.fused_linear_score_centering(*nothing)
    assert not any([loss, *means.values()])


@pytest.mark.peers
def test_dispatched_functions(installed):
    functional = pytest.importorskip("liger_kernel.functional", reason="this liger-kernel has no functional")
    hidden, weight, labels, _ = problem()
    loss, *others = functional.fused_linear_cross_entropy(hidden, weight, labels, impl="nvidia-triton")
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), labels))
    assert others == [None] * 3
    found = functional.fused_linear_jsd(hidden, weight, hidden, weight.detach() * 2, labels, 0.3, mode="eager")
    torch.testing.assert_close(found, losses.fused_linear_jsd(hidden, weight, hidden, weight.detach() * 2, labels, 0.3))


@pytest.mark.peers
@pytest.mark.parametrize(("reduction", "divisor"), [("batchmean", 4), ("mean", 4 * 17), ("sum", 1)])
def test_fused_linear_kl_div(installed, reduction, divisor):
    """Beside torch's, which liger-kernel's equals, by its three names; a masked token, and probabilities of 0."""
    from liger_kernel.ops import LigerFusedLinearKLDivFunction
    from liger_kernel.transformers import LigerFusedLinearKLDivLoss
    from liger_kernel.transformers.functional import liger_fused_linear_kl_div

    names = LigerFusedLinearKLDivLoss, liger_fused_linear_kl_div, LigerFusedLinearKLDivFunction
    assert all(name.__module__.startswith("liger_losses.") for name in names)
    labels = torch.tensor([-100, 1, 99, 3, -100, 5])
    hidden, weight = normal(6, 8, seed=3).requires_grad_(), normal(17, 8, seed=4).requires_grad_()
    target = normal(6, 17, seed=5).softmax(-1).masked_fill(torch.arange(17) % 5 == 0, 0)
    target /= target.sum(-1, keepdim=True)
    logps = (hidden @ weight.t() / 2.0).log_softmax(-1)[labels != -100]
    expected = F.kl_div(logps, target[labels != -100], reduction="sum") / divisor
    options = (reduction, -100, 2.0, 1e-10, torch.float32)
    for found in (
        LigerFusedLinearKLDivLoss(reduction, temperature=2.0)(hidden, weight, target, labels),
        liger_fused_linear_kl_div(hidden, weight, target, labels, *options),
        LigerFusedLinearKLDivFunction.apply(hidden, weight, target, labels, *options),
    ):
        torch.testing.assert_close(found, expected)
    assert_close_gradients(found, expected, (hidden, weight))
    everything = F.kl_div((hidden @ weight.t()).log_softmax(-1), target, reduction="batchmean")
    torch.testing.assert_close(LigerFusedLinearKLDivLoss()(hidden, weight, target), everything)
    assert repr(LigerFusedLinearKLDivLoss("sum", eps=0.0)) == "LigerFusedLinearKLDivLoss(reduction='sum')"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reduction": "none"}, "reduction must be batchmean, mean or sum, got 'none'"),
        ({"temperature": 0.0}, "temperature must be a positive finite number, got 0.0"),
        ({"target": torch.ones(8, 17)}, "target must be [6, 17], one per row of student_input and student_weight, got"),
        ({"target": torch.ones(6, 9)}, "target must be [6, 17], one per row of student_input and student_weight, got"),
        ({"target": torch.ones(6, 17, device="meta")}, "target is on meta"),
        ({"student_input": [1.0]}, "student_input must be a tensor, got list"),
        ({"student_input": torch.ones(8), "target": torch.ones(17)}, "For one token, pass hidden_states[None]"),
        ({"shift_labels": torch.ones(6, dtype=torch.bool)}, "labels must be int64"),
    ],
)
def test_fused_linear_kl_div_says_what_is_wrong(wrong, said):
    inputs = {"student_input": torch.ones(6, 8), "student_weight": torch.ones(17, 8), "target": torch.ones(6, 17)}
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        if wrong.keys() & {"reduction", "temperature"}:
            losses.LigerFusedLinearKLDivLoss(**wrong)
        else:
            losses.LigerFusedLinearKLDivLoss()(**inputs | wrong)


@pytest.mark.peers
def test_losses_of_logits_stay_liger_kernels(installed):
    from liger_kernel import functional as dispatched
    from liger_kernel import transformers
    from liger_kernel.megatron import LigerMegatronCrossEntropy
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    names = "CrossEntropyLoss", "JSD", "KLDIVLoss", "TVDLoss", "FusedCETVDLoss", "VocabParallelCrossEntropy"
    values = [getattr(transformers, f"Liger{name}") for name in names]
    values += [getattr(transformers.functional, f"liger_{name}") for name in ("cross_entropy", "jsd", "kl_div", "tvd")]
    for value in (*values, dispatched.cross_entropy, LigerMegatronCrossEntropy, triton_grpo_loss):
        assert value.__module__.startswith("liger_kernel.")


@pytest.mark.peers
def test_trainers_use_liger_kernel_patches_the_model(installed):
    from transformers.integrations.liger import apply_liger_kernel

    model = llama()
    model.config.model_type = "unknown_to_liger_kernel"
    apply_liger_kernel(model, {"rope": False})
    assert replacement_of(model.model.norm)


@pytest.mark.peers
def test_apply_to_models_that_are_loaded_later(installed):
    """Of this type alone, and not of one with a longer name."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_llama4
    from transformers import AutoModelForCausalLM

    config = llama().config
    apply_liger_kernel_to_llama4(rope=False)
    assert not hasattr(AutoModelForCausalLM.from_config(config), "liger_report")
    apply_liger_kernel_to_llama()
    assert is_patched(AutoModelForCausalLM.from_config(config))
    kinds = [types.SimpleNamespace(config=mock.Mock(model_type=kind)) for kind in ("llama", "llama4", "llama4_text")]
    (llama4, *others), of_llama = ([options(kind) for kind in kinds] for options in loading._wanted)
    assert (llama4, others[0]["rope"], others[0]) == (None, False, others[1])
    assert (of_llama[0]["rope"], of_llama[1:]) == (True, [None, None])
    liger.uninstall()
    assert not hasattr(AutoModelForCausalLM.from_config(config), "liger_report")


def test_without_liger_kernel(monkeypatch):
    find = importlib.machinery.PathFinder.find_spec

    def find_others(name, *rest):
        return None if name.split(".")[0] == "liger_kernel" else find(name, *rest)

    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", find_others)
    liger.install()
    try:
        liger.install()
        assert importlib.util.find_spec("liger_kernel") is not None
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        from liger_kernel.chunked_loss.functional import liger_fused_linear_dpo
        from liger_kernel.transformers import LigerFusedLinearJSD, apply_liger_kernel_to_qwen3

        assert LigerFusedLinearJSDLoss is liger_losses.LigerFusedLinearJSDLoss
        assert callable(liger_fused_linear_dpo)
        assert callable(apply_liger_kernel_to_qwen3)
        assert LigerFusedLinearJSD.__module__.startswith("liger_losses.")
        with pytest.raises(ImportError, match=r"not replace 'LigerFusedLinearFooLoss' of .*LigerFusedLinearDPOLoss"):
            from liger_kernel.chunked_loss import LigerFusedLinearFooLoss  # noqa: F401
        with pytest.raises(ImportError, match=r"not replace 'LigerJSD' of .*For the rest, pip install liger-kernel"):
            from liger_kernel.transformers import LigerJSD  # noqa: F401
    finally:
        liger.uninstall()
    assert "liger_kernel" not in sys.modules
    assert importlib.util.find_spec("liger_kernel") is None


@pytest.mark.peers
def test_lazy_modules_are_not_loaded(monkeypatch):
    """Those of ``importlib.util.LazyLoader`` run at the first look at them."""

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError("it was loaded")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    assert not liger.is_installed()


def test_arguments_have_liger_kernels_order():
    """By name, for everything whose arguments are positional in liger-kernel; and its defaults."""
    pytest.importorskip("liger_kernel.transformers", reason="liger-kernel is not installed")

    def names(function):
        return list(inspect.signature(function).parameters)

    modules = {"CosineSimilarity": "cosine_similarity_loss"}
    for middle, apply in CHUNKED.items():
        module = importlib.import_module(f"liger_kernel.chunked_loss.{modules.get(middle, middle.lower() + '_loss')}")
        function = getattr(module, f"LigerFusedLinear{middle}Function").forward
        theirs = names(function)
        theirs = ["lin_weight" if name == "weight" else name for name in theirs if name not in ("cls", "ctx")]
        assert apply.__doc__.split(": ")[1].rstrip(".").split(", ") == theirs
        loss = LOSSES[middle](**_FUNCTIONS[middle][2])
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        for name in ({*defaults} & {*loss.option_names}) - {"compiled", "chunk_size"}:  # which have no effect
            assert getattr(loss, name) in (defaults[name], None) or defaults[name] is inspect.Parameter.empty, name
    theirs = importlib.import_module("liger_kernel.transformers.functional")
    for name in ("fused_linear_cross_entropy", "fused_linear_kl_div"):
        assert names(getattr(losses, name)) == names(getattr(theirs, f"liger_{name}"))
    assert names(losses.scaled_cross_entropy_tp) == names(theirs.liger_fused_linear_scaled_cross_entropy_tp)


@pytest.mark.peers
def test_apply_takes_each_families_arguments(installed, monkeypatch):
    import liger_kernel.transformers.monkey_patch as theirs

    calls = []
    monkeypatch.setattr(models, "patch", lambda model, **options: calls.append((model, options)))
    model = torch.nn.Linear(2, 2)
    assert list(inspect.signature(theirs.apply_liger_kernel_to_pixtral).parameters)[-1] == "model"
    theirs.apply_liger_kernel_to_pixtral(True, True, False, model)
    theirs.apply_liger_kernel_to_qwen2_vl(False, False, True, True, True, True, model)
    theirs.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    theirs.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"](model=model, layer_norm=False)
    every = {"loss_head": True, "norms": True, "mlps": True, "rope": True}
    changes = ({"mlps": False}, {"rope": False}, {"loss_head": False}, {"norms": False})
    assert calls == [(model, {**every, **change}) for change in changes]
    with pytest.raises(TypeError, match="at most 4 arguments: rope, rms_norm, swiglu, model"):
        theirs.apply_liger_kernel_to_pixtral(True, True, True, None, True)


@pytest.mark.peers
def test_auto_class_takes_liger_kernels_options(installed):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    model = AutoLigerKernelForCausalLM.from_config(llama().config, rope=False, swiglu=False, rms_norm=False)
    assert [entry.path for entry in model.liger_report.replaced] == ["lm_head"]


def test_the_scaled_loss_is_of_all_ranks_by_default(one_process, monkeypatch):
    groups = []
    monkeypatch.setattr(losses, "scaled_cross_entropy", lambda *_, group, **__: groups.append(group))
    losses.scaled_cross_entropy_tp(None, None, None)
    assert groups == [torch.distributed.group.WORLD]
