"""What the host reads of labels."""

import pytest
import torch

from liger_losses.kernels.reading import label_facts, place_weights
from tests.kernels.cases import DEVICE


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
