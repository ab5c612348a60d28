"""liger-kernel's names, replaced by this library: the same results as liger-kernel's, where it runs without a GPU."""

import importlib
import importlib.machinery
import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import liger_losses
from liger_losses import functional
from liger_losses.integrations import liger, loading, on_logits
from liger_losses.integrations.liger import losses, models
from liger_losses.integrations.liger.chunked import CHUNKED
from liger_losses.integrations.logit_statistics import logit_statistics
from tests.integrations.models import llama
from tests.reference import double, plain_statistics, problem

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


def arguments_of(name):
    """Of liger-kernel's autograd functions: inputs and options, and which of the inputs are trained."""
    hidden, weight, labels, bias = problem(n=20, shape=(4, 5), bias=True)
    flat = hidden.detach().flatten(0, 1).requires_grad_()
    old, near = -normal(4, 5, seed=1).abs(), hidden.detach() + 0.1 * normal(4, 5, 24, seed=8)
    reference = normal(4, 5, 24, seed=3), normal(61, 24, seed=4), normal(61, seed=5)
    preferred, kl = torch.tensor([True, False, True, False]), torch.tensor(0.1)
    grpo = labels.clamp(min=0), labels != -100, normal(4, seed=2), None, old - 0.1, old, None, None, None
    arguments = {
        "DPO": (labels, bias, *reference, -100, 0.2, True, False, True, True, 1, "sigmoid"),
        "ORPO": (labels, bias, -100, 0.2, True, None, False),
        "CPO": (labels, bias, -100, 0.2, 0.5, 0.1, True, False),
        "SimPO": (labels, bias, -100, 0.2, 1.0, 0.0, False, False, 0.7),
        "KTO": (labels, preferred, None, near, weight.detach(), None, kl, -100, 0.2, False, True),
        "GRPO": (*grpo, 0.1, 0.2, 0.3, "grpo", None, "token", 1.0, 1.05, 0.9, False),
    }
    of_flat = {
        "JSD": (normal(20, 24, seed=6), normal(61, 24, seed=7), labels.flatten(), None, None, 0.3, 0.7, 0.2, -100, 2.0),
        "ScaledCrossEntropy": (labels.flatten(), 0.7, -100, 1, True, torch.tensor([5, 0, 5])),
    }
    trained = (hidden, weight) if name in arguments else (flat, weight)
    return (*trained, *(arguments | of_flat)[name]), trained


@pytest.mark.peers
@pytest.mark.parametrize("name", ["DPO", "ORPO", "CPO", "SimPO", "GRPO", "JSD", "KTO", "ScaledCrossEntropy"])
def test_autograd_functions(name):
    module = "ops" if name == "ScaledCrossEntropy" else f"chunked_loss.{name.lower()}_loss"
    arguments, trained = arguments_of(name)

    def call():
        found = getattr(importlib.import_module(f"liger_kernel.{module}"), f"LigerFusedLinear{name}Function")
        result = found.apply(*arguments)
        loss, *metrics = result if isinstance(result, tuple) else (result,)
        metrics = [*metrics[0]] if metrics and isinstance(metrics[0], tuple) else metrics
        return loss.detach(), metrics, torch.autograd.grad(loss.sum(), trained)

    theirs, ours = both(call)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-6)
    assert len(ours[1]) == len(theirs[1])
    if name == "ScaledCrossEntropy":
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.peers
def test_install_reaches_liger_kernels_modules_and_uninstall_restores_them(installed):
    import liger_kernel.chunked_loss
    import liger_kernel.ops.fused_linear_cross_entropy as defining
    import liger_kernel.transformers
    from liger_kernel.transformers import functional as liger_functional

    assert issubclass(liger_kernel.chunked_loss.LigerFusedLinearDPOLoss, liger_losses.LigerFusedLinearDPOLoss)
    ours = defining.LigerFusedLinearCrossEntropyFunction
    assert liger_kernel.ops.LigerFusedLinearCrossEntropyFunction is ours
    assert liger_functional.liger_cross_entropy.__module__.startswith("liger_losses.")
    count = len(liger._replaced)
    liger.install()
    assert len(liger._replaced) == count
    liger.uninstall()
    assert not liger.is_installed()
    assert liger_kernel.ops.LigerFusedLinearCrossEntropyFunction is not ours
    assert issubclass(defining.LigerFusedLinearCrossEntropyFunction, torch.autograd.Function)
    assert "LigerFusedLinearDPOLoss" in liger_kernel.chunked_loss.dpo_loss.LigerFusedLinearDPOLoss.__qualname__


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


@pytest.mark.parametrize("backend_dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_logits_equal_float64(backend_dtype):
    hidden, weight, labels, _ = problem(scale=2.0, dtype=torch.float64)
    logits = (hidden @ weight.t()).detach().to(backend_dtype).requires_grad_()
    names = ("logp", "entropy", "lse", "mean_logp")
    found = logit_statistics(logits, labels, (*names, "argmax"))
    (exact,) = double(logits)
    expected = plain_statistics(exact, torch.eye(61, dtype=torch.float64), labels)
    scales = torch.linspace(0.5, 2.0, len(labels))
    (ours,) = torch.autograd.grad(sum((scales * found[name]).sum() for name in names), logits)
    (theirs,) = torch.autograd.grad(sum((scales * expected[name]).sum() for name in names), exact)
    for name in names:
        torch.testing.assert_close(found[name].double(), expected[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs.to(backend_dtype), rtol=1e-2 if logits.itemsize == 2 else 1e-4, atol=1e-6)
    assert torch.equal(found["argmax"][labels != -100], logits.argmax(-1)[labels != -100])
    with pytest.raises(ValueError, match=r"labels must be in \[0, 61\)"):
        logit_statistics(logits, labels.clamp(min=61))


def test_statistics_of_logits_in_several_blocks(monkeypatch):
    module = importlib.import_module("liger_losses.integrations.logit_statistics")
    monkeypatch.setattr(module, "_BLOCK", 3 * 17)
    logits, labels = normal(8, 17).requires_grad_(), torch.arange(8)
    loss = -logit_statistics(logits, labels)["logp"].mean()
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    (ours,) = torch.autograd.grad(loss, logits)
    (theirs,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_logits(reduction):
    logits = normal(9, 17, seed=1).requires_grad_()
    labels, weight = torch.randint(17, (9,), generator=torch.Generator().manual_seed(0)), torch.rand(17) + 0.5
    labels[::4] = -100
    options = {"label_smoothing": 0.2, "reduction": reduction}
    found = on_logits.cross_entropy(logits, labels, ce_weight=weight, **options)
    expected = F.cross_entropy(logits, labels, weight, **options)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, expected))
    torch.testing.assert_close(ours, theirs)
    found = on_logits.cross_entropy(
        logits,
        labels,
        lse_square_scale=0.1,
        softcap=2.0,
        reduction="sum",
        return_z_loss=True,
        return_token_accuracy=True,
    )
    capped, active = 2.0 * torch.tanh(logits / 2.0), labels != -100
    z = 0.1 * (capped.logsumexp(-1).square() * active).sum()
    torch.testing.assert_close(found.loss, F.cross_entropy(capped, labels, reduction="sum") + z)
    torch.testing.assert_close(found.z_loss, z.detach())
    assert found.token_accuracy == (logits.argmax(-1) == labels).sum() / active.sum()


def test_everything_masked_gives_zero():
    logits = normal(3, 5).requires_grad_()
    loss = on_logits.cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "vespo"])
def test_grpo_of_logits(loss_type):
    logits = normal(3, 6, 17).requires_grad_()
    ids, mask = torch.arange(15).view(3, 5), torch.arange(5) < torch.tensor([[5], [3], [4]])
    logps = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old, ref = (logps.detach() + 0.3 * normal(3, 5, seed=i) for i in (1, 2))
    options = {"beta": 0.1, "loss_type": loss_type}
    high = 2.0 if loss_type == "cispo" else 0.4
    expected = functional.grpo_loss(
        logps, normal(3, seed=3), mask, old_logps=old, ref_logps=ref, epsilon_high=high, **options
    )
    arguments = (logits, old, ref, ids, normal(3, seed=3), mask)
    loss, (kl, clip_ratio) = losses.triton_grpo_loss(*arguments, eps_high=high, reduce=True, **options)
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    per_token, per_token_kl, clipped = losses.triton_grpo_loss(*arguments, eps_high=high, **options)
    torch.testing.assert_close(per_token_kl.sum() / mask.sum(), kl)
    torch.testing.assert_close(clipped.sum() / mask.sum(), clip_ratio)
    if loss_type == "dapo":
        torch.testing.assert_close(per_token.sum() / mask.sum(), expected)
    assert not per_token[~mask].any()


@pytest.mark.peers
def test_divergences_of_distributions(installed):
    from liger_kernel.transformers import LigerFusedLinearJSD, LigerJSD, LigerKLDIVLoss, LigerTVDLoss

    student, teacher = (normal(6, 17, seed=i).log_softmax(-1) for i in (1, 2))
    labels = torch.tensor([-100, 1, 2, 3, -100, 5])
    active = labels != -100
    mixture = torch.logsumexp(torch.stack([teacher + torch.tensor(0.3).log(), student + torch.tensor(0.7).log()]), 0)
    terms = 0.3 * teacher.exp() * (teacher - mixture) + 0.7 * student.exp() * (student - mixture)
    torch.testing.assert_close(LigerJSD(0.3)(student, teacher, labels), terms.sum(-1)[active].mean())
    expected = F.kl_div(student, teacher.exp(), reduction="batchmean")
    torch.testing.assert_close(LigerKLDIVLoss(reduction="batchmean")(student, teacher.exp()), expected)
    terms = 0.5 * (student.exp() - teacher.exp()).abs()
    torch.testing.assert_close(LigerTVDLoss()(student.exp(), teacher.exp(), labels), terms[active].sum() / 4)
    torch.testing.assert_close(LigerTVDLoss("mean")(student.exp(), teacher.exp()), terms.mean())
    hidden, weight, wide = normal(6, 8, seed=3), normal(17, 8, seed=4), normal(6, 17, seed=5)
    pair = (hidden @ weight.t() / 2.0).log_softmax(-1), (wide / 2.0).log_softmax(-1)
    for given in (labels, None):
        found = LigerFusedLinearJSD(0.3, temperature=2.0)(hidden, weight, wide, torch.eye(17), given)
        torch.testing.assert_close(found, LigerJSD(0.3)(*pair, given))


@pytest.mark.peers
def test_trainers_use_liger_kernel_patches_the_model(installed):
    from transformers.integrations.liger import apply_liger_kernel

    from liger_losses.patching.lazy_head import patched_heads

    model = llama()
    apply_liger_kernel(model, {"rope": False})
    assert patched_heads(model)


@pytest.mark.peers
def test_apply_to_models_that_are_loaded_later(installed):
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2
    from transformers import AutoModelForCausalLM

    config = llama().config
    apply_liger_kernel_to_qwen2()
    assert not hasattr(AutoModelForCausalLM.from_config(config), "liger_report")
    apply_liger_kernel_to_llama(rope=False)
    report = AutoModelForCausalLM.from_config(config).liger_report
    assert "LazyLinear" in str(report)
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
        from liger_kernel.transformers import LigerCrossEntropyLoss, apply_liger_kernel_to_qwen3

        assert LigerFusedLinearJSDLoss is liger_losses.LigerFusedLinearJSDLoss
        assert callable(liger_fused_linear_dpo)
        assert callable(apply_liger_kernel_to_qwen3)
        assert LigerCrossEntropyLoss.__module__.startswith("liger_losses.")
        with pytest.raises(ImportError, match=r"not replace 'LigerFusedLinearFooLoss' of .*LigerFusedLinearDPOLoss"):
            from liger_kernel.chunked_loss import LigerFusedLinearFooLoss  # noqa: F401
    finally:
        liger.uninstall()
    assert "liger_kernel" not in sys.modules
    assert importlib.util.find_spec("liger_kernel") is None


@pytest.mark.peers
def test_arguments_have_liger_kernels_order():
    """By name, for everything whose arguments are positional in liger-kernel."""
    pytest.importorskip("liger_kernel.transformers", reason="liger-kernel is not installed")

    def names(function):
        return list(inspect.signature(function).parameters)

    modules = {"CosineSimilarity": "cosine_similarity_loss"}
    for middle, apply in CHUNKED.items():
        module = importlib.import_module(f"liger_kernel.chunked_loss.{modules.get(middle, middle.lower() + '_loss')}")
        theirs = names(getattr(module, f"LigerFusedLinear{middle}Function").forward)
        theirs = ["lin_weight" if name == "weight" else name for name in theirs if name not in ("cls", "ctx")]
        assert apply.__doc__.split(": ")[1].rstrip(".").split(", ") == theirs
    theirs = importlib.import_module("liger_kernel.transformers.functional")
    for name, ours in (
        ("liger_cross_entropy", losses.cross_entropy),
        ("liger_fused_linear_cross_entropy", losses.fused_linear_cross_entropy),
    ):
        assert names(ours) == names(getattr(theirs, name))
    theirs = names(importlib.import_module("liger_kernel.transformers.grpo_loss").triton_grpo_loss)
    assert names(losses.triton_grpo_loss) == theirs
    ours = losses.triton_grpo_loss(*arguments_of_grpo(), 2.0, 1.0, None, None, False, None, 1.5, 3.0, 3.0, 2.0)
    torch.testing.assert_close(ours, losses.triton_grpo_loss(*arguments_of_grpo(), 2.0, vespo_k_pos=1.5))


def arguments_of_grpo():
    ids = torch.arange(10).view(2, 5)
    options = (0.9, 0.0, 0.2, 0.4, True, "vespo", None, "token", True)
    return normal(2, 6, 17), None, None, ids, torch.tensor([1.0, -1.0]), None, *options


@pytest.mark.peers
def test_names_that_were_imported_before_are_warned_of(monkeypatch):
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    user = types.ModuleType("user")
    user.Loss = theirs = chunked.LigerFusedLinearDPOLoss
    with pytest.warns(
        UserWarning, match=r"liger_kernel\.\S+ was imported before .*install\(\).* Call install\(\) first"
    ):
        liger.install()
    assert issubclass(chunked.LigerFusedLinearDPOLoss, liger_losses.LigerFusedLinearDPOLoss)
    liger.uninstall()
    assert user.Loss is chunked.LigerFusedLinearDPOLoss is theirs


@pytest.mark.peers
def test_teachers_get_no_gradient(installed):
    from liger_kernel.transformers import functional as theirs

    student, teacher = (normal(4, 7, seed=i).log_softmax(-1).requires_grad_() for i in (1, 2))
    for loss in (theirs.liger_jsd, theirs.liger_kl_div, theirs.liger_tvd):
        assert torch.autograd.grad(loss(student, teacher), (student, teacher), allow_unused=True)[1] is None


def test_the_options_of_a_cross_entropy_can_be_read_and_changed():
    logits, labels = normal(4, 7), torch.tensor([1, 2, 3, 0])
    loss = losses.LigerCrossEntropyLoss(reduction="sum")
    assert loss.reduction == "sum"
    loss.ignore_index = 0
    torch.testing.assert_close(loss(logits, labels), F.cross_entropy(logits, labels, ignore_index=0, reduction="sum"))


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
    every = {"loss_head": True, "norms": True, "mlps": True, "rope": True}
    changes = ({"mlps": False}, {"rope": False}, {"loss_head": False})
    assert calls == [(model, {**every, **change}) for change in changes]
    with pytest.raises(TypeError, match="at most 4 arguments: rope, rms_norm, swiglu, model"):
        theirs.apply_liger_kernel_to_pixtral(True, True, True, None, True)


@pytest.mark.peers
def test_apply_leaves_other_types_with_a_longer_name(installed):
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_llama4

    apply_liger_kernel_to_llama()
    apply_liger_kernel_to_llama4(rope=False)
    of_llama, of_llama4 = loading._wanted

    def named(kind):
        return types.SimpleNamespace(config=types.SimpleNamespace(model_type=kind))

    assert of_llama(named("llama"))["rope"]
    assert of_llama(named("llama4")) is of_llama4(named("llama")) is None
    assert of_llama4(named("llama4_text")) == of_llama4(named("llama4"))
    assert not of_llama4(named("llama4"))["rope"]


@pytest.mark.peers
def test_auto_class_takes_liger_kernels_options(installed):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    model = AutoLigerKernelForCausalLM.from_config(llama().config, rope=False, swiglu=False, rms_norm=False)
    assert [entry.path for entry in model.liger_report.replaced] == ["lm_head"]


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute_nll", [True, False])
@pytest.mark.parametrize("name", ["DPO", "ORPO", "CPO", "SimPO", "KTO"])
def test_metrics_are_liger_kernels(name, compute_nll, dtype):
    """All of them, by position, with prompts and padding in the batch, through its classes."""
    hidden, weight, labels, bias = problem(n=20, shape=(4, 5), bias=True)
    hidden, weight, bias = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias))
    labels[:, -1], labels[:, 0] = -100, 3
    options, arguments, classes = {"compute_nll_loss": compute_nll}, {}, []
    if name == "DPO":
        options["use_ref_model"], arguments = False, {"ref_weight": weight.detach()}  # which is ignored
    if name == "KTO":
        kl = torch.tensor(0.1) if compute_nll else None
        options = {"use_ref_model": False}
        arguments = {"preference_labels": torch.tensor([True, False, True, False]), "kl": kl}

    def call():
        classes.append(getattr(importlib.import_module("liger_kernel.chunked_loss"), f"LigerFusedLinear{name}Loss"))
        loss = classes[-1](compiled=False, **options)
        value, metrics = loss(_input=hidden, lin_weight=weight, target=labels, bias=bias, **arguments)
        return [found.detach().float() for found in (value, *metrics)]

    theirs, ours = both(call)
    assert issubclass(classes[1], getattr(liger_losses, f"LigerFusedLinear{name}Loss"))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_what_does_not_sum_to_one(beta):
    """Loss and gradient as liger-kernel's kernel computes them, of the formulas in its comments."""
    log_q, log_p = normal(5, 7, seed=1).requires_grad_(), normal(5, 7, seed=2)
    labels = torch.tensor([1, -100, 2, 3, 0])
    q, p = log_q.detach().exp(), log_p.exp()
    if beta == 0.0:
        terms, gradient = p * (log_p - log_q.detach()), -p
    elif beta == 1.0:
        terms = q * (log_q.detach() - log_p)
        gradient = terms + q
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        gradient = (1 - beta) * q * (log_q.detach() - log_m)
        terms = beta * p * (log_p - log_m) + gradient
    active = (labels != -100).float()[:, None] / 4
    loss = losses.LigerJSD(beta)(log_q, log_p, labels)
    torch.testing.assert_close(loss.detach(), (terms * active).sum())
    torch.testing.assert_close(torch.autograd.grad(loss, log_q)[0], gradient * active)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_given_logits_have_their_dtype(dtype):
    logits, labels = normal(4, 7, dtype=dtype).requires_grad_(), torch.tensor([1, 2, -100, 0])
    loss = losses.LigerCrossEntropyLoss()(logits, labels)
    assert loss.dtype == dtype
    loss, z_loss, accuracy, _ = losses.apply_cross_entropy(
        logits, labels, None, -100, 0.1, 0.0, "none", None, True, True
    )
    assert (loss.dtype, z_loss.dtype, accuracy.dtype) == (dtype, dtype, torch.float32)
    assert torch.autograd.grad(loss.sum(), logits)[0].dtype == dtype
