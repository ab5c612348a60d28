"""Train on several answers to each question, with the prompt computed once for all of them, and with repeated prompts.

A small model of bytes learns with GRPO's loss to tell which of some answers belongs to a question, behind a prompt of
other questions and answers (``data/preferences.jsonl``). Two copies take the same steps, one each way. It prints the
tokens and seconds of both, and how much likelier the right answer's bytes are than those of the others: the same.

    python examples/prompts_once.py
    python examples/prompts_once.py --shots 4 --answers 4
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import random
import time

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from liger_losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearGRPOLoss,
    LossInputs,
    PackedCompletions,
    loss_inputs,
    pack_completions,
)

DATA = pathlib.Path(__file__).parent / "data" / "preferences.jsonl"


def batches(shots: int, answers: int) -> list[tuple[list[int], list[list[int]]]]:
    """Prompts of some questions with answers and a last question, and answers to it, of which the first is right."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    texts = [(row["prompt"][0]["content"], row["chosen"][0]["content"]) for row in rows]
    drawn = random.Random(0)
    groups = []
    for question, answer in drawn.sample(texts, len(texts)):
        shown = "".join(f"Q: {q}\nA: {a}\n" for q, a in drawn.sample(texts, shots))
        others = [a for _, a in drawn.sample(texts, answers)]
        prompt = f"{shown}Q: {question}\nA: "
        groups.append((list(prompt.encode()), [list(f"{a}\n".encode()) for a in [answer, *others][:answers]]))
    return groups


def repeated_inputs(model: nn.Module, prompt: list[int], completions: list[list[int]]) -> tuple[LossInputs, int]:
    """The arguments of a loss, from each completion behind a copy of the prompt; and the number of tokens."""
    rows = [torch.tensor(prompt + completion) for completion in completions]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places, lengths = torch.arange(ids.shape[1]), torch.tensor([len(row) for row in rows])[:, None]
    labels = ids.where((places >= len(prompt)) & (places < lengths), -100)
    inputs = loss_inputs(model, input_ids=ids, attention_mask=places < lengths, labels=labels)
    behind = len(prompt) - 1  # what predicts the first token of the completions
    return inputs._replace(
        hidden_states=inputs.hidden_states[:, behind:], labels=inputs.labels[:, behind:]
    ), ids.numel()


def shared_inputs(model: nn.Module, prompt: list[int], completions: list[list[int]]) -> tuple[LossInputs, int]:
    """The same with the prompt computed once."""
    packed: PackedCompletions = pack_completions([prompt], completions, groups=[0] * len(completions))
    return loss_inputs(model, packed), packed.tokens


def loss_of(inputs: LossInputs) -> tuple[Tensor, float]:
    """GRPO's loss, with a reward of 1 for the right answer, and the right answer's cross-entropy; and the margin, in
    nats per byte: how much likelier the right answer is than the others."""
    head, hidden_states, labels = inputs
    rewards = torch.zeros(len(labels))
    rewards[0] = 1.0
    advantages, counts = (rewards - rewards.mean()) / rewards.std(), labels != -100
    policy, _ = LigerFusedLinearGRPOLoss(beta=0.0)(hidden_states, head, labels.clamp(min=0), counts, advantages)
    cross_entropy = LigerFusedLinearCrossEntropyLoss()
    likely = cross_entropy(head, hidden_states[:1], labels[:1])
    with torch.no_grad():
        margin = cross_entropy(head, hidden_states[1:], labels[1:]) - likely
    return likely + 0.1 * policy, float(margin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=3, help="questions with answers before the last question")
    parser.add_argument("--answers", type=int, default=8, help="answers of each prompt")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=256)
    args = parser.parse_args()
    if args.answers < 2:
        raise SystemExit("--answers: answers are compared with one another; give at least 2.")
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden_size, "intermediate_size": 3 * args.hidden_size, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=8192, **sizes)
    model = LlamaForCausalLM(config).train()
    ways = {"repeated": (repeated_inputs, copy.deepcopy(model)), "shared": (shared_inputs, model)}
    optimizers = {way: torch.optim.AdamW(one.parameters(), lr=1e-3) for way, (_, one) in ways.items()}
    tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for step, batch in enumerate(batches(args.shots, args.answers)[: args.steps]):
        texts = {}
        for way, (inputs_of, one) in ways.items():
            start = time.perf_counter()
            inputs, count = inputs_of(one, *batch)
            loss, margin = loss_of(inputs)
            loss.backward()
            optimizers[way].step()
            optimizers[way].zero_grad()
            seconds[way] += time.perf_counter() - start
            tokens[way] += count
            texts[way] = f"loss {loss.item():.5f}, margin {margin:+.4f}"
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step}  " + "   ".join(f"{way}: {text}" for way, text in texts.items()), flush=True)
    for way in ways:
        print(f"{way}: {tokens[way]} tokens, {seconds[way]:.1f} s")
    ratios = [of["repeated"] / of["shared"] for of in (tokens, seconds)]
    print(f"shared prompts: {ratios[0]:.2f} times fewer tokens, {ratios[1]:.2f} times as fast")


if __name__ == "__main__":
    main()
