"""Hidden states, a head and labels must fit together."""

import pytest
import torch

from liger_losses import linear_logps
from liger_losses.layers.rms_norm import rms_norm
from tests.losses import CE
from tests.reference import problem

WRONG = [
    ("transposed weight", lambda h, w, y: (h, w.t(), y), ValueError, r"hidden_states must be \[..., 61\]"),
    ("weight of another model", lambda h, w, y: (h, w[:, :-1], y), ValueError, r"\[vocab_size, hidden_size\]"),
    ("unshifted labels", lambda h, w, y: (h[:, :-1], w, y), ValueError, "Shorten neither: with shift=True"),
    ("flat labels", lambda h, w, y: (h, w, y.flatten()), ValueError, r"Give both flat, or both \[4, 5\]"),
    ("flat hidden states", lambda h, w, y: (h.flatten(0, 1), w, y), ValueError, r"Give both flat, or both \[4, 5\]"),
    ("float labels", lambda h, w, y: (h, w, y.float()), TypeError, r"int64 token ids.*\.long\(\)"),
    ("int32 labels", lambda h, w, y: (h, w, y.int()), TypeError, "int64"),
    ("integer hidden states", lambda h, w, y: (y[..., None].expand(4, 5, 24), w, y), TypeError, "token ids go into"),
    (
        "mixed dtypes",
        lambda h, w, y: (h.bfloat16(), w, y),
        TypeError,
        "hidden_states torch.bfloat16, weight torch.float32.*cast",
    ),
    ("label too large", lambda h, w, y: (h, w, y.masked_fill(y == -100, 61)), ValueError, r"\[0, 61\).*to 61"),
    ("negative label", lambda h, w, y: (h, w, y.masked_fill(y == -100, -1)), ValueError, "from -1"),
    ("1-d weight", lambda h, w, y: (h, w[0], y), ValueError, "weight must be"),
    ("lists", lambda h, w, y: (h, w, y.tolist()), TypeError, r"got list; pass torch.tensor\(labels\)"),
    ("a list of ids", lambda h, w, y: (h[:, 0], w, y[:, 0].tolist()), TypeError, r"got list; pass torch.tensor"),
    ("one token", lambda h, w, y: (h[0, 0], w, y[0, 0]), ValueError, r"pass hidden_states\[None\].*\[1, 24\].*labels"),
    ("another device", lambda h, w, y: (h, w, y.to("meta")), ValueError, "on one device"),
]


@pytest.mark.parametrize(("change", "error", "message"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_inputs_that_do_not_fit_together(change, error, message):
    inputs = change(*problem(shape=(4, 5), masked=0.2)[:3])
    with pytest.raises(error, match=message):
        if isinstance(inputs[2], list):
            CE()(inputs[1], inputs[0], inputs[2])
        linear_logps(*inputs)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: CE()(x.new_ones(5, 4), x, torch.ones(3, dtype=torch.int64)),
        lambda x: linear_logps(x, x.new_ones(5, 4), torch.ones(3, dtype=torch.int64)).sum(),
        lambda x: rms_norm(x, None).sum(),
    ],
)
def test_functional_transforms_say_that_they_are_not_supported(transform, function):
    inputs = torch.ones(3, 4) if transform is not torch.func.vmap else torch.ones(2, 3, 4)
    with pytest.raises(RuntimeError, match="torch.autograd.grad, called for one"):
        transform(function)(inputs)
