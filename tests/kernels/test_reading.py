"""What the host reads of labels."""

import torch

from liger_losses.kernels.reading import label_facts
from tests.kernels.cases import DEVICE


def test_what_the_host_must_know_of_labels():
    torch.manual_seed(0)
    parts = [torch.randint(0, 50, (n,), device=DEVICE) for n in (5000, 0, 3, 2048)]
    parts[0][::3] = -100
    parts[2][:] = -100
    parts[3][7], parts[3][9] = -5, 2**40  # outside of any vocabulary
    for ignore_index in (-100, 7, 2**40):
        expected = []
        for part in parts:
            labels = part.tolist()
            active = [label for label in labels if label != ignore_index]
            expected.append([len(active), min([*active, 0]), max([*active, 0])])
        for backend in ("torch", "triton"):
            assert label_facts(parts, ignore_index, backend=backend).tolist() == expected
