"""Losses with gradients in float64, as an earlier commit computed them: ``golden.json``.

``python -m tests.results.golden COMMIT`` writes this file anew, from the package of that commit (23dcacfe so far; for
``grpo_loss``, and for what is newer, 270b17e9). Of every tensor there are its entries, or :data:`MOST` sums of them
with different weights. A name is a call, so that ``"CE reduction=sum of weight hidden labels": null`` is a new case.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import liger_losses
from liger_losses import Completions, Divergence, EngineOptions, Largest, LogitTransform, Teacher, functional
from tests import losses
from tests.reference import tensors_of

FILE = Path(__file__).with_suffix(".json")
#: Completions, tokens, hidden sizes of student and teacher, vocabulary.
B, T, H, H_TEACHER, V = 4, 5, 6, 7, 11
#: The most numbers of a tensor that are in the file.
MOST = 4
#: The inputs that get a gradient.
LEAVES = ("hidden", "weight", "bias", "logps")


def wave(*shape: int, phase: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [-1, 1] that look random, and are the same with every version of torch."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(i * i * 0.31 + i + phase).view(shape).to(dtype)


class Tenths(liger_losses.QuantizedWeight):
    """Rows of whole tenths."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__((len(weight), weight.shape[1]), torch.float64, weight.device)
        self.codes = (weight.detach() * 10).round()

    def rows(self, start: int, stop: int) -> Tensor:
        return self.codes[start:stop] / 10


def inputs(dtype: torch.dtype = torch.float64, size: float = 1.0, gap: float = 1.0, masked: bool = False) -> Any:
    """What calls are made of, by name: hidden states times ``size``, logarithms of ratios times ``gap``, some or all
    tokens masked. Numbers of a masked token are NaN, which must reach no result."""

    drawn = functools.partial(wave, dtype=dtype)

    def of_tokens(values: Tensor) -> Tensor:
        return values.masked_fill(~x.mask.view(B, T, *[1] * (values.dim() - 2)), torch.nan)

    x = SimpleNamespace(hidden=1.5 * size * drawn(B, T, H), weight=1.2 * drawn(V, H, phase=1.0))
    x.bias = 0.3 * drawn(V, phase=2.0)
    x.labels = (torch.arange(B * T) * 7 % V).view(B, T)
    for row, places in ((0, [0]), (1, [3, 4]), (3, [0, 1, 4])):
        x.labels[row, places] = -100
    x.labels = x.labels.masked_fill(torch.tensor(masked), -100)
    x.mask, x.ids = x.labels != -100, x.labels.clamp(min=0)
    x.logps = (x.hidden @ x.weight.t() + x.bias).log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    old, ref = x.logps + 0.4 * gap * drawn(B, T, phase=3.0), x.logps + 0.6 * gap * drawn(B, T, phase=4.0)
    x.old, x.ref, x.sampler = map(of_tokens, (old, ref, old + 0.3 * gap * drawn(B, T, phase=5.0)))
    for leaf in LEAVES:
        getattr(x, leaf).requires_grad_()
    x.ref_hidden, x.ref_weight = 1.5 * drawn(B, T, H, phase=6.0), 1.2 * drawn(V, H, phase=7.0)
    x.advantages, x.token_advantages = torch.tensor([1.2, -0.7, 0.4, -1.1], dtype=dtype), of_tokens(drawn(B, T))
    x.desirable, x.prompts = torch.tensor([True, False, False, True]), torch.tensor([0, 1, 0, 1])
    x.of_both_signs = torch.tensor([0, 0, 1, 0])  # prompts; the second one's advantages have one sign
    x.some = x.mask & (torch.arange(B) < 3)[:, None]  # the last completion has no tokens
    x.token_weights, x.of_each = 1 + drawn(B, T), 1 + drawn(B)
    x.shifted_weights = x.token_weights.roll(-1, 1)
    x.weight_lists = [x.token_weights, x.shifted_weights]
    x.temperature, x.other_labels = of_tokens(1.0 + 0.3 * drawn(B, T, phase=8.0)), x.labels.roll(1, 1)
    x.two_labels, x.label_weights = torch.stack([x.labels, x.ids], -1), drawn(B, T, 2)
    x.head, x.quantized = liger_losses.Head(x.weight, x.bias), Tenths(x.weight)
    x.heads, x.biases = [x.weight, 0.5 * x.weight], [x.bias, None]
    x.states, x.label_lists = [x.hidden, 0.5 * x.hidden[:2]], [x.labels, x.labels[2:]]
    x.columns = (x.ids[..., None] + torch.tensor([0, 2, 2])) % V
    x.kept = liger_losses.TokenSupport((x.ids[..., None] + torch.arange(4)) % V)
    sums = x.ref.where(x.mask, 0.0).sum(1).detach()  # of completions; they have several lengths
    x.first = Completions(x.hidden[:2], x.labels[:2], ref_logps=sums[:2])
    x.second = Completions(x.hidden[2:, :4], x.labels[2:, :4], ref_logps=sums[2:])
    x.others, x.likely = (Completions(x.hidden.flip(0), x.labels, ref_logps=ref) for ref in (sums, 0 * sums))
    x.ref_chosen, x.ref_rejected, x.kl = ref[:2].sum(1), x.ref[2:], 0.3 + 0.3 * drawn(B)
    x.pairs, x.ref_pairs = x.logps[:, :2].unbind(1), ref[:, :2].unbind(1)
    x.teacher_hidden = 1.5 * drawn(B, T, H_TEACHER, phase=9.0)
    x.teacher_weight = 1.2 * drawn(V, H_TEACHER, phase=10.0)
    x.teacher = Teacher(x.teacher_hidden, x.teacher_weight)
    x.capped = Teacher(x.teacher_hidden, x.teacher_weight, logit_scale=1.1, softcap=2.0)
    x.narrower = Teacher(x.teacher_hidden, x.teacher_weight[: V - 2], columns_correspond=True)
    x.projected = liger_losses.projected_teacher(
        x.teacher_hidden, x.teacher_weight[: V - 4], (1 + drawn(V, V - 4, phase=11.0)).to_sparse_csr(), temperature=2.0
    )
    wider = torch.cat([x.teacher_weight, 3 * x.teacher_weight[:2]])
    x.shared_labels = x.labels.where(~x.mask, x.ids % (V - 2))  # of columns that the narrower teacher has too
    x.wider = Teacher(x.teacher_hidden, wider, columns_correspond=True)
    logits = x.teacher_hidden @ wider.t()
    x.wider_logits = liger_losses.TeacherLogits(logits, columns_correspond=True)
    x.wider_function = liger_losses.TeacherLogits(lambda at: logits.flatten(0, 1)[at], V + 2, columns_correspond=True)
    x.log_p = (x.hidden @ x.weight.t()).log_softmax(-1)
    x.log_q = (x.teacher_hidden @ x.teacher_weight.t()).log_softmax(-1)
    x.teacher_logits = liger_losses.TeacherLogits(2 * x.log_q)
    x.teachers = liger_losses.Teachers([x.teacher, Teacher(x.ref_hidden, x.ref_weight)], x.ids % 2)
    top, ids = x.log_q.topk(3)
    rest = (-torch.expm1(top.logsumexp(-1))).log()
    x.bucket, x.renormalized, x.no_tail = (
        liger_losses.TeacherTopK(top, ids, tail, rest) for tail in ("bucket", "renormalize", "none")
    )
    x.unknown_rest, x.gold = liger_losses.TeacherTopK(top, ids), Completions(0.5 * x.hidden[2:], x.labels[:2])
    x.topk_logps, x.sampler_topk_logps = x.log_p.gather(-1, ids), of_tokens(top)
    x.sampler_columns, x.all_columns = (
        liger_losses.TeacherTopK(of_tokens(logps), ids.masked_fill(~x.mask[..., None], -7))
        for logps, ids in (x.log_q.topk(3), (x.log_q + 0.01).topk(V))  # rounded, they may sum to more than 1
    )
    x.token_loss = lambda s, y, a: a * s.logp.exp() + s.entropy**2
    x.token_inputs, x.squares = {"a": x.old.detach()}, lambda s, y: s.selected_logps.square().sum(-1)
    return x


#: Options of values whose types alone are in a name.
OBJECTS = {
    "ce_weight=Tensor": 1 + 0.5 * wave(V),
    "class_weight=Tensor": 1 + wave(V),
    "transform=LogitTransform": LogitTransform(0.7, 1.3, 2.0),
    "options=EngineOptions": EngineOptions(chunk_size=3),
    "selected=Largest": Largest(3),
    "weights=dict": {"divergence": wave(B, T), "logp": wave(B, T, phase=1.0)},
    "DistillationLoss divergence=Divergence": Divergence.kl_by_entropy(1.0),
    "linear_divergence divergence=Divergence": Divergence.total_variation(),
    "linear_divergence_loss divergence=Divergence": Divergence.reverse_kl(),
}


class Case(NamedTuple):
    """A call of a loss (of :mod:`tests.losses`) or a function: names of :func:`inputs`, also ``keyword=name``; and
    options."""

    loss: str
    call: str
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str) -> Case:
        """Of ``loss option=value, option=value of call``."""
        (words, call), options = name.split(" of "), dict[str, Any]()
        loss, _, words = words.partition(" ")
        for pair in re.findall(r"\w+=.*?(?=, \w+=|$)", words):
            option, _, text = pair.partition("=")
            options[option] = OBJECTS.get(pair, OBJECTS.get(f"{loss} {pair}", text))
            with contextlib.suppress(ValueError, SyntaxError):  # all other text is a name
                options[option] = ast.literal_eval(text)
        return cls(loss, call, options)

    def result(self, x: Any) -> Any:
        positional, keywords = [], {}
        for word in self.call.split():
            name, _, value = word.rpartition("=")
            known = getattr(x, value) if hasattr(x, value) else ast.literal_eval(value)
            if name:
                keywords[name] = known
            else:
                positional += known if isinstance(known, tuple) else [known]
        made = next(
            getattr(names, self.loss) for names in (losses, functional, liger_losses) if hasattr(names, self.loss)
        )
        if isinstance(made, type):
            return made(**self.options)(*positional, **keywords)
        return made(*positional, **keywords, **self.options)


#: By name, in the file.
EXPECTED = json.loads(FILE.read_text())
CASES = {name: Case.of(name) for name in EXPECTED}


def numbers_of(tensor: Tensor) -> list[float]:
    """The entries, or weighted sums of them."""
    values = tensor.detach().double().flatten()
    if len(values) > MOST:
        values = torch.stack([(values * wave(len(values), phase=float(p))).sum() for p in range(MOST)])
    return values.tolist()


def computed(case: Case, **changed: Any) -> dict[str, list[list[float]]]:
    """The results of a case, and the gradients of a weighted sum of them."""
    x = inputs(**changed)
    values = tensors_of(case.result(x))
    found, trained = {"values": [*map(numbers_of, values)]}, [value for value in values if value.requires_grad]
    if trained:
        total = sum((value * wave(*value.shape, phase=1.5)).sum() for value in trained)
        gradients = torch.autograd.grad(total, [getattr(x, leaf) for leaf in LEAVES], allow_unused=True)
        found |= {f"of {leaf}": [numbers_of(g)] for leaf, g in zip(LEAVES, gradients, strict=True) if g is not None}
    return found


def main(commit: str | None) -> None:
    if commit is None:
        lines = [f"{json.dumps(name)}: {json.dumps(computed(case))}" for name, case in CASES.items()]
        print("{\n" + ",\n".join(lines) + "\n}")
        return
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", commit, "liger_losses"], cwd=root, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=folder, input=packed.stdout, check=True)
        command, paths = [sys.executable, "-m", "tests.results.golden"], os.environ | {"PYTHONPATH": str(root)}
        written = subprocess.run(command, cwd=folder, env=paths, check=True, stdout=subprocess.PIPE, text=True)
    FILE.write_text(written.stdout)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
