"""Where tokens of a packed row stand, in which positions, and what predicts them."""

import pytest
import torch

from liger_losses import pack_completions, pack_sequences
from tests.prompts.packed import drawn

PROMPTS, COMPLETIONS, GROUPS = [[5, 6, 7], [8], []], [[11, 12], [21], [13], [], [31, 32]], [0, 1, 0, 1, 2]


def test_a_row_has_each_prompt_once_before_its_completions():
    packed = pack_completions(PROMPTS, COMPLETIONS, groups=GROUPS)
    assert packed.input_ids[0, :10].tolist() == [5, 6, 7, 11, 12, 13, 8, 21, 31, 32]
    assert packed.position_ids[0, :10].tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 0, 1]
    assert packed.starts[:11].tolist() == [0, 0, 0, 3, 3, 5, 6, 7, 8, 8, 10]
    assert packed.prompt_starts[:11].tolist() == [0, 0, 0, 0, 0, 0, 0, 6, 8, 8, 0]
    assert packed.prompt_ends[:11].tolist() == [0, 0, 0, 3, 3, 3, 0, 7, 8, 8, 0]
    assert packed.attention_mask[0].tolist() == [True] * 10 + [False] * 246
    assert packed.labels.tolist() == [[11, 12], [21, -100], [13, -100], [-100, -100], [-100, 32]]
    # The last token of a prompt predicts for all of its completions, and nothing predicts the first token of all.
    assert packed.index[packed.labels != -100].tolist() == [2, 3, 6, 2, 8]
    assert (packed.tokens, packed.separate_tokens) == (10, 3 + 2 + 1 + 1 + 3 + 1 + 1 + 2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_tensors_and_equal_prompts_are_packed_like_lists(side):
    """Each completion comes with its prompt, padded; equal prompts are found, also behind other padding."""
    prompts, completions, groups = drawn(0)

    def padded(rows, left):
        ids = torch.zeros(len(rows), max(map(len, rows)) + 2, dtype=torch.long)
        mask = ids.clone()
        for i, row in enumerate(rows):
            places = slice(ids.shape[1] - len(row), None) if left else slice(len(row))
            ids[i, places], mask[i, places] = torch.tensor(row, dtype=torch.long), 1
        return ids, mask

    (ids, mask), (c_ids, c_mask) = padded([prompts[g] for g in groups], side == "left"), padded(completions, False)
    packed = pack_completions(ids, c_ids, prompt_mask=mask, completion_mask=c_mask)
    labels = ids * 0 - 100, c_ids.where(c_mask != 0, -100)
    rows = pack_sequences(*(torch.cat(parts, 1) for parts in ((ids, c_ids), (mask, c_mask), labels)))
    expected = pack_completions(prompts, completions, groups=groups)
    assert packed.tokens == rows.tokens == expected.tokens
    counts = expected.labels != -100
    for found, start in ((packed, 0), (rows, ids.shape[1])):
        index, labels = (t[:, start : start + expected.labels.shape[1]] for t in (found.index, found.labels))
        assert torch.equal(labels, expected.labels)
        for name in ("input_ids", "position_ids"):  # of what predicts
            values, theirs = (getattr(p, name)[0] for p in (found, expected))
            assert torch.equal(values[index[counts]], theirs[expected.index[counts]])


def test_no_prompt_is_shared_by_groups_of_one():
    batch = torch.tensor([[3, 4, 5], [3, 4, 6]]), torch.ones(2, 3), torch.tensor([[-100, -100, 5], [-100, -100, 6]])
    assert pack_sequences(*batch).tokens == 4
    assert pack_sequences(*batch, share=False).tokens == 6


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[1]], [[2], [3]]), {}, "there are 1 prompts and 2 completions: give groups="),
        (([[1]], [[2], [3]]), {"groups": [0, 1]}, r"indices of 1 prompts, one for each completion, got \[0, 1\]"),
        (([[1]], [[2]]), {"labels": torch.zeros(1, 2)}, r"labels must be \[1, 1\], as the completions, got \[1, 2\]"),
        ((torch.ones(1, 2), [[2]]), {}, "prompts must be token ids .* got floating-point numbers"),
        (([1, 2], [[2]]), {}, r"a list with a list of token ids for each, got one of shape \[\]"),
        (([[1]], [[2]]), {"prompt_mask": torch.ones(1, 1)}, "or lists of ids without a mask"),
    ],
)
def test_what_does_not_fit_is_said(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        pack_completions(*arguments, **options)


def test_nothing_at_all_is_a_row_of_padding():
    packed = pack_completions([], [])
    assert packed.tokens == 0
    assert packed.labels.shape == packed.index.shape == (0, 0)
