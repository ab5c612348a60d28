"""What is read from, and added to, the head's rows of labels."""

import pytest
import torch

from liger_losses.kernels.label_rows import (
    MOST_COMPARED,
    add_to_label_rows_,
    label_logits,
    masked_labels,
    scale_and_add_label_rows,
)
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.reading import label_facts, place_weights
from tests.kernels.cases import DEVICE, HALF, head


def test_what_the_host_must_know_of_labels():
    torch.manual_seed(0)
    parts = [torch.randint(0, 50, (n,), device=DEVICE) for n in (5000, 0, 3, 2048)]
    parts[0][::3] = -100
    parts[2][:] = -100
    parts[3][7], parts[3][9] = -5, 2**40  # outside of any vocabulary
    for ignore_index in (-100, 7, 2**40):
        expected, place = [], 0
        for part in parts:
            labels = part.tolist()
            active = [label for label in labels if label != ignore_index]
            weights = place_weights(place, len(part), part.device).tolist()
            total = sum((label + 1) * weight for label, weight in zip(labels, weights, strict=True))
            total = (total + 2**63) % 2**64 - 2**63
            expected.append([len(active), min([*active, 0]), max([*active, 0]), total])
            place += len(part)
        for backend in ("torch", "triton"):
            assert label_facts(parts, ignore_index, backend=backend).tolist() == expected


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("wrong", "right"), [(None, True), (-1, False), (70, False)])
def test_labels_of_calls_that_drop_no_token(backend, wrong, right):
    labels = torch.arange(5000, device=DEVICE) % 70
    labels[[3, 4000]] = -100
    expected, ignored = labels.clamp(min=0), labels == -100
    if wrong is not None:
        labels[4500], expected[4500] = wrong, 0
    safe, found, shares, whether = masked_labels(labels, -100, 70, backend=backend)
    assert torch.equal(safe, expected)
    assert torch.equal(found, ignored)
    assert torch.equal(shares, (~ignored).float() / 4998)
    assert whether.item() == right
    assert masked_labels(labels[:0], -100, 70, backend=backend)[-1]
    assert not masked_labels(labels[3:4], -100, 70, backend=backend)[2]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_labels_in_another_order_have_another_checksum(backend):
    labels = torch.randint(0, 50, (4096,), device=DEVICE)
    labels[:4] = torch.tensor([1, 0, 0, 1])

    def checksum(order):
        return int(label_facts([labels[order]], -100, backend=backend)[0, 3])

    whole = torch.arange(4096, device=DEVICE)
    for distance in (1, 2, 1009, 1024, 2018, 2048):
        changed = whole.roll(distance)
        if not torch.equal(labels[changed], labels):
            assert checksum(changed) != checksum(whole)
        labels[100 + distance] = labels[100] + 1
        swapped = whole.clone()
        swapped[[100, 100 + distance]] = swapped[[100 + distance, 100]]
        assert checksum(swapped) != checksum(whole)
    balanced = whole.clone()
    balanced[:4] = torch.tensor([1, 0, 3, 2])  # labels 0, 1, 1, 0: sums with weights that are linear in t are equal
    assert checksum(balanced) != checksum(whole)


@HALF
@pytest.mark.parametrize(("tokens", "hidden_size", "columns"), [(1, 5, 3), (40, 70, 6), (9, 1030, 50)])
def test_label_rows(backend, tokens, hidden_size, columns, dtype, monkeypatch):
    hidden, weight, labels, _, _ = head(tokens, hidden_size, columns, dtype)
    scale, coef = torch.linspace(-1, 1, 2 * tokens, device=DEVICE).split(tokens)
    bias = torch.linspace(-1, 1, columns, device=DEVICE)
    for transform, b in ((LogitTransform(), None), (LogitTransform(0.7, 1.2, 8.0), bias)):
        projected = (hidden.double() * weight.double()[labels]).sum(-1)
        exact = transform(projected, None if b is None else b.double()[labels])
        found = label_logits(hidden, weight, labels, Epilogue(transform, b), backend=backend)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)

    out = torch.randn(tokens, hidden_size, device=DEVICE)
    exact = scale.double()[:, None] * out.double() + coef.double()[:, None] * weight.double()[labels]
    for out_dtype in (torch.float32, dtype):
        wide = torch.full((tokens, hidden_size + 3), float("nan"), dtype=out_dtype, device=DEVICE)[:, :hidden_size]
        scale_and_add_label_rows(wide, out, scale, coef, weight, labels, backend=backend)
        torch.testing.assert_close(wide.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=1e-5)

    rows = torch.arange(tokens, device=DEVICE).flip(0)
    for most, of_rows in ((MOST_COMPARED, None), (MOST_COMPARED, rows), (0, None), (0, rows)):
        monkeypatch.setattr("liger_losses.kernels.label_rows.MOST_COMPARED", most)
        grad, coef[::3] = weight.clone(), 0.0
        own = hidden if of_rows is None else hidden[of_rows]
        exact = weight.double().index_add(0, labels, coef.double()[:, None] * own.double())
        add_to_label_rows_(grad, labels, coef, hidden, of_rows, backend=backend)
        torch.testing.assert_close(grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
