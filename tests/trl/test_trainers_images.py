"""TRL's trainers with image-text models, plain and enabled."""

import pytest
import torch

from tests.models import word_tokenizer
from tests.trl import trainers

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
SIDE, PATCH = 8, 4
TEMPLATE = (
    "{% for m in messages %}{% for c in ([{'text': m['content']}] if m['content'] is string else m['content']) %}"
    "{{ c['text'] or '<image>' }} {% endfor %}{% endfor %}"
)


def processor():
    """Words and images for a tiny LLaVA."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer = word_tokenizer("<image>", padding_side="left", extra_special_tokens={"image_token": "<image>"})
    pixels = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)
    sizes = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, **sizes)


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    vision = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH)
    language = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=20)
    images = {"image_token_index": 3, "image_seq_length": (SIDE // PATCH) ** 2, "vision_feature_layer": -1}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=language, **images))


def rows(text, *columns):
    g = torch.Generator().manual_seed(5)
    for i in range(8):
        row = {name: text(2 + (i + k) % 4).strip() for k, name in enumerate(columns)}
        messages = {name: [{"role": "assistant", "content": value}] for name, value in row.items()}
        messages["prompt"] = [{"role": "user", "content": text(3).strip()}]
        pixels = torch.randint(256, (SIDE, SIDE, 3), generator=g).byte()
        yield messages | {"images": [image.fromarray(pixels.numpy())]}


def with_images(build, *columns, **own):
    """The trainer of a builder for texts."""

    def built(output, _, __, text, **options):
        given = {**own, **options, "rows": list(rows(text, *columns))}
        return build(output, llava(), processor(), text, **given)

    return built


def completion_reward(completions, **kwargs):
    return trainers.reward([completion[0]["content"] for completion in completions])


CASES = {
    "SFT": with_images(trainers.sft, "completion", max_length=None),
    "DPO": with_images(trainers.dpo, "chosen", "rejected", max_length=None),
    "KTO": with_images(trainers.kto, "completion", max_length=None),
    "GRPO": with_images(trainers.grpo, rewards=completion_reward),
    "RLOO": with_images(trainers.rloo, rewards=completion_reward),
}


@pytest.mark.parametrize(
    "name", ["SFT", "DPO", "GRPO", *(pytest.param(n, marks=pytest.mark.slow) for n in ("KTO", "RLOO"))]
)
def test_image_text_models(name, tmp_path):
    trainers.check_training(CASES[name], tmp_path)
