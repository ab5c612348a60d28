"""The report of :func:`liger_losses.patch`: which modules of a model were replaced, and why others were not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

#: The reason of a piece for which the user's filter returned False.
LEFT_OUT = "left out by filter_fn"


@dataclass(frozen=True)
class Entry:
    """One piece of a model.

    Attributes:
        path: the module's name in the model.
        class_name: the module's class.
        replaced_by: what computes it now, or ``None`` if it was left as it is.
        reason: why it was left.
    """

    path: str
    class_name: str
    replaced_by: str | None = None
    reason: str = ""


@dataclass
class PatchReport:
    """The modules of a model that could be replaced. Prints as a table, with one line for equal modules of all layers.

    Attributes:
        entries: one :class:`Entry` per module, in the order of the model.
        unchanged: whether all modules had already been replaced by an earlier call.
    """

    entries: list[Entry] = field(default_factory=list)
    unchanged: bool = False

    @property
    def replaced(self) -> list[Entry]:
        """The modules that were replaced."""
        return [entry for entry in self.entries if entry.replaced_by is not None]

    @property
    def left(self) -> list[Entry]:
        """The modules that were left as they are, with the reason."""
        return [entry for entry in self.entries if entry.replaced_by is None]

    @property
    def counts(self) -> dict[str, int]:
        """The number of modules per replacement; under ``left``, the number of modules that were not replaced."""
        counts = Counter(entry.replaced_by for entry in self.entries if entry.replaced_by is not None)
        return dict(counts) | ({"left": len(self.left)} if self.left else {})

    def __str__(self) -> str:
        groups = Counter(
            (re.sub(r"\b\d+\b", "*", entry.path), entry.class_name, entry.replaced_by or "-", entry.reason)
            for entry in self.entries
        )
        rows = [(path, kind, str(count), by, reason) for (path, kind, by, reason), count in groups.items()]
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        summary = f"{len(self.replaced)} of {len(self.entries)} modules replaced" + (f": {counts}" if counts else "")
        table = [("module", "class", "count", "replaced by", "reason"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        again = ["already patched; nothing was changed"] if self.unchanged and self.replaced else []
        return "\n".join([*map(str.rstrip, lines), summary, *again])
