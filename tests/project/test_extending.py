"""docs/extending.md holds: a pair loss is one class of under 10 lines; a divergence is two functions and a row; what is
registered is checked."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import liger_losses as ll
from liger_losses import LigerFusedLinearGRPOLoss, PreferenceLoss, functional, register_divergence, register_objective
from liger_losses.chunked.losses import policy_tables
from liger_losses.kernels import BACKENDS, divergence_forms
from tests.reference import assert_close_gradients, double, on_gpu, plain_statistics, problem


class DPOPositive(PreferenceLoss):
    """arXiv:2402.13228, eq. 3: a chosen completion that loses probability adds to the margin."""

    def __init__(self, penalty=5.0, **options):
        super().__init__(use_ref_model=True, **options)
        self.penalty = penalty

    def pair_loss(self, pairs):
        lost = F.relu(-pairs.chosen_logratios)
        return -F.logsigmoid(self.beta * (pairs.chosen_logratios - pairs.rejected_logratios - self.penalty * lost))


class TsallisLoss(ll.ChunkedLoss):
    """Cross-entropy less the Tsallis entropy of order 3/2 (Tsallis, J. Stat. Phys. 52, 1988)."""

    statistics = ("logp", "power_sum")

    def loss(self, statistics, mask):
        entropy = 2 * (1 - statistics.power_sum)
        return ((-statistics.logp - 0.1 * entropy) * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.usefixtures("registered")
def test_a_paper_takes_ten_lines():
    """Two that no table has, from the page alone; an option of the first is swept."""
    for paper in (DPOPositive, TsallisLoss):
        code = [line for line in inspect.getsource(paper).splitlines() if line.strip() and '"""' not in line]
        assert len(code) <= 10
    hidden, weight, ids, _ = problem(shape=(4, 5), dtype=torch.float64, masked=0.0)
    logps, old = plain_statistics(hidden, weight, ids)["logp"], torch.linspace(-6, -3, 20).double().view(4, 5)
    sides = [ll.Completions(hidden[rows], ids[rows], ref_logps=old[rows].sum(-1)) for rows in (slice(2), slice(2, 4))]
    w, l = (logps - old).sum(-1).chunk(2)
    ll.register_statistic("power_sum", lambda log_p: (1.5 * log_p).exp())
    power_sum = (hidden @ weight.T).log_softmax(-1).exp().pow(1.5).sum(-1)
    pairs = [(TsallisLoss()(weight, hidden, ids), (-logps - 0.2 * (1 - power_sum)).mean())]
    for penalty in (0.0, 3.0):
        loss = DPOPositive(beta=0.1).replace(penalty=penalty)
        pairs.append((loss(weight, *sides)[0], F.softplus(0.1 * (l - w + penalty * (-w).clamp(min=0))).mean()))
    assert repr(loss) == "DPOPositive(penalty=3.0, use_ref_model=True)"
    for value, exact in pairs:
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-7)
        assert_close_gradients(value, exact, (hidden, weight), rtol=1e-5, atol=1e-7)


def jeffreys(log_p, log_q):
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    return (p - q) * d, p * d + p - q


def plain_jeffreys(log_p, log_q):
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("distance", [1.0, 1e-2, 1e-4])
def test_a_new_divergence_keeps_its_digits_close_to_the_teacher(distance):
    made = register_divergence("jeffreys", jeffreys, smooth=True)
    logits = torch.randn(5, 61, generator=torch.Generator().manual_seed(0))
    log_p = (logits + distance * logits.flip(1)).log_softmax(-1).requires_grad_()
    log_q = logits.log_softmax(-1)
    found = functional.divergence(log_p, log_q, made())
    exact_p, exact_q = double(log_p, log_q)
    exact = plain_jeffreys(exact_p, exact_q)
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0)
    torch.autograd.backward([found.sum(), exact.sum()])
    torch.testing.assert_close(log_p.grad.double(), exact_p.grad, rtol=2e-6, atol=0)
    same = functional.divergence(log_q.requires_grad_(), log_q.detach(), made())
    assert (same == 0).all()
    assert (torch.autograd.grad(same.sum(), log_q)[0] == 0).all()


def powered(log_ratio, logps, advantages, options, inputs=None, floor=0.1, *, power):
    return advantages * (log_ratio.clamp(max=80).exp().clamp(min=floor) ** power)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("coupled", [False, True])
def test_an_objective_declares_options_for_a_sweep(coupled):
    """One name serves all of their values, in losses and in the function, with gradients."""
    register_objective("powered", powered, coupled=coupled)
    with pytest.raises(TypeError, match="loss_type='powered' needs power=, an option of its objective"):
        LigerFusedLinearGRPOLoss(loss_type="powered")
    with pytest.raises(TypeError, match="power must be a number, got 'a'"):
        LigerFusedLinearGRPOLoss(loss_type="powered", power="a")
    with pytest.raises(TypeError, match="no option 'power'"):
        LigerFusedLinearGRPOLoss(power=2.0)
    hidden, weight, ids, _ = problem(shape=(4, 5), dtype=torch.float64, masked=0.0)
    logps = plain_statistics(hidden, weight, ids)["logp"]
    old, mask, advantages = logps.detach() - 0.3, torch.ones(4, 5), torch.tensor([1.0, -0.5, 2.0, 0.5])
    loss = LigerFusedLinearGRPOLoss(loss_type="powered", beta=0.0, power=0.5)
    for power, floor in ((0.5, 0.1), (2.0, 0.1), (1.5, 1.4)):
        loss = loss.replace(power=power, floor=floor)
        value, _ = loss(weight, hidden, ids, mask, advantages, old_per_token_logps=old)
        exact = -(advantages[:, None] * (logps - old).exp().clamp(min=floor) ** power).mean()
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-7)
        assert_close_gradients(value, exact, (hidden, weight), rtol=1e-10, atol=1e-12)
        assert (loss.power, loss.floor) == (power, floor)
        assert repr(loss).endswith(f"(beta=0.0, loss_type='powered', power={power}, floor={floor})")
        options = {"loss_type": "powered", "beta": 0.0, "power": power, "floor": floor}
        torch.testing.assert_close(functional.grpo_loss(logps, advantages, mask, old_logps=old, **options), exact)
    with pytest.raises(AttributeError, match="power is an option"):
        loss.power = 2.0
    assert pickle.loads(pickle.dumps(copy.deepcopy(loss))).power == loss.power
    other = loss.replace(loss_type="dapo")
    assert not hasattr(other, "power")
    assert "power" not in repr(other)


@pytest.mark.usefixtures("registered")
def test_an_objective_finds_the_defaults_of_its_options_among_those_of_the_loss():
    def scaled(log_ratio, logps, advantages, options, factor=2.0):
        return log_ratio * advantages * options.objective_options["factor"]

    register_objective("scaled", scaled)
    logps, ones, options = torch.full((4, 5), -1.0), torch.ones(4, 5), {"loss_type": "scaled", "beta": 0.0}
    value = functional.grpo_loss(logps, ones[:, 0], ones, old_logps=logps - 0.5, **options)
    torch.testing.assert_close(value, torch.tensor(-1.0))


class OfTokens(PreferenceLoss):
    def pair_loss(self, pairs):
        return (pairs.rejected_token_logps - pairs.chosen_token_logps).clamp(min=-1).sum(-1) * self.beta


@pytest.mark.usefixtures("registered", "nothing_compiled")
def test_what_users_define_is_compiled_once():
    """An option of an objective, and tokens of pairs: a number that changes compiles nothing."""
    register_objective("powered", powered)
    h, weight, ids, _ = problem(shape=(4, 5), masked=0.0)
    given = ids, torch.ones(4, 5), h[:, 0, 0].detach()
    policy, of_tokens = LigerFusedLinearGRPOLoss(loss_type="powered", power=1.0, beta=0.0), OfTokens()
    call = lambda h: policy(weight, h, *given, old_per_token_logps=given[1] - 5)[0] + of_tokens(weight, h, ids)[0]  # noqa: E731
    counter = CompileCounter()
    function = torch.compile(lambda h: call(h), backend=counter, fullgraph=True)
    for power in (1.0, 1.5, 0.7):
        policy, of_tokens = policy.replace(power=power), of_tokens.replace(beta=power)
        torch.testing.assert_close(function(h), call(h))
    assert counter.frame_count == 2


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_registered_divergence_takes_one_function(backend):
    """Without a Triton function, PyTorch computes the terms on either backend."""
    made = register_divergence("squares", lambda log_p, log_q, a: a * (log_p.exp() - log_q.exp()).square())
    hidden, weight, labels, _ = (on_gpu if torch.cuda.is_available() else problem)()
    others = [part.detach() * 1.1 for part in (hidden, weight)]
    log_p, log_q = ((x @ y.t()).log_softmax(-1) for x, y in ((hidden, weight), others))
    exact = (3 * (log_p.exp() - log_q.exp()).square()).sum(-1)[labels != -100].mean()
    value, _ = ll.DistillationLoss(made(3.0), 0.0, 1.0, backend=backend)(weight, hidden, labels, ll.Teacher(*others))
    torch.testing.assert_close(value, exact)
    assert_close_gradients(value, exact, (hidden, weight), rtol=1e-3, atol=1e-6)


smooth = functools.partial(register_divergence, smooth=True)


def rough(p, q):
    return (p - q).abs() ** 1.5 * q.exp(), 1.5 * (p - q).sgn() * (p - q).abs().sqrt() * q.exp()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("register", "function", "message"),
    [
        (register_objective, lambda r, l, a, o: (a * l).sum(), "a value for each token"),
        (register_objective, lambda r, l, a, o: (a * l).detach(), "no gradient"),
        (register_objective, lambda r, l, a, o: a * l - l.sum(), "coupled=True"),
        (register_objective, lambda r, l, a, o: a * (l - l.detach()).sqrt(), r"is not finite.*log_ratio\.clamp"),
        (register_objective, lambda r, l, a, o: a / (l - l.detach()), "is not finite"),
        (register_objective, lambda r, l, a, o: 0.0 * l, "is 0 for every token"),
        (register_objective, lambda r, l, a, o, *, softcap=1.0: a * l, "softcap: all policy losses have an option of"),
        (functools.partial(register_objective, normalizer="mean"), powered, "unknown normalizer"),
        (register_divergence, lambda p, q: ((p - q) ** 2).sum(-1), "a term for each entry"),
        (register_divergence, lambda p, q: ((p - q) ** 2, p - q), "h is not the derivative"),
        (functools.partial(register_divergence, balanced=True), lambda p, q: (p - q) ** 2, "is not balanced"),
        (register_divergence, lambda p, q: p.exp() * q, "0 where p = q"),
        (register_divergence, lambda p, q: (p.exp() / q.exp() - 1) ** 2, r"not finite.*log_q\.clamp\(min=-20\)"),
        (smooth, rough, "is no power series in log p - log q close to the teacher.*leave out smooth="),
        (smooth, lambda p, q: q.exp() * (p - q) ** 2, r"must return \(f, h\) for smooth=True"),
        (register_divergence, lambda p, q: (p.exp() - q.exp()).detach() ** 2, r"differentiates, or return \(f, h\)"),
        (register_divergence, lambda p: p, "must take log_p, log_q"),
        (register_divergence, lambda p, q, **scales: (p - q) ** 2, "must take log_p, log_q"),
        (register_divergence, lambda p, q, a=None: (p - q) ** 2, "must be finite numbers, got None"),
    ],
)
def test_what_cannot_be_right_is_refused(register, function, message):
    with pytest.raises((TypeError, ValueError), match=message):
        register("mine", function)
    assert "mine" not in {*divergence_forms.FORMS, *policy_tables.LOSS_TYPES}


BUILT_IN = [(register_objective, "dapo", powered), (register_divergence, "forward_kl", jeffreys)]


@pytest.mark.parametrize(("register", "name", "function"), BUILT_IN)
def test_what_is_built_in_is_not_replaced(register, name, function):
    with pytest.raises(ValueError, match=f"'{name}' exists already: it is built in"):
        register(name, function, replace=True)


def scaled(log_p, log_q, scale=0.5, *, shift):
    return scale * (log_p.exp() - log_q.exp()).square() + shift * 0


@pytest.mark.usefixtures("registered")
def test_a_registered_divergence_has_the_parameters_of_its_function():
    log_p, log_q = torch.randn(2, 3, 7).log_softmax(-1).unbind()
    made, one = register_divergence("scaled", scaled), scaled(log_p, log_q, 1.0, shift=0.0).sum(-1)
    assert str(inspect.signature(made)) == "(scale=0.5, *, shift)"
    for given, value in ((made(shift=1.0), 0.5), (made(2.0, shift=1.0), 2.0), (made(shift=1.0, scale=3), 3.0)):
        torch.testing.assert_close(functional.divergence(log_p, log_q, given), value * one)
    for values, named in (((), {}), ((1.0, 2.0), {"shift": 1.0}), ((), {"shift": 1.0, "scales": 2.0})):
        with pytest.raises(TypeError, match=r"'scaled' takes \(scale=0.5, \*, shift\): "):
            made(*values, **named)
    bound = register_divergence("bound", functools.partial(scaled, shift=0.0))
    by_position = register_divergence("by_position", lambda p, q, scale, /: scaled(p, q, scale, shift=0.0))
    for given in (bound(2.0), by_position(2.0)):
        torch.testing.assert_close(functional.divergence(log_p, log_q, given), 2 * one)


def defined(code, factor, module="__main__"):
    """The function of a notebook's cell, or of another module."""
    cell = {"__name__": module}
    exec(code.format(factor), cell)
    return cell["f"]


LOG_P = torch.linspace(-1, 1, 24).view(4, 6).log_softmax(-1)
LOG_Q = (LOG_P + 1e-3 * LOG_P.flip(1)).log_softmax(-1)  # close to the student: a power series


CELLS = {
    smooth: "def f(p, q): return {0} * q.exp() * (p - q) ** 2, {0} * 2 * q.exp() * (p - q)",
    register_objective: "def f(log_ratio, logps, advantages, options): return {0} * advantages * logps",
    ll.register_statistic: "def f(log_p): return {0} * log_p.exp() * log_p",
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("register", "code"), CELLS.items(), ids=["divergence", "objective", "statistic"])
def test_a_cell_that_runs_again_replaces_what_it_registered(register, code):
    def value():
        if register is smooth:
            return functional.divergence(LOG_P, LOG_Q, ll.Divergence("again"))
        if register is register_objective:
            return functional.grpo_loss(LOG_P, torch.ones(4), torch.ones(4, 6), loss_type="again", beta=0.0)
        return ll.linear_statistics(LOG_P, torch.eye(6), torch.zeros(4).long(), "again").registered

    register("again", defined(code, 1.0))
    first = value()
    register("again", functools.partial(defined(code, 3.0)))
    torch.testing.assert_close(value(), 3 * first)
    with pytest.raises(ValueError, match="not finite"):
        register("again", defined(code, "1e400"))
    with pytest.raises(ValueError, match=r"'again' exists already: pass replace=True to replace it"):
        register("again", defined(code, 5.0, "other"))
    torch.testing.assert_close(value(), 3 * first)
    register("again", defined(code, 5.0, "other"), replace=True)
    torch.testing.assert_close(value(), 5 * first)
