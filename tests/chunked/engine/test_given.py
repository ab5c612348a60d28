"""What ranks compare of a call: values, checksums of tensors, and the message that names what differs."""

import torch

from liger_losses.chunked.engine.agreement import Given, checksum, differences, given_to_loss, note, running
from tests.losses import CE


def test_a_checksum_depends_on_every_entry_and_its_place():
    for dtype in (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        values = (torch.arange(3000) % 7 == 0).to(dtype)
        whole = checksum(values)
        assert whole.dtype == torch.int64
        assert torch.equal(checksum(values.view(3, 1000).mT.contiguous().mT), whole)
        for i, j in ((0, 1), (0, 1009), (7, 1016 + 1009), (0, 2**11)):
            swapped = values.clone()
            swapped[[i, j]] = swapped[[j, i]]
            assert (checksum(swapped) == whole) == (values[i] == values[j])
        changed = values.clone()
        changed[2017] = changed[2017] == 0
        assert checksum(changed) != whole
    assert checksum(torch.zeros(0)) == 0


def test_differences_are_named_and_listed_by_rank():
    first, second = Given({"beta": 0.1, "shape": (2, 3)}), Given({"beta": 0.1, "shape": (2, 3)})

    def differ(*ranks):
        lines, sums = ([getattr(rank, name) for rank in ranks] for name in ("text", "checksums"))
        return differences(
            [text.splitlines() for text in lines], list(first.tensors), [[int(s) for s in each()] for each in sums]
        )

    for given, value in ((first, 1.0), (second, 2.0)):
        given.add("labels", torch.tensor([1, 2]))
        given.add("weights", torch.tensor([value, 3.0]))
        given.add("parts", [torch.tensor(1), None])
    assert first.text == second.text
    assert differ(first, second) == ("weights.\n  rank 0: weights: as rank 0's\n  rank 1: weights: not as rank 0's")
    second.add("beta", 0.2)
    second.add("kl", None)
    assert differ(first, second).startswith(
        "beta, kl, weights.\n  rank 0: beta: 0.1; kl: not given; weights: as rank 0's\n"
    )
    second.tensors, second.values = dict(first.tensors), first.values
    second.add("labels", torch.tensor([2, 1]))
    assert differ(first, second).startswith("labels. Where each rank has a batch")


def test_a_loss_notes_what_it_was_given():
    note(beta=torch.ones(()))  # outside of a loss's call, nothing is kept
    assert running.noted == ()
    assert given_to_loss().values == {}
    labels = torch.tensor([[3, -100]])
    running.loss = loss = CE(label_smoothing=0.1)
    try:
        sums = []
        for ignored in (7.0, float("nan")):
            note(labels, -100, token_weights=torch.tensor([[1.0, ignored]]), kl=None)
            given = given_to_loss()
            assert given.values["label_smoothing"] == 0.1
            assert given.values["kl"] is None
            sums.append(given.tensors["token_weights"]())
        assert sums[0] == sums[1]
        assert "token_weights" not in given_to_loss().values  # an exchange has compared them
        loss.rank = 3  # no option
        assert "rank" not in given_to_loss().values
    finally:
        running.loss, running.noted = None, ()
