"""Train with GRPO on a rule-based reward: a plain loop of sampling, scoring and one optimizer step, no trainer.

The reward is the share of a completion's words that begin with the letter s. Prints the mean reward of every step.

    python examples/grpo.py
    python examples/grpo.py --top-p 0.9  # the loss is over the columns that sampling keeps
"""

from __future__ import annotations

import argparse
import pathlib
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_dpo import BUNDLED, prepare_model

from liger_losses import LigerFusedLinearGRPOLoss, TokenSupport, loss_inputs

PROMPTS = (
    "Name some animals.",
    "Describe the sea.",
    "What do you see in a kitchen?",
    "Tell me about winter.",
)


def reward(text):
    """The share of words that begin with s; 0 without words."""
    words = [word for word in text.lower().split() if word[0].isalpha()]
    return sum(word[0] == "s" for word in words) / max(len(words), 1)


def kept_columns(scores):
    """What sampling kept of the vocabulary, from the scores ``[batch, vocab_size]`` of each step, -inf for the rest."""
    kept = (torch.stack(scores, 1) > -torch.inf).flatten(0, 1)
    counts = kept.sum(-1)
    return TokenSupport(kept.nonzero()[:, 1], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--loss-type", default="dapo")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--output", default="runs/grpo")
    args = parser.parse_args()
    if args.group < 2:
        raise SystemExit("--group: completions of a prompt are compared with one another; give at least 2.")
    torch.manual_seed(0)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = prepare_model(args.model, pathlib.Path(args.output) / "start")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS for _ in range(args.group)]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    width = prompts.input_ids.shape[1]

    loss_function = LigerFusedLinearGRPOLoss(beta=0.0, loss_type=args.loss_type, max_completion_length=args.new_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    rewards_of_steps, start = [], time.perf_counter()
    for step in range(args.steps):
        model.eval()
        with torch.no_grad():
            sampled = model.generate(
                **prompts,
                max_new_tokens=args.new_tokens,
                do_sample=True,
                top_k=0,
                top_p=args.top_p,
                temperature=1.0,
                pad_token_id=tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_scores=args.top_p < 1,
            )
        ids, support = sampled.sequences, kept_columns(sampled.scores) if args.top_p < 1 else None
        completions = ids[:, width:]
        ended = (completions == tokenizer.eos_token_id).cumsum(-1)
        mask = (ended - (completions == tokenizer.eos_token_id).long()) == 0  # up to and including the end
        rewards = torch.tensor([reward(text) for text in tokenizer.batch_decode(completions, skip_special_tokens=True)])
        groups = rewards.view(len(PROMPTS), args.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        model.train()
        attention = torch.cat([prompts.attention_mask, torch.ones_like(completions)], 1)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        head, hidden, _ = loss_inputs(
            model, input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False
        )
        # The state at one token predicts the next.
        loss, _ = loss_function(
            head,
            hidden[:, width - 1 : -1],
            completions,
            mask,
            advantages.to(device),
            support=support,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards_of_steps.append(rewards.mean().item())
        print(f"step {step + 1:3}  reward {rewards_of_steps[-1]:.3f}  loss {loss.item():+.4f}", flush=True)

    first, last = (sum(part) / len(part) for part in (rewards_of_steps[:3], rewards_of_steps[-3:]))
    print(
        f"mean reward of the first three steps {first:.3f}, of the last three {last:.3f}; "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
