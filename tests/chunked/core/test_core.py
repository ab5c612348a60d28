"""The core against float64 autograd of whole logits: what is drawn is any combination of heads, questions and ways."""

import dataclasses
import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from liger_losses.chunked.core import (
    ALONE,
    STATISTICS,
    Dense,
    EngineOptions,
    Projection,
    Quantized,
    Ranks,
    Statistic,
    Target,
    TeacherLogits,
    TokenLoss,
    WithAdapters,
    loss_sum,
    statistics,
    stream,
)
from liger_losses.chunked.core.quantizers import QuantizedWeight
from liger_losses.chunked.core.statistics import asked_for, divergence
from liger_losses.chunked.core.target import Counted
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from tests.kernels.cases import DEVICE

N, H, HT, V, SHARDS = 24, 5, 4, 23, ((0, 9), (9, 10), (10, 23))
ALL = slice(None)


class Threads(Ranks):
    """Ranks that share a vocabulary, as threads of this process."""

    def __init__(self, rank, box, barrier):
        super().__init__(rank=rank, sizes=tuple(stop - start for start, stop in SHARDS))
        vars(self).update(box=box, barrier=barrier)

    def local(self, ids):
        here, columns = ids - self.first, self.sizes[self.rank]
        return here.clamp(0, columns - 1), (here >= 0) & (here < columns)

    def gather(self, value):
        self.box[self.rank] = value
        self.barrier.wait()
        values = torch.stack(list(self.box))
        self.barrier.wait()
        return values

    def sum(self, value):
        return self.gather(value).sum(0)


class Codes(QuantizedWeight):
    def __init__(self, codes, dtype=torch.double):
        super().__init__(tuple(codes.shape), dtype, codes.device)
        self.codes = codes

    def rows(self, start, stop):
        return self.codes[start:stop] * 0.05


def leaf(t):
    return None if t is None else t.clone().requires_grad_()


RENYI = Statistic("sum of sqrt p", lambda lp, V: (lp / 2).exp(), lambda lp, V: (lp / 2).exp() / 2)
CUBES = Statistic("sum of p^3", lambda lp, V: (3 * lp).exp())  # autograd has its derivative
JSD = Divergence.mixture(0.3, 0.3, 0.7)
#: Which columns, and statistics; divergences are written down once more in `expected`.
QUERIES = [
    ("all", ("logp",)),
    ("all", ("logp", "entropy", "mean_logp", "lse")),
    ("all", ("log_sum_sq_probs", "mean_logit", RENYI, CUBES)),
    ("all", (divergence(Divergence.reverse_kl()),)),
    ("all", (divergence(JSD), "logp", "entropy")),
    ("all", (divergence(Divergence.forward_kl()),)),
    ("all", (divergence(Divergence.cosine()), "logp")),
    ("kept", ("logp", "entropy", RENYI)),
    ("kept", (divergence(JSD),)),
    ("selected", ("logp", "selected_logps", CUBES)),
    ("largest", ("selected_logps", "lse")),
]


class Case:
    """Tensors of one head, and two ways to make logits of them: whole ones, and targets of a rank."""

    def __init__(self, kind, bias, softcap, temperature, columns, teacher, ignored=True, dtype=torch.double):
        def random(*shape):
            return torch.randn(*shape, dtype=dtype)

        self.kind, self.softcap = kind, softcap
        self.labels = torch.randint(V, (N,))
        self.kept = self.selected = None
        if columns == "kept":
            kept = torch.stack([torch.randperm(V)[:6] for _ in range(N)])
            self.kept = torch.where(kept == self.labels[:, None], -1, kept)
            self.kept[:, 0] = self.labels
        if columns == "selected":
            self.selected = torch.randint(V, (N, 3))
        if columns == "largest":
            self.selected = 4
        if ignored:
            self.labels[torch.randperm(N)[:5]] = -100
        self.temperature = torch.rand(N, dtype=dtype) + 0.5 if temperature == "token" else 1.3
        if temperature == "soft":
            self.temperature = 1.0
        self.soft = 0.8 if temperature == "soft" else self.temperature
        self.hidden, self.weight, self.bias = random(N, H), random(V, H) / 2, random(V) if bias else None
        self.a, self.b = random(2, H), random(V, 2) / 2
        self.codes = (self.weight * 20).round().clamp(-127, 127)
        self.vt = V if columns == "kept" or teacher != "narrow" else 17
        self.teacher = (random(N, HT), random(self.vt, HT)) if teacher else None
        self.as_logits = teacher == "logits"

    def tensors(self, cut=ALL):
        parts = [self.hidden, self.weight[cut], None if self.bias is None else self.bias[cut], self.a, self.b[cut]]
        h, w, bias, a, b = map(leaf, parts)
        leaves = [h, *([] if bias is None else [bias]), *([w] if self.kind == "dense" else [])]
        return h, w, bias, a, b, leaves + ([a, b] if "adapters" in self.kind else [])

    def whole(self):
        """Logits at temperature 1 of student and teacher, which columns count, and the leaves."""
        h, w, bias, a, b, leaves = self.tensors()
        base = self.codes * 0.05 if "quantized" in self.kind else (w if self.kind == "dense" else w.detach())
        matrix = base + 0.5 * b @ a if "adapters" in self.kind else base
        z = h @ matrix.T + (0 if bias is None else bias)
        z = z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        t = None if self.teacher is None else self.teacher[0] @ self.teacher[1].T
        counts = torch.ones(N, V, dtype=torch.bool)
        if self.kept is not None:
            there = torch.zeros(N, V + 1, dtype=torch.bool)
            counts = there.scatter_(1, torch.where(self.kept < 0, V, self.kept), True)[:, :V]
        return z, t, counts, leaves

    def target(self, cut=ALL, ranks=ALONE, invariant=False):
        h, w, bias, a, b, leaves = self.tensors(cut)
        base = Dense(w if self.kind == "dense" else w.detach())
        if "quantized" in self.kind:
            base = Quantized.of(Codes(self.codes[cut]))
        weights = WithAdapters(base, a, b, 0.5) if "adapters" in self.kind else base
        teacher = None
        if self.teacher is not None:
            rows = self.teacher[1][cut] if ranks.size > 1 else self.teacher[1]
            teacher = Target(
                Projection(Dense(rows), LogitTransform(), ranks if self.vt == V else ALONE),
                self.teacher[0],
                self.labels,
                self.soft,
            )
            if self.vt != V:
                teacher = Target(
                    Projection(Dense(self.teacher[1]), LogitTransform(), ALONE), self.teacher[0], self.labels, self.soft
                )
            if self.as_logits:
                teacher = TeacherLogits(self.teacher[0] @ self.teacher[1].T, temperature=self.soft)
        head = Projection(weights, LogitTransform(softcap=self.softcap), ranks, bias, invariant)
        kept, selected = self.kept, self.selected
        return Target(head, h, self.labels, self.temperature, kept, selected, teacher=teacher), leaves

    def expected(self, asked, z, t, counts):
        def column(x):
            return x[:, None] if isinstance(x, torch.Tensor) else x

        live, own = self.labels != -100, z / column(self.temperature)
        own = own.masked_fill(~counts, -torch.inf)
        lse = own.logsumexp(-1)
        lp = (own - lse[:, None]).masked_fill(~counts, 0.0)
        values = {}
        for s in asked:
            if s.divergence is not None:
                shared = slice(0, self.vt)
                p, q = (
                    (x[:, shared] / column(self.soft)).masked_fill(~counts[:, shared], -torch.inf).log_softmax(-1)
                    for x in (z, t)
                )
                here = counts[:, shared]
                lp2, lq = p.masked_fill(~here, 0.0), q.masked_fill(~here, 0.0)
                if s.divergence.form == "cosine":
                    v = 1 - F.cosine_similarity(z[:, shared] / column(self.soft), t / column(self.soft), -1)
                elif s.divergence.form == "forward_kl":
                    v = (lq.exp() * (lq - lp2) * here).sum(-1)
                elif s.divergence.form == "reverse_kl":
                    v = (lp2.exp() * (lp2 - lq) * here).sum(-1)
                else:
                    m = (0.3 * lq.exp() + 0.7 * lp2.exp()).log()
                    v = ((0.3 * lq.exp() * (lq - m) + 0.7 * lp2.exp() * (lp2 - m)) * here).sum(-1)
            elif s.phi is not None:
                v = (s.phi(lp, V) * counts).sum(-1)
            else:
                v = {
                    "logp": lambda: lp.gather(1, self.labels.clamp(min=0)[:, None])[:, 0],
                    "lse": lambda: lse,
                    "entropy": lambda: -(lp.exp() * lp * counts).sum(-1),
                    "mean_logp": lambda: lp.sum(-1) / V,
                    "mean_logit": lambda: own.sum(-1) / V,
                    "log_sum_sq_probs": lambda: lp.exp().square().sum(-1).log(),
                    "selected_logps": lambda: (
                        lp.topk(4).values if isinstance(self.selected, int) else lp.gather(1, self.selected)
                    ),
                }[s.name]()
            values[s.name] = v * (live if v.dim() == 1 else live[:, None])
        return values


def on_ranks(shared, run):
    box, barrier, results = [None] * 3, threading.Barrier(3), {}

    def work(rank):
        start, stop = SHARDS[rank] if shared else (0, V)
        ranks = Threads(rank, box, barrier) if shared else ALONE
        try:
            results[rank] = run(slice(start, stop), ranks)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    if not shared:
        return [run(slice(0, V), ALONE)]
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results.values() if isinstance(r, BaseException)]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in sorted(results)]


def worst_of(results, loss, expected):
    worst = max(((value - loss.detach()).abs() / (1 + loss.detach().abs())).item() for value, _ in results)
    for i, e in enumerate(expected):  # a rank has its rows of what is cut, and all of the rest
        pieces = [grads[i] for _, grads in results]
        whole = pieces[0] if pieces[0].shape == e.shape else torch.cat(pieces)
        worst = max(worst, ((whole - e).abs().max() / (1 + e.abs().max())).item())
    return worst


@contextmanager
def always(way):
    """Zero rows are left out however small the call; and for tiles, the second pass goes by columns in any dtype."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "MIN_FLOPS", {"cpu": 0.0})
        patched.setattr(stream, "MIN_FLOPS_OF_LOSSES", {"cpu": 0.0})
        if way == "tiles":
            patched.setattr(stream, "BLOCKS", [row._replace(parts=1) for row in stream.BLOCKS])
            patched.setattr(stream, "HALF_DTYPES", (torch.double,))
        yield


WAYS = ("one pass", "again", "keep", "invariant", "tiles", "not compact", "not compact, one pass")


def narrow(target, dtype, device):
    """A target in another precision, and on another device, whose leaves are the same."""
    if isinstance(target, torch.Tensor):
        return target.to(device, dtype if target.is_floating_point() else target.dtype)
    if isinstance(target, Codes):
        return Codes(narrow(target.codes, dtype, device), dtype)
    if dataclasses.is_dataclass(target) and not isinstance(target, Ranks):
        fields = {f.name: getattr(target, f.name) for f in dataclasses.fields(target) if f.init}
        return dataclasses.replace(target, **{name: narrow(value, dtype, device) for name, value in fields.items()})
    return target


def check(
    kind,
    bias,
    softcap,
    temperature,
    query,
    shared,
    way,
    heads,
    small,
    teacher,
    dtype=torch.double,
    device="cpu",
    **more,
):
    """Any statistics, weighted as any loss weights them, a third of the tokens with zero."""
    columns, names = query
    torch.manual_seed(0)
    asked = [STATISTICS[n] if isinstance(n, str) else n for n in names]
    compares = any(s.divergence for s in asked)
    cases = [Case(kind, bias, softcap, temperature, columns, teacher if compares else None) for _ in range(heads)]
    widths = {"selected_logps": (4,) if columns == "largest" else (3,)}
    upstream = [{s.name: torch.randn(N, *widths.get(s.name, ()), dtype=torch.double) for s in asked} for _ in cases]
    zero = torch.rand(N) < 0.33
    for of_case in upstream:
        for u in of_case.values():
            u[zero] = 0.0

    def weighted(s, u):
        return sum((u[n] * v * v).flatten(1).sum(1) if v.dim() > 1 else u[n] * v * v for n, v in s.items())

    total, leaves = 0.0, []
    for case, u in zip(cases, upstream, strict=True):
        z, t, counts, own = case.whole()
        total, leaves = total + weighted(case.expected(asked, z, t, counts), u).sum(), leaves + own
    expected = torch.autograd.grad(total, leaves)
    one_pass = "one pass" in way
    options = EngineOptions(
        workspace=24_000 if small else 10**7,
        keep=10**9 if way == "keep" else 0,
        compact="not compact" not in way,
        **more,
    )

    def run(cut, ranks):
        made = [case.target(cut, ranks, way == "invariant") for case in cases]
        targets, leaves = [t for t, _ in made], [x for _, own in made for x in own]
        weights = upstream
        if dtype != torch.double:
            targets = [narrow(t, dtype, device) for t in targets]
            weights = [{n: narrow(u, torch.float32, device) for n, u in of_case.items()} for of_case in upstream]
        if one_pass:
            live = None if way == "not compact, one pass" else ~zero.to(device)
            losses = [TokenLoss(lambda s, **u: weighted(s, u), u, live=live) for u in weights]
            loss = loss_sum(targets, asked, losses, options)[0]
        else:
            found = statistics(targets, asked, options)
            loss = sum(weighted(s, u).sum() for s, u in zip(found, weights, strict=True))
        return loss.detach().cpu(), torch.autograd.grad(loss, leaves)

    with always(way):
        return worst_of(on_ranks(shared, run), total, expected)


def test_ranks_of_different_sizes_plan_alike():
    """Otherwise one would wait for numbers of a block that another does not have."""
    case, calls = Case("dense", False, None, "one", "all", "head", False), set()
    for rank, (start, stop) in enumerate(SHARDS):
        target, _ = case.target(slice(start, stop), Threads(rank, None, None))
        tokens = Counted(None, N, N, (0, 0))
        calls.add(stream.signature(target, asked_for([divergence(JSD)]), EngineOptions(), tokens, couples=True))
    assert len(calls) == 1


KINDS = ("dense", "frozen", "quantized", "adapters", "quantized+adapters")
EVERY = list(
    itertools.product(
        KINDS, (False, True), (None, 3.0), ("one", "token", "soft"), QUERIES, (False, True), WAYS, (1, 2),
        (True, False), ("head", "narrow", "logits"),
    )
)  # fmt: skip


def allowed(kind, bias, softcap, temperature, query, shared, way, heads, small, teacher):
    compares = any(isinstance(s, Statistic) and s.divergence for s in query[1])
    if way == "invariant" and (shared or "adapters" in kind):
        return False
    if teacher != "head" and not compares:
        return False
    if temperature == "soft" and not compares:
        return False
    return not (shared and teacher == "narrow" and query[0] != "kept")  # tested on its own: a rank may have no column


DRAWN = [row for row in EVERY if allowed(*row)]


@pytest.mark.parametrize("part", range(10))
def test_combinations(part):
    """A fixed share of all, in any order."""
    order = torch.randperm(len(DRAWN), generator=torch.Generator().manual_seed(1)).tolist()
    wrong = []
    for i in order[part * 20 : (part + 1) * 20]:
        error = check(*DRAWN[i])
        if not error < 1e-9:
            wrong.append((error, DRAWN[i]))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("part", range(5))
def test_kernels(part):
    """The same by Triton's row kernels, in fp32."""
    order = torch.randperm(len(DRAWN), generator=torch.Generator().manual_seed(2)).tolist()
    wrong = []
    for i in order[part * 6 : (part + 1) * 6]:
        row = (*DRAWN[i][:5], False, *DRAWN[i][6:])
        if allowed(*row) and not (error := check(*row, dtype=torch.float32, device=DEVICE, backend="triton")) < 1e-4:
            wrong.append((error, row))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("names", [query[1] for query in QUERIES if query[0] == "all"])
def test_long_rows_in_half_precision(names):
    """Of several blocks of a kernel, whose half-precision gradient may take the memory of projections."""
    torch.manual_seed(4)
    asked = [STATISTICS[n] if isinstance(n, str) else n for n in names]
    h, t = torch.randn(6, 8, dtype=torch.double), torch.randn(6, 4, dtype=torch.double)
    w, v, y = torch.randn(9001, 8, dtype=torch.double), torch.randn(9001, 4, dtype=torch.double), torch.arange(6) * 1500

    def gradients(dtype, **options):
        a, b = (x.to(DEVICE, dtype).requires_grad_() for x in (h, w))
        teacher = Target(
            Projection(Dense(v.to(DEVICE, dtype)), LogitTransform(), ALONE), t.to(DEVICE, dtype), y.to(DEVICE)
        )
        target = Target(
            Projection(Dense(b), LogitTransform(), ALONE),
            a,
            y.to(DEVICE),
            teacher=teacher if any(s.divergence for s in asked) else None,
        )
        found = statistics([target], asked, EngineOptions(**options))[0]
        return torch.autograd.grad(sum(value.sum() for value in found.values()), (a, b))

    for g, e in zip(gradients(torch.bfloat16, backend="triton"), gradients(torch.double, backend="torch"), strict=True):
        assert (g - e).norm() < 0.03 * e.norm()
