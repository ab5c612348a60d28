"""TRL's trainers with image-text models, plain and enabled."""

import pytest
import torch

from tests.trl import trainers
from tests.trl.trainers import trl

IMAGE, SIDE, PATCH = "<image>", 8, 4


def processor():
    """Words and images for a tiny LLaVA; an image is a list of numbers, as Pillow need not be installed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self, tokenizer):
            self.tokenizer, self.chat_template, self.image_token = tokenizer, None, IMAGE

        def __call__(self, images=None, text=None, **options):
            rows = [text] if isinstance(text, str) else text
            rows = [row.replace(IMAGE, " ".join([IMAGE] * (SIDE // PATCH) ** 2)) for row in rows]
            batch = self.tokenizer(rows, **options)
            if images is not None:
                pixels = torch.tensor([image for one in images for image in (one or [])])
                batch["pixel_values"] = pixels.view(-1, 3, SIDE, SIDE)
            return batch

        def apply_chat_template(self, conversation, tokenize=True, **options):
            single = isinstance(conversation[0], dict)
            texts, images = [], []
            for row in [conversation] if single else conversation:
                contents = [m["content"] for m in row]
                contents = [[{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents]
                parts = [part for content in contents for part in content]
                texts.append(" ".join(IMAGE if part["type"] == "image" else part["text"] for part in parts))
                images.append([part["image"] for part in parts if part["type"] == "image"])
            if not tokenize:
                return texts[0] if single else texts
            names = ("padding", "padding_side", "return_tensors", "add_special_tokens")
            chosen = {name: options[name] for name in names if name in options}
            return self(images=images if any(images) else None, text=texts, **chosen)

        def save_pretrained(self, *arguments, **options):
            pass

        def batch_decode(self, *arguments, **options):
            return self.tokenizer.batch_decode(*arguments, **options)

    words = ["<pad>", "<eos>", "<unk>", IMAGE, *(f"word{i}" for i in range(16))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    return Processor(tokenizer)


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH),
            text_config=LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=20),
            image_token_index=3,
            image_seq_length=(SIDE // PATCH) ** 2,
            vision_feature_layer=-1,
        )
    )


def rows(text, *columns):
    g = torch.Generator().manual_seed(5)
    for i in range(8):
        row = {name: text(2 + (i + k) % 4).strip() for k, name in enumerate(columns)}
        messages = {name: [{"role": "assistant", "content": value}] for name, value in row.items()}
        yield {
            "prompt": [{"role": "user", "content": text(3).strip()}],
            **messages,
            "images": [torch.randn(3 * SIDE * SIDE, generator=g).tolist()],
        }


def with_images(build, *columns, **own):
    """The trainer of a builder for texts."""

    def built(output, _, __, text, **options):
        given = {**own, **options, "rows": list(rows(text, *columns))}
        return build(output, llava(), processor(), text, **given)

    return built


def completion_reward(completions, **kwargs):
    return trainers.reward([completion[0]["content"] for completion in completions])


def online(trainer, config, **own):
    return with_images(trainers.online(trainer, config), rewards=completion_reward, **own)


CASES = {
    "SFT": with_images(trainers.sft, "completion", max_length=None),
    "DPO": with_images(trainers.dpo, "chosen", "rejected", max_length=None),
    "KTO": with_images(trainers.kto, "completion", max_length=None),
    "GRPO": online(trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": online(trl.RLOOTrainer, trl.RLOOConfig),
}


@pytest.mark.parametrize(
    "name", ["SFT", "DPO", "GRPO", *(pytest.param(n, marks=pytest.mark.slow) for n in ("KTO", "RLOO"))]
)
def test_image_text_models(name, tmp_path):
    trainers.check_training(CASES[name], tmp_path)
