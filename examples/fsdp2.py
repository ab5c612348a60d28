"""Train with DPO on several GPUs (NCCL) or CPU processes (gloo) with FSDP2 (`fully_shard`): a plain loop, no trainer.

    torchrun --nproc-per-node 2 examples/fsdp2.py  # a tiny random model on made-up pairs
    torchrun --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen2.5-1.5B-Instruct --learning-rate 1e-6

Each process takes its share of every batch. The head of the model belongs to the root's unit of `fully_shard`, and the
loss is computed in the root's forward, while the head's weight is gathered. Logits are never materialized. Prints the
mean loss of every step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from liger_losses import LigerFusedLinearDPOLoss, linear_logps, loss_inputs, patch

HERE = pathlib.Path(__file__).parent


class Policy(nn.Module):
    """A causal language model whose forward returns the DPO loss."""

    def __init__(self, model, beta):
        super().__init__()
        self.model = model
        self.loss = LigerFusedLinearDPOLoss(beta=beta)

    def forward(self, ids, labels, ref_logps=None):
        """The loss of chosen rows, then rejected ones; without ``ref_logps [B]``, the log-probabilities ``[B]``."""
        head, hidden_states, labels = loss_inputs(self.model, input_ids=ids, labels=labels, use_cache=False)
        if ref_logps is None:
            return linear_logps(hidden_states, head, labels).sum(-1)
        chosen, rejected = ref_logps.chunk(2)
        return self.loss(head, hidden_states, labels, ref_chosen_logps=chosen, ref_rejected_logps=rejected)[0]


def shard(policy, gpu):
    """A unit of ``fully_shard`` for each decoder layer, and one for embedding, last norm and head."""
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gpu else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the reference's log-probabilities stay fp32
    )
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(policy, mp_policy=precision)


def made_up_pairs(count, vocab_size):
    """Ids and labels of chosen and rejected completions; chosen ones have the smaller ids."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for i in range(count):
        prompt = torch.randint(vocab_size, (5,), generator=generator)
        low, high = (torch.randint(vocab_size // 2, (6 + i % 5,), generator=generator) for _ in range(2))
        sides = [torch.cat([prompt, part]) for part in (low, high + vocab_size // 2)]
        pairs.append([(ids, ids.masked_fill(torch.arange(len(ids)) < 5, -100)) for ids in sides])
    return pairs


def encoded_pairs(path, tokenizer, max_length):
    """The same of a JSONL file of preference pairs, in conversations."""
    pairs = []
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        row, sides = json.loads(line), []
        start = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for side in ("chosen", "rejected"):
            whole = tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=False)
            ids = torch.tensor(whole[:max_length])
            sides.append((ids, ids.masked_fill(torch.arange(len(ids)) < len(start), -100)))
        pairs.append(sides)
    return pairs


def batches_of(pairs, args, device):
    """This process's part of each step's batch: ids and labels ``[2 B, T]``, chosen rows first, padded on the right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(args.steps):
        first = (step * world + rank) * args.batch_size
        batch = [pairs[i % len(pairs)] for i in range(first, first + args.batch_size)]
        rows = [pair[side] for side in (0, 1) for pair in batch]
        ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
        labels = pad_sequence([labels for _, labels in rows], batch_first=True, padding_value=-100)
        yield ids.to(device), labels.to(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the hub, or a path; a tiny random one by default")
    parser.add_argument("--dataset", default=str(HERE / "data" / "preferences.jsonl"), help="pairs for --model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="pairs of each process in a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--output", help="a directory to save the trained model in")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("Start this with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    torch.manual_seed(0)  # the same weights in all processes
    if args.model is None:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        model, pairs = AutoModelForCausalLM.from_config(config), made_up_pairs(64, config.vocab_size)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        pairs = encoded_pairs(args.dataset, AutoTokenizer.from_pretrained(args.model), args.max_length)
    patch(model, loss_head=False)  # norms, MLPs, rotary embeddings; the loss gets the hidden states
    policy = Policy(model.train(), args.beta)
    shard(policy, gpu)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate)

    batches = list(batches_of(pairs, args, device))
    with torch.no_grad():  # the reference is the model before training
        references = [policy(*batch) for batch in batches]
    for step, (batch, ref_logps) in enumerate(zip(batches, references, strict=True), 1):
        loss = policy(*batch, ref_logps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    if args.output:
        state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            model.save_pretrained(
                args.output, state_dict={name.removeprefix("model."): value for name, value in state.items()}
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
