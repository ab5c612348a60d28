"""Gradients of logits that the product computes again, against float64."""

import itertools

import pytest
import torch

from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.kernels.cases import DEVICE, HALF, SIZES, doubled, head
from tests.reference import NAMES


@SIZES
@HALF
@pytest.mark.usefixtures("loads")
def test_gradients_without_logits(tokens, hidden_size, columns, dtype):
    hidden, weight, labels, bias, c = head(tokens, hidden_size, columns, dtype)
    hidden = hidden / 4
    for epilogue in (Epilogue(), Epilogue(LogitTransform(0.7, 1.2, 8.0), bias, c)):
        wide = doubled(epilogue)
        projected = hidden.double() @ weight.double().t()
        values = softmax_statistics(projected, labels, frozenset(STATISTICS), wide)
        for names in (("logp",), NAMES):
            g = {name: torch.linspace(0.5, 1.5, tokens, device=DEVICE) * (i + 1) for i, name in enumerate(names)}
            table = SoftmaxGradient.of(g, {k: v.float() for k, v in values.items()}, epilogue.class_weight)
            exact = torch.empty(tokens, columns, dtype=torch.float64, device=DEVICE)
            softmax_gradient_into(
                exact,
                projected.clone(),
                values["lse"],
                labels,
                SoftmaxGradient.of({k: v.double() for k, v in g.items()}, values, wide.class_weight),
                wide,
                backend="torch",
            )
            for start, stop in itertools.pairwise([0, columns // 3, columns]):
                for backend in ("torch", "triton"):
                    out = torch.full((tokens, stop - start + 5), float("nan"), dtype=dtype, device=DEVICE)
                    out = linear_softmax_gradient_into(
                        out[:, : stop - start],
                        hidden,
                        weight[start:stop],
                        values["lse"].float(),
                        labels,
                        table,
                        epilogue.columns(slice(start, stop)),
                        first_column=start,
                        vocab_size=columns,
                        backend=backend,
                    )
                    eps = torch.finfo(dtype).eps
                    torch.testing.assert_close(out.double(), exact[:, start:stop], rtol=eps, atol=3e-5)
