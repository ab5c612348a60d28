"""The examples do what the README says of them."""

import copy
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_custom_loss_runs(capsys):
    load("custom_loss").main()
    printed = capsys.readouterr().out
    assert "Cal-DPO" in printed
    assert "nan" not in printed


def test_the_shipped_pairs_are_well_formed():
    rows = [json.loads(line) for line in (EXAMPLES / "data" / "preferences.jsonl").read_text().splitlines()]
    assert len(rows) >= 200
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"prompt", "chosen", "rejected"}
        for side, role in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")):
            (message,) = row[side]
            assert message["role"] == role
            assert message["content"].strip()
        assert row["chosen"] != row["rejected"]


@pytest.fixture(scope="module")
def dpo():
    pytest.importorskip("trl", reason="TRL is not installed")
    return load("dpo")


def tiny_model():
    """A random model, its tokenizer, and a function that makes texts for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"word{i}" for i in range(16)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    g = torch.Generator().manual_seed(0)

    def text(length):
        return " " + " ".join(words[i] for i in torch.randint(0, len(words), (length,), generator=g).tolist())

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )
    return model, tokenizer, text


def train(dpo, trainer_class, output, **options):
    """A few steps on a tiny random model; what TRL logged of each, and the trained weights."""
    from datasets import Dataset

    model, tokenizer, text = tiny_model()
    pairs = Dataset.from_list(
        [{"prompt": text(3), "chosen": text(2 + i % 5), "rejected": text(1 + i % 4)} for i in range(24)]
    )
    config = dpo.DPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **options,
    )
    reference = None if config.precompute_ref_log_probs else copy.deepcopy(model)
    trainer = trainer_class(
        model=model, ref_model=reference, args=config, train_dataset=pairs, processing_class=tokenizer
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], model.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"precompute_ref_log_probs": True},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["ipo"], "beta": 0.5},
        {"ld_alpha": 0.4, "f_divergence_type": "js_divergence"},
        {"ld_alpha": 0.4, "precompute_ref_log_probs": True},
        {"use_weighting": True, "precompute_ref_log_probs": True},
    ],
    ids=str,
)
def test_dpo_training_equals_plain_trl(dpo, tmp_path, options):
    plain, plain_weights = train(dpo, dpo.DPOTrainer, tmp_path / "plain", **options)
    ours, weights = train(dpo, dpo.ChunkedDPOTrainer, tmp_path / "ours", **options)
    assert len(ours) == len(plain) == 6
    assert plain[0]["loss"] != plain[-1]["loss"]
    for a, b in zip(ours, plain, strict=True):
        for key in ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "logps/rejected"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, plain_weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ('{"text": "a"}\n', "no column chosen, rejected"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "too few to hold out 4"),
    ],
)
def test_a_bad_dataset_is_refused_before_any_work(dpo, tmp_path, content, message):
    path = tmp_path / "pairs.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        dpo.load_pairs(str(path), 4, 4)


def test_the_demo_explains_itself():
    pytest.importorskip("trl", reason="TRL is not installed")
    done = subprocess.run([sys.executable, str(EXAMPLES / "dpo.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--model" in done.stdout
    assert "--dataset" in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("kto", ["--steps", "2", "--batch-size", "4"], "mean reward of held-out completions"),
        ("distill", ["--steps", "2", "--batch-size", "4", "--layers", "2"], "student's perplexity of held-out text"),
        ("grpo", ["--steps", "2", "--group", "2", "--new-tokens", "4"], "mean reward of the first three steps"),
        ("grpo", ["--steps", "1", "--group", "2", "--new-tokens", "4", "--loss-type", "grpo"], "step   1"),
    ],
)
def test_the_loops_run(dpo, tmp_path, name, arguments, expected):
    model, tokenizer, text = tiny_model()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {side: [{"role": "user", "content": text(3 + i % 3)}] for side in ("prompt", "chosen", "rejected")}
        for i in range(24)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    common = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    dataset = ["--dataset", str(data)] if name in ("kto", "distill") else []
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *common, *dataset, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout
    assert "nan" not in done.stdout
