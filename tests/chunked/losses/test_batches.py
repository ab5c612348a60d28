"""The batches that a loss remembers."""

import torch

from liger_losses.chunked.losses.batches import REMEMBERED, bits_of, find_batch, no_batches, with_batch


def test_batches_are_found_until_others_take_their_place():
    memory = no_batches(3)
    keys = [bits_of(torch.tensor([float(i), -0.5], dtype=torch.float64)) for i in range(REMEMBERED + 1)]
    assert not find_batch(memory, keys[0])[0]
    for i, key in enumerate(keys[:-1]):
        memory = with_batch(memory, torch.cat([key, torch.tensor([i])]), torch.tensor(True))
    for i, key in enumerate(keys[:-1]):
        again, rest = find_batch(memory, key)
        assert again
        assert rest.tolist() == [i]
    row = torch.cat([keys[-1], torch.tensor([7])])
    assert torch.equal(with_batch(memory, row, torch.tensor(False)), memory)
    memory = with_batch(memory, row, torch.tensor(True))
    assert [bool(find_batch(memory, key)[0]) for key in (keys[0], keys[1], keys[-1])] == [False, True, True]


def test_numbers_keep_their_bits():
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([0.1, -3.5, 0.0], dtype=dtype)
        assert bits_of(values).dtype == torch.int64
        assert len(set(bits_of(values).tolist())) == 3
    assert bits_of(values[:1]).view(torch.float64) == values[0]
