"""Some tokens: their statistics and, once the loss's derivatives by these are known, their gradients.

R tokens, C columns of this rank that are here, P the same padded, k selected columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.core import rows
from liger_losses.chunked.core.buffers import Buffer, Gradients
from liger_losses.chunked.core.plan import Plan, Planner, Signature, by_blocks, padded, row_bytes
from liger_losses.chunked.core.statistics import OF_KERNELS, Statistic
from liger_losses.chunked.core.target import Target, TeacherLogits
from liger_losses.chunked.core.weights import ALL, Columns, Weights
from liger_losses.kernels.divergence import Coefficients, Logits, divergence_gradient_into
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.matmul import wide_dtype
from liger_losses.kernels.online_softmax import merge
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import row_slices, softmax_statistics

#: Statistics of the softmax of all columns; a teacher is compared over those that both models have.
_OF_ALL = {*OF_KERNELS, "selected_logps", "columns", "rest"}
_SELECTED = {"selected_logps", "selected_logits"}


@dataclass(eq=False)
class Block:
    """The core's: projections in fp32, whose memory their gradient takes. For any statistics, in any dtype.

    ``constants [R]`` are the statistics, and what gradients need of a whole row. A block lives until backward without
    these and its ``part``; all of its tensors have a row for each token. An accelerator's is such a dataclass too, with
    :meth:`of` and :meth:`add_gradients`.
    """

    part: Any  # a Target of these tokens
    asked: tuple[Statistic, ...]
    plan: Plan
    columns: Columns  # of this rank: a slice, or ids [R, K]
    memory: Tensor  # [R, P], whose first C columns are projections (of kept columns: logits at temperature 1)
    teacher_memory: Tensor | None
    constants: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        part: Target,
        asked: tuple[Statistic, ...],
        plan: Plan,
        constants: dict[str, Tensor] | None = None,
        columns: slice = ALL,
    ) -> Block:
        """A block of these tokens, and of some columns where their ``constants`` are known."""
        chosen = _columns(part, asked, columns)
        device = part.hidden.device
        size = padded(_width(chosen) + 1)
        memory = torch.empty(len(part.hidden), size, dtype=wide_dtype(plan.products.dtype), device=device)
        block = cls(part, asked, plan, chosen, memory, None, constants or {})
        block._project()
        block.teacher_memory = block._teacher_projections()
        if constants is None:
            block._compute()
        return block

    @property
    def weights(self) -> Weights:
        """What multiplies hidden states."""
        weights: Weights = self.part.head.weights
        return weights

    # --- Projections -------------------------------------------------------------------------------------------------

    def _project(self) -> None:
        """Projections of a slice; logits at temperature 1 of kept columns, -inf for those not here."""
        if isinstance(self.columns, slice):
            self.weights.logits(self.z, self.part.hidden, self.columns)
        else:
            _finished(self.part, self.weights, self.z, self.columns).masked_fill_(~self.here, -torch.inf)

    def _teacher_projections(self) -> Tensor | None:
        """The teacher's, of the columns here that it has; of kept ones, logits at temperature 1."""
        teacher, wide = self.part.teacher, self.memory.dtype
        if teacher is None:
            return None
        start, logits = 0, getattr(teacher, "logits", None)
        if isinstance(self.columns, slice):
            start = self._teacher_start(self.columns)
            if logits is not None:
                # Kernels read rows, and a function's result may be a transposed matrix.
                logits = logits[:, start : start + self.width]
                return logits.to(wide, copy=True, memory_format=torch.contiguous_format)
            width = max(min(self.width, teacher.head.weights.columns - start), 0)
            memory = self.memory.new_empty(len(self.memory), padded(width))[:, :width]
            return teacher.head.weights.logits(memory, teacher.hidden, slice(start, start + width))
        ids = self.part.kept.clamp(min=0)
        if logits is not None:
            logits = logits.gather(1, ids).to(wide)
        else:
            columns = ids if teacher.head.ranks.size == 1 else self.columns
            logits = _finished(teacher, teacher.head.weights, self.memory.new_empty(ids.shape), columns)
        return logits.masked_fill_(~self.here, -torch.inf)

    def _teacher_start(self, columns: slice) -> int:
        """Where a slice of this rank's columns starts among those that the teacher has here."""
        teacher = self.part.teacher
        whole = isinstance(teacher, TeacherLogits) or teacher.head.ranks.size == 1
        return columns.start + (self.part.head.ranks.first if whole else 0)

    # --- What is here ------------------------------------------------------------------------------------------------

    @cached_property
    def width(self) -> int:
        """C."""
        return _width(self.columns)

    @cached_property
    def z(self) -> Tensor:
        return self.memory[:, : self.width]

    @cached_property
    def here(self) -> Tensor:
        """Which of the kept columns ``[R, K]`` are no padding, and this rank's."""
        there = self.part.kept >= 0
        owned = self.part.head.ranks.local(self.part.kept.clamp(min=0))[1]
        return there if owned is None else there & owned

    @cached_property
    def common(self) -> int:
        """How many of the columns here the teacher has too."""
        return 0 if self.teacher_memory is None else self.teacher_memory.shape[1]

    @cached_property
    def _names(self) -> set[str]:
        return {s.name for s in self.asked}

    @cached_property
    def epilogue(self) -> Epilogue:
        """From the projections here to logits."""
        return self._epilogue(self.part.temperature)

    def _epilogue(self, temperature: float | Tensor, columns: int | None = None) -> Epilogue:
        """From the projections here (the first so many) to logits."""
        if not isinstance(self.columns, slice):
            return Epilogue(LogitTransform(temperature))
        part, start = self.part, self.columns.start
        here = slice(start, self.columns.stop if columns is None else start + columns)
        weight = part.class_weight
        if weight is not None:
            first = part.head.ranks.first + start
            weight = weight.detach()[first : first + here.stop - start].to(self.memory.dtype).contiguous()
        return Epilogue(part.transform(temperature), part.head.local_bias(here), weight)

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where ids ``[R, k]`` of the vocabulary are among the columns here, and which are (``None`` for all)."""
        if isinstance(self.columns, slice):
            places, here = self.part.head.ranks.local(ids)
            if self.columns.start == 0 and self.width == self.part.head.weights.columns:
                return places, here
            places = places - self.columns.start
            inside = (places >= 0) & (places < self.width)
            return places.clamp(0, self.width - 1), inside if here is None else inside & here
        same = (self.part.kept[:, None, :] == ids[..., None]) & self.here[:, None, :]
        return same.int().argmax(-1), same.any(-1)

    @cached_property
    def _label_places(self) -> tuple[Tensor, Tensor | None]:
        return self._places(self.part.labels[:, None])

    @property
    def label_here(self) -> Tensor | None:
        """``[R]``, which tokens' labels are among the columns here (``None`` for all)."""
        here = self._label_places[1]
        return None if here is None else here[:, 0]

    def _label(self, outside: int) -> Tensor:
        """The labels' places here ``[R]``, and the number ``outside`` for a label that is not."""
        places, here = self._label_places
        places = places if here is None else torch.where(here, places, outside)
        return places[:, 0].contiguous()  # as kernels read it

    # --- Statistics --------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """The statistics, and what their gradients need of a whole row."""
        part, names, plan = self.part, self._names, self.plan
        epilogue, asked_of_kernels = self.epilogue, names & {*OF_KERNELS}
        table = [s for s in self.asked if s.phi is not None]
        if names & _OF_ALL or table:
            wanted = asked_of_kernels | ({"max_logit"} if "argmax" in names and part.head.ranks.size > 1 else set())
            values = softmax_statistics(self.z, self._label(0), frozenset(wanted), epilogue, **plan.of_kernels)
            values = {name: values[name] for name in {"lse", *wanted}}
            if isinstance(part.selected, int):
                top = rows.largest(self.z, epilogue, part.selected)
                self.constants["columns"] = rows.largest_of_ranks(*top, part.selected, part.head.ranks)
            if (ids := self._selected()) is not None:
                values["selected_logps"] = self._logits_of(ids, epilogue)
            self.constants |= rows.merged(values, part.head.ranks, plan, self.label_here, part.class_weight)
            if "rest" in names and ids is not None:
                sums = rows.rest(self.memory, self.width, *self._places(ids), self.constants["lse"], epilogue, plan)
                self.constants["rest"] = part.head.ranks.sum(sums).log()
        if "selected_logits" in names:
            self.constants["selected_logits"] = part.head.ranks.sum(self._logits_of(part.selected, epilogue))
        if table:
            self.constants |= rows.table_sums(
                table, self.z, self.constants["lse"], epilogue, part.vocab_size, part.head.ranks, plan
            )
        if part.teacher is not None and names & {"divergence", "soft_entropy"}:
            self._compare()

    def _selected(self) -> Tensor | None:
        """The ids ``[R, k]`` of selected columns."""
        if isinstance(self.part.selected, int):
            return self.constants["columns"]
        return self.part.selected if self._names & {*_SELECTED, "rest"} else None

    def _logits_of(self, ids: Tensor, epilogue: Epilogue) -> Tensor:
        """Logits ``[R, k]`` of columns of each token, 0 for those that are not here."""
        places, here = self._places(ids)
        bias = None if epilogue.bias is None else epilogue.bias[places]
        logits = epilogue.transform(self.z.gather(1, places), bias)
        return logits if here is None else torch.where(here, logits, 0.0)

    def _compare(self) -> None:
        """The divergence from the teacher, over the columns that both models have."""
        part, plan, z, label = self.part, self.plan, self.z[:, : self.common], torch.zeros_like(self.part.labels)
        assert self.teacher_memory is not None
        entropy = frozenset(["entropy"] if "soft_entropy" in self._names else [])
        ranks, which = part.head.ranks, self._divergence
        same = part.teacher.vocab_size >= part.vocab_size and self._of_student.transform is self.epilogue.transform
        if same and not entropy and "lse" in self.constants:
            student = {"lse": self.constants["lse"]}
        else:
            values = softmax_statistics(z, label, entropy, self._of_student, **plan.of_kernels)
            student = rows.merged({name: values[name] for name in {"lse", *entropy}}, ranks, plan)
        entropy = frozenset(["entropy"] if which is not None and which.by_entropy else [])
        values = softmax_statistics(self.teacher_memory, label, entropy, self._of_teacher, **plan.of_kernels)
        teacher = rows.merged({name: values[name] for name in {"lse", *entropy}}, ranks, plan)
        self.constants |= {"soft_lse": student["lse"], "teacher_lse": teacher["lse"]}
        if "entropy" in student:
            self.constants["soft_entropy"] = student["entropy"]
        if which is None:
            return
        if which.by_entropy:
            self.constants["parameter"] = which.row_parameter(teacher["entropy"])
        self.constants |= rows.divergence_sums(*self._sides(), which, self.constants.get("parameter"), ranks, plan)

    @cached_property
    def _divergence(self) -> Any:
        return next((s.divergence for s in self.asked if s.divergence is not None), None)

    @cached_property
    def _of_student(self) -> Epilogue:
        """The student's logits at the teacher's temperature, of the columns that both have."""
        return self._epilogue(self.part.teacher.temperature, self.common)._replace(class_weight=None)

    @cached_property
    def _of_teacher(self) -> Epilogue:
        teacher = self.part.teacher
        if isinstance(teacher, TeacherLogits) or not isinstance(self.columns, slice):
            return Epilogue(LogitTransform(teacher.temperature))
        here = slice(self._teacher_start(self.columns), None)
        bias = teacher.head.local_bias(here)
        bias = None if bias is None else bias[: self.common].contiguous()
        return Epilogue(teacher.transform(teacher.temperature), bias)

    def _sides(self) -> tuple[Logits, Logits]:
        """Both models' logits of the shared columns."""
        assert self.teacher_memory is not None
        z = self.z if self.common == self.width else self.z[:, : self.common]
        student = Logits(z, self.constants["soft_lse"], self._of_student)
        return student, Logits(self.teacher_memory, self.constants["teacher_lse"], self._of_teacher)

    # --- Gradients ---------------------------------------------------------------------------------------------------

    def add_gradients(
        self, upstream: dict[str, Tensor], grads: Gradients, hidden: Tensor | None = None
    ) -> Tensor | None:
        """Add the gradients of weights and bias to ``grads``; return that of the hidden states ``[R, H]``, if they need
        one, added to ``hidden``, the gradient that other columns have given them, if it is not ``None``."""
        grad, weights, columns = self.gradient(upstream, grads), self.weights, self.columns
        if isinstance(columns, Tensor):
            columns = torch.where(self.here, columns, -1)  # of padding, no row is read
        weights.add_gradients(grads, grad, self.part.hidden, columns)
        return weights.hidden_gradient(grad, self.columns, hidden) if self.plan.hidden else None

    def gradient(self, upstream: dict[str, Tensor], grads: Gradients, out: Tensor | None = None) -> Tensor:
        """d loss / d projections ``[R, C]`` in the operands' dtype, in ``out`` or in the memory of the projections.

        There, a half-precision row overwrites the first half of the same fp32 row: no second buffer is needed. The
        gradient of the bias is added.
        """
        kept, z, of_bias = not isinstance(self.columns, slice), self.z, grads.of(self.part.head.bias)
        if out is None:
            in_place = kept or self.memory.dtype == self.plan.products.dtype
            out = z if in_place else self.memory.view(self.plan.products.dtype)[:, : self.width]
        softmax, hard = self._of_softmax(upstream)
        several = kept or of_bias or upstream.keys() & _SELECTED or any(s.phi for s in self._with(upstream))
        if not several and "divergence" not in upstream:
            return self._write_softmax(softmax, out)
        if not several and self.common == self.width and (hard is not None or not softmax):
            return self._write_divergence(upstream["divergence"], hard, out)
        parts = row_slices(z, self.plan.scratch_of_terms)
        for at in parts:
            block = self if len(parts) == 1 else self.rows(at)
            block._write_terms({name: g[at] for name, g in upstream.items()})
            if kept:
                block._back_to_projections()
            if of_bias is not None:
                block._add_bias(of_bias)
            if out is not z:
                out[at].copy_(block.z.to(out.dtype))
        return out

    def rows(self, at: slice) -> Block:
        """Some of the tokens, in the same memory."""
        columns = self.columns if isinstance(self.columns, slice) else self.columns[at]
        of_teacher = None if self.teacher_memory is None else self.teacher_memory[at]
        constants = {name: value[at] for name, value in self.constants.items()}
        part = self.part.take(at, compares=False)
        return type(self)(part, self.asked, self.plan, columns, self.memory[at], of_teacher, constants)

    def _with(self, upstream: dict[str, Tensor]) -> list[Statistic]:
        """The statistics that have a gradient."""
        return [s for s in self.asked if s.name in upstream]

    def _of_softmax(self, upstream: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """The derivatives by statistics of the softmax; and that by ``logp`` if it is the only one and a divergence's
        kernel can add it: as a hard loss of the same columns at temperature 1."""
        softmax = {name: g for name, g in upstream.items() if name in OF_KERNELS}
        if (selected := upstream.get("selected_logps")) is not None:
            # Every log-probability adds -g p to the whole row; what it adds at its own column follows.
            softmax["lse"] = softmax.get("lse", 0.0) - selected.sum(1)
        temperature = self.part.temperature
        at_one = not isinstance(temperature, Tensor) and temperature == 1.0
        alone = softmax.keys() == {"logp"} and at_one and self.common == self.width
        return softmax, softmax["logp"] if alone else None

    def _write_terms(self, upstream: dict[str, Tensor]) -> None:
        """The gradient of projections, which are fp32, in their memory: a sum of terms by statistics of the softmax, by
        rows of the table, by selected columns, and by a divergence."""
        z, epilogue, terms = self.z, self.epilogue, list[Tensor]()
        softmax, hard = self._of_softmax(upstream)
        selected = self._at_selected(upstream) if upstream.keys() & _SELECTED else None
        if table := [s for s in self._with(upstream) if s.phi is not None]:
            grad = rows.table_gradient(table, upstream, self.constants, z, epilogue, self.part.vocab_size)
            terms.append(epilogue.transform.chain_(grad, epilogue(z)))
        if "divergence" in upstream and self.common:
            if softmax and hard is None:
                terms.append(self._write_softmax(softmax, torch.empty_like(z)))
            self._write_divergence(upstream["divergence"], hard, z[:, : self.common])
            z[:, self.common :].zero_()
        else:
            self._write_softmax(softmax, z)
        for term in terms:
            z += term
        if selected is not None:
            z.scatter_(1, selected[0], z.gather(1, selected[0]) + selected[1])

    def _write_softmax(self, softmax: dict[str, Tensor], out: Tensor) -> Tensor:
        if not softmax:
            return out.zero_()
        part = self.part
        if isinstance(self.columns, slice):
            labels = part.labels.contiguous()
            first = part.head.ranks.first + self.columns.start
        else:
            labels, first = self._label(-1), 0
        return softmax_gradient_into(
            out,
            self.z,
            self.constants["lse"],
            labels,
            SoftmaxGradient.of(softmax, self.constants, part.class_weight),
            self.epilogue,
            first_column=first,
            vocab_size=part.vocab_size,
            **self.plan.of_kernels,
        )

    def _write_divergence(self, upstream: Tensor, hard: Tensor | None, out: Tensor) -> Tensor:
        constants, coefficients, label, squares = self.constants, Coefficients(upstream), None, None
        if hard is not None:
            coefficients = Coefficients(upstream, -hard, hard, constants["lse"])
            label = self._label(self.width)
        if "squares" in constants:
            squares = torch.stack([constants["squares"], constants["teacher_squares"]])
        return divergence_gradient_into(
            out,
            *self._sides(),
            self._divergence,
            coefficients,
            constants["h"],
            labels=label,
            squares=squares,
            parameter=constants.get("parameter"),
            **self.plan.of_kernels,
        )

    def _at_selected(self, upstream: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The places ``[R, k]`` of selected columns, and what their own terms add to the gradient there.

        A column that is not here has the place of another one, to whose gradient it adds nothing.
        """
        ids = self._selected()
        terms = torch.stack([upstream[name] for name in upstream.keys() & _SELECTED]).sum(0)
        assert ids is not None
        places, here = self._places(ids)
        terms = terms if here is None else torch.where(here, terms, 0.0)
        transform, bias = self.epilogue.transform, self.epilogue.bias
        logits = transform(self.z.gather(1, places), None if bias is None else bias[places])
        return places, rows.totals(places, terms) * transform.slope(logits) * transform.factor(logits)

    def _back_to_projections(self) -> None:
        """From the gradient of kept columns' logits at temperature 1 to that of their projections, in place."""
        part = self.part
        if part.head.transform.softcap is not None or part.head.transform.logit_scale != 1.0:
            assert isinstance(self.columns, Tensor)
            # The logits at temperature 1, again: their gradient has taken their memory.
            logits = _finished(part, self.weights, torch.empty_like(self.z), self.columns)
            part.transform(1.0).chain_(self.z, logits)
        self.z.masked_fill_(~self.here, 0.0)

    def _add_bias(self, buffer: Buffer) -> None:
        """A sum over all tokens: it is taken before anything is rounded."""
        if isinstance(self.columns, slice):
            buffer.whole()[self.columns.start : self.columns.stop] += self.z.sum(0)
        else:
            buffer.add_rows(self.columns.flatten(), self.z.flatten())


class Collected:
    """Gradients of projections ``[R, C]``, in half precision, of more tokens than there are logits of at a time: the
    products of all of them are taken together, so that they are tall, and few parts are added up."""

    def __init__(self, target: Target, plan: Plan, count: int) -> None:
        columns = padded(target.head.weights.columns)
        device = target.hidden.device
        self.memory = torch.empty(count, columns, dtype=plan.products.dtype, device=device)
        self.plan, self.columns = plan, slice(0, 0)

    def take(self, block: Block, upstream: dict[str, Tensor], grads: Gradients, at: slice) -> None:
        """The gradient of a block, whose tokens are those ``at`` of these."""
        assert isinstance(block.columns, slice)
        self.columns = block.columns
        block.gradient(upstream, grads, self.memory[at, : block.width])

    def add_gradients(self, part_of: Callable[[slice], Target], rows: slice, grads: Gradients) -> Tensor | None:
        """As a block's, of all tokens."""
        part = part_of(rows)
        weights = part.head.weights
        grad = self.memory[:, : _width(self.columns)]
        weights.add_gradients(grads, grad, part.hidden, self.columns)
        return weights.hidden_gradient(grad, self.columns) if self.plan.hidden else None


def statistics_by_columns(part: Target, asked: tuple[Statistic, ...], plan: Plan) -> dict[str, Tensor]:
    """Kernels' statistics of tokens from tiles of columns, as those of ranks are merged: their logits never exist
    together."""
    names = {s.name for s in asked}
    names |= {"max_logit"} if "argmax" in names else set()
    count, size = part.head.weights.columns, plan.products.columns
    parts = list[dict[str, Tensor]]()
    sizes = list[int]()
    for start in range(0, count, size):
        columns = slice(start, min(start + size, count))
        tile = Block.of(part, asked, plan, {}, columns)
        values = softmax_statistics(tile.z, tile._label(0), frozenset(names), tile.epilogue, **plan.of_kernels)
        if "logp" in values:
            values["logp"] = rows.of_label_here(values["logp"], tile.label_here)
        parts.append(values)
        sizes.append(columns.stop - start)
        del tile
    stacked = {name: torch.stack([part[name] for part in parts]) for name in {"lse", *names}}
    return merge(stacked, sizes, part.class_weight, backend=plan.backend)


# --- Projections ----------------------------------------------------------------------------------------------------


def _columns(part: Target, asked: tuple[Statistic, ...], columns: slice) -> Columns:
    """The columns of a block: those asked for; of a divergence alone, those that both models have."""
    if part.kept is not None:
        return part.head.ranks.local(part.kept.clamp(min=0))[0]
    count = part.head.weights.columns
    if part.teacher is not None and not ({s.name for s in asked} & _OF_ALL or any(s.phi for s in asked)):
        count = min(count, max(part.teacher.vocab_size - part.head.ranks.first, 0))
    start, stop, _ = columns.indices(count)
    return slice(start, max(stop, start))


def _width(columns: Columns) -> int:
    return columns.stop - columns.start if isinstance(columns, slice) else columns.shape[1]


def _finished(part: Target, weights: Weights, out: Tensor, ids: Tensor) -> Tensor:
    """Logits ``[R, K]`` at temperature 1 of columns of each token, into ``out``."""
    weights.logits(out, part.hidden, ids)
    logits = part.transform(1.0)(out, part.head.local_bias(ids))
    return out if logits is out else out.copy_(logits)


def planned(call: Signature) -> Plan:
    """The core's plan, which serves every call."""
    return by_blocks(call, "core", Block.of, row_bytes(call), Collected)


#: The first that serves a call plans it: accelerators, a folder that the core does not know, put theirs before the
#: core's when they are imported.
PLANNERS: list[Planner] = [planned]
