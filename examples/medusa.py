"""Train Medusa heads on a frozen model, and count how many of their tokens it accepts: a plain loop, no trainer.

Head k is a residual block on the model's last hidden states, followed by the model's frozen ``lm_head``
(``--own-heads`` trains a separate ``lm_head`` for each). It predicts the token k + 1 positions after the token that the
model predicts. One call of the loss computes all heads (Medusa, arXiv:2401.10774). Prints the losses of every step, and
how many tokens a step of greedy decoding yields before and after training: the model's token, and the heads' tokens up
to the first one that the model would not have chosen.

    python examples/medusa.py
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_dpo import BUNDLED, HERE, prepare_model

from liger_losses import LigerFusedLinearCrossEntropyLoss


class ResidualBlock(nn.Module):
    """``x + silu(W x)``, at first the identity."""

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden):
        return hidden + F.silu(self.linear(hidden))


def hidden_states(model, rows, device):
    """The frozen model's hidden states ``[B, T, H]`` and labels ``[B, T]`` of encoded rows."""
    ids = pad_sequence(rows, batch_first=True).to(device)
    labels = pad_sequence(rows, batch_first=True, padding_value=-100).to(device)
    # Padding is on the right, where causal attention never looks at it.
    with torch.no_grad():
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state, labels


@torch.no_grad()
def tokens_per_step(model, blocks, heads, continuations):
    """Tokens that a step of decoding yields, over greedy continuations ``(ids, length of the prompt)``.

    What the model chooses without heads is known, so that decoding with them need not run: one forward has the guesses
    of all positions.
    """
    steps = tokens = 0
    for ids, start in continuations:
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        guesses = [F.linear(block(hidden), head.weight).argmax(-1) for block, head in zip(blocks, heads, strict=True)]
        at = start - 1  # the last token that is decided
        while at + 1 < len(ids):
            rest = ids[at + 2 : at + 2 + len(guesses)]
            right = [bool(guess[at] == token) for guess, token in zip(guesses, rest, strict=False)]
            at += 1 + (right.index(False) if False in right else len(right))
            steps += 1
        tokens += len(ids) - start
    return tokens / max(steps, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--dataset", default=str(HERE / "data" / "preferences.jsonl"))
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--own-heads", action="store_true", help="an lm_head for each, trained, from the model's own")
    parser.add_argument("--decay", type=float, default=0.8, help="head k's loss has the weight decay ** k")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts to decode")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--output", default="runs/medusa")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = prepare_model(args.model, pathlib.Path(args.output) / "start")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval().requires_grad_(False)
    lm_head = model.get_output_embeddings()

    pairs = [json.loads(line) for line in pathlib.Path(args.dataset).read_text(encoding="utf-8").splitlines()]
    pairs, held_out = pairs[: -args.prompts], pairs[-args.prompts :]
    texts = [
        tokenizer.apply_chat_template([*pair["prompt"], *pair[side]], tokenize=False)
        for side in ("chosen", "rejected")
        for pair in pairs
    ]
    rows = [torch.tensor(tokenizer(text).input_ids[: args.max_length]) for text in texts]
    if args.batch_size > len(rows):
        raise SystemExit(f"--batch-size: there are {len(rows)} texts to train on.")
    continuations = []
    for pair in held_out:
        prompt = tokenizer.apply_chat_template(pair["prompt"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        mask = torch.ones_like(prompt)
        ids = model.generate(prompt, attention_mask=mask, max_new_tokens=args.new_tokens, do_sample=False)[0]
        continuations.append((ids, prompt.shape[1]))

    blocks = nn.ModuleList(ResidualBlock(lm_head.weight.shape[1]) for _ in range(args.heads)).to(device)
    heads = [lm_head] * args.heads
    if args.own_heads:
        vocab_size, size = lm_head.weight.shape
        heads = [nn.Linear(size, vocab_size, bias=False, device=device) for _ in range(args.heads)]
        for head in heads:
            head.weight = nn.Parameter(lm_head.weight.clone())
    trained = [*blocks.parameters(), *(p for head in heads for p in head.parameters() if p.requires_grad)]
    before = tokens_per_step(model, blocks, heads, continuations)

    # The model predicts the token at t + 1, head 0 the one at t + 2.
    shift, weights = [k + 2 for k in range(args.heads)], [args.decay**k for k in range(args.heads)]
    loss_function = LigerFusedLinearCrossEntropyLoss(shift=shift, head_weights=weights, return_token_accuracy=True)
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    for step in range(args.steps):
        start = step * args.batch_size % (len(rows) - args.batch_size + 1)
        hidden, labels = hidden_states(model, rows[start : start + args.batch_size], device)
        loss, metrics = loss_function(heads, [block(hidden) for block in blocks], labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        each = ", ".join(f"{value:.3f}" for value in metrics.losses.tolist())
        assert metrics.token_accuracies is not None  # the loss was built with return_token_accuracy
        right = ", ".join(f"{value:.0%}" for value in metrics.token_accuracies.tolist())
        print(f"step {step + 1:3}  loss {loss.item():.4f}  of each head {each}  right {right}", flush=True)

    after = tokens_per_step(model, blocks, heads, continuations)
    print(f"tokens per step of decoding: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
