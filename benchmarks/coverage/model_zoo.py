"""A tiny random model of every causal language model in transformers, made from its configuration class alone."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

#: Odd, so that nothing is aligned by chance.
VOCABULARY = 199

_NAMES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input audio_vocab_size",
    256: "max_position_embeddings n_positions max_seq_len n_ctx",
    96: "intermediate_size ffn_dim d_ff d_inner n_inner dim_ff ffn_hidden_size feed_forward_size encoder_ffn_dim "
    "decoder_ffn_dim decoder_intermediate_size",
    64: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim shared_intermediate_size index_topk "
    "lru_width embed_dim out_hidden_size text_hidden_size decoder_hidden_size moe_hidden_size adapter_in_dim "
    "adapter_out_dim adapter_input_size",
    48: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    32: "q_lora_rank kv_lora_rank sliding_window attention_window base_channels",
    16: "head_dim attention_head_dim attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state "
    "mamba_d_head mamba_head_dim mamba_chunk_size ssm_state_size state_size chunk_size linear_key_head_dim "
    "linear_value_head_dim linear_head_dim index_head_dim d_kv image_size",
    8: "mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank hidden_size_per_layer_input patch_size",
    4: "num_hidden_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts mamba_d_conv linear_num_value_heads linear_num_heads num_query_tokens "
    "latent_query_num",
    2: "n_layer num_layers n_layers layers depth encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "num_key_value_heads num_kv_heads num_experts_per_tok top_k_experts moe_topk moe_k num_selected_experts "
    "type_vocab_size mamba_expand n_mamba_heads linear_num_key_heads index_n_heads",
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}

_ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
_ALL_HEADS = {"num_key_value_heads": 4}
_BLT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "head_dim": 16,
}
_DBRX = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 256,
    "resid_pdrop": 0.0,
    "emb_pdrop": 0.0,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
_VOCABULARY_MAP = {"vocabulary_map": {"<image>": 3}}
_VISION_START = {"vision_start_token_id": 3}
_SIGLIP = {"model_type": "siglip_vision_model"}
#: What a type needs besides: sizes that must fit each other in ways of its own.
_SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _ALL_HEADS),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "sarvam_mla", "youtu"), _ALL_HEADS),
    **dict.fromkeys(("mistral4", "mistral_large4_text", "unlimited_ocr_text"), _ALL_HEADS),
    **dict.fromkeys(("cosmos3_edge_text", "glm4v_text", "glm46v_text", "glm_ocr_text", "hunyuan_vl_text"), _SECTIONS),
    **dict.fromkeys(("paddleocr_vl_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), _SECTIONS),
    **dict.fromkeys(("chameleon", "emu3"), _VOCABULARY_MAP),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _VISION_START),
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 132},
    "apertus1p5_vision_tokenizer": {"codebook_size": 32},
    "bailing_hybrid": _ALTERNATING | _ALL_HEADS,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_nb_functions": 1,
        "encoder_hash_byte_group_size": [3],
        "cross_attn_k": 1,
        "patcher_config": dict(_BLT),
        "global_config": dict(_BLT),
        "encoder_config": _BLT | {"hidden_size_global": 64, "cross_attn_k": 1},
        "decoder_config": _BLT | {"hidden_size_global": 64, "cross_attn_k": 1},
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": _DBRX
    | {
        "attn_config": {"attn_pdrop": 0.0, "kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
            "hidden_size": 64,
        },
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "dots3_note_text": _ALL_HEADS | {"head_dim": 32},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
    },
    "evolla": {
        "protein_encoder_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "aligner_num_add_layers": 2,
        "resampler_depth": 1,
    },
    # Their own vision towers are another package's.
    "fast_vlm": {"vision_config": _SIGLIP},
    "perception_lm": {"vision_config": _SIGLIP | {"model_args": {"embed_dim": 64}}},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 5,
        "intermediate_size": [96] * 5,
    },
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "glm5_next_text": _ALL_HEADS | {"qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {"downsample_rate": "1/4", "deepstack_layer_map": [[0, 1]], "spatial_target_layers": [2]},
    "granitemoehybrid": _ALTERNATING,
    "hy_v4_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False, "alpha_initializer": "ones"},
    "inkling_vision": {"num_hidden_layers": 8},
    "instructblipvideo": {"num_query_tokens": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _ALTERNATING | _ALL_HEADS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "molmo2_vision": {"image_size": [16, 16]},
    "moshi": _ALL_HEADS,
    "moshi_depth": _ALL_HEADS,
    "mpt": _DBRX | {"expansion_ratio": 2},
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 1000,
        "split_ngram_parts": 4,
    },
    "pi0": {"vlm_config": {"projection_dim": 64}},
    "reformer": {
        "axial_pos_shape": [4, 6],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
        "num_buckets": None,
        "is_decoder": True,
    },
    "udop": {"decoder_start_token_id": 0},
    "vision-encoder-decoder": {
        "decoder": {"is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
    },
    "xlstm": {
        "chunk_size": 8,
        "mode": "train",
        "qk_dim_factor": 1.0,
        "num_hidden_layers": 2,
        "chunkwise_kernel": "chunkwise--native_autograd",
        "sequence_kernel": "native_sequence__native",
        "step_kernel": "native",
    },
    "wavtokenizer_encoder": {"codebook_dim": 64, "codebook_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

_PIXELS = {"pixel_values": (3, 16, 16)}
_PIXELS_OF_ONE = {"pixel_values": (1, 3, 16, 16)}
#: What takes images besides the types with grids of patches: the shapes of arguments, after the batch.
_IMAGES: dict[str, dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("blip", "blip-2", "git", "pp_formulanet", "vision-encoder-decoder"), _PIXELS),
    **dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_vl", "llava", "ovis2"), _PIXELS),
    **dict.fromkeys(("pp_chart2table", "step3p7"), _PIXELS),
    **dict.fromkeys(("idefics3", "smolvlm"), _PIXELS_OF_ONE),
    "idefics": _PIXELS_OF_ONE | {"image_attention_mask": (24, 1)},
    "instructblip": _PIXELS | {"qformer_input_ids": (6,)},
    "instructblipvideo": {"pixel_values": (4, 3, 16, 16), "qformer_input_ids": (6,)},
    "kosmos-2": _PIXELS | {"image_embeds_position_mask": (24,)},
    "molmo2": {"mm_token_type_ids": (24,)},
    "pi0": _PIXELS_OF_ONE | {"pixel_attention_mask": (1,), "state": (32,), "actions": (16, 32)},
    "pix2struct": {"flattened_patches": (24, 2 + 3 * 16 * 16)},
    "udop": {"bbox": (24, 4)},
}
#: How many tokens an image is, where not four: one of towers that merge patches twice.
_IMAGE_TOKENS = {
    **dict.fromkeys(("aya_vision", "cohere2_vision", "idefics3", "pp_chart2table", "smolvlm", "step3p7"), 1),
    "hy_v4_vl": 6,
}
#: Types whose grids of patches are laid out in ways of their own: text alone.
_OTHER_GRIDS = (
    *("hunyuan_vl", "inkling2", "inkling2_loop", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
)


def names(image_text: bool = False) -> list[str]:
    """All types that transformers has a causal language model for; or all others with an image-text model."""
    causal = _classes()
    if not image_text:
        return sorted(causal)
    return sorted(name for name, found in _classes(image_text).items() if causal.get(name) != found)


def _classes(image_text: bool = False) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto as auto

    return auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if image_text else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def build(model_type: str, seed: int = 0, image_text: bool = False, **settings: Any) -> Any:
    """A tiny model in training mode, without dropout, with random norm weights and biases."""
    import transformers

    found = _classes(image_text)[model_type]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    config = _config(model_type, settings)
    wanted = getattr(model_class, "config_class", None)
    if not image_text and wanted is not None and not isinstance(config, wanted):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).train()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and ("norm" in name.lower() or "ln_" in name or name.endswith("bias")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs_of(model: Any, seed: int = 3, batch: int = 2, tokens: int = 24) -> dict[str, Any]:
    """Arguments of its forward, with labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    text = config.get_text_config(decoder=True)
    vocabulary = min(getattr(text, "vocab_size", VOCABULARY), VOCABULARY)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(5, vocabulary, shape, generator=generator)

    input_ids = ids(batch, tokens)
    labels = input_ids.clone()
    labels[:, :4] = -100
    labels[1:, -5:] = -100
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": torch.ones_like(input_ids),
        "use_cache": False,
    }
    kind = config.model_type
    if kind.startswith("musicgen"):
        books = config.num_codebooks
        inputs = {"input_ids": ids(batch * books, tokens), "labels": ids(batch, tokens, books)}
    accepted = inspect.signature(model.forward).parameters
    with_grids = "image_grid_thw" in accepted and kind not in _OTHER_GRIDS
    images = _grids(config, tokens) if with_grids else _IMAGES.get(kind, {})
    first = _IMAGE_TOKENS.get(kind, 4)  # tokens are the image's
    for name, shape in images.items():
        if name.endswith(("_mask", "_type_ids")):
            inputs[name] = torch.zeros(batch, *shape, dtype=torch.long)
            inputs[name][:, :first] = 1
        elif name.endswith("_ids"):
            inputs[name] = ids(batch, *shape)
        else:
            inputs[name] = torch.rand(batch, *shape, generator=generator)
    if "pixel_values" in images:
        input_ids[:, :first] = 3
    if with_grids and images:
        inputs["pixel_values"] = inputs["pixel_values"].flatten(0, 1)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        inputs = {name: value for name, value in inputs.items() if name in accepted}
    return inputs


def _grids(config: Any, tokens: int) -> dict[str, tuple[int, ...]]:
    """Of images of four by four patches, of which two by two become a token."""
    vision = getattr(config, "vision_config", None)
    if not hasattr(vision, "spatial_merge_size"):
        return {}
    features = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return {"pixel_values": (16, features), "mm_token_type_ids": (tokens,)}


def _config(model_type: str, settings: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    if model_type in ("mpt", "dbrx", "blt"):  # their sizes have other names, or live in nested configurations
        tiny = _SETTINGS[model_type] | {"vocab_size": VOCABULARY}
        return config_class(**(tiny | settings))
    return config_class(**(_tiny(config_class, model_type) | settings))


def _tiny(config_class: Any, model_type: str) -> dict[str, Any]:
    """Arguments of a configuration class, and of those nested in it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tiny = _shrunk(config_class, model_type)
    for name, (part, default_type, given) in _nested(config_class, tiny).items():
        own = tiny.get(name) or {}
        if part.__name__ == "AutoConfig":
            given["model_type"] = own.get("model_type", default_type)
            part = CONFIG_MAPPING[given["model_type"]]
        tiny[name] = given | _tiny(part, part.model_type) | own
    return tiny


def _nested(config_class: Any, given: dict[str, Any]) -> dict[str, tuple[Any, str | None, dict[str, Any]]]:
    """The class, default type and default arguments of each nested configuration that is given, or made if it is not.

    Before release 5.18 of transformers, only a configuration that is made shows the default type.
    """
    if hasattr(config_class, "sub_configs_defaults"):
        specs = config_class.sub_configs_defaults.items()
        return {
            name: (spec.config_class, spec.model_type, dict(spec.init_kwargs))
            for name, spec in specs
            if not spec.optional or name in given
        }
    made = config_class() if config_class.sub_configs else None
    types = {name: getattr(getattr(made, name, None), "model_type", None) for name in config_class.sub_configs}
    return {n: (config_class.sub_configs[n], t, {}) for n, t in types.items() if t is not None or n in given}


def _shrunk(config_class: Any, model_type: str) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    known = set(fields) | set(inspect.signature(config_class.__init__).parameters)
    lists = {name for name, default in fields.items() if isinstance(default, (list, tuple))}
    tiny: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in known - lists}
    for name in known:
        if name.endswith(("token_id", "token_index")):
            tiny[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 3)
        is_dropout = "dropout" in name or name.endswith(("pdrop", "layerdrop"))
        if is_dropout and type(fields.get(name)) in (int, float):
            tiny[name] = 0.0
    return tiny | _SETTINGS.get(model_type, {})
