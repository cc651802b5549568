"""Architectures of Hugging Face, small and with random weights, and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, WORDS, CLASSES = 8, 16, 96, 5
IMAGE_TOKEN = WORDS - 1
Inputs = dict[str, Tensor]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens() -> Tensor:
    """(ROWS, TOKENS), none of them special."""
    return torch.randint(3, WORDS - 1, (ROWS, TOKENS), generator=_generator())


def _numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=_generator())


def _labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=_generator())


def language() -> Inputs:
    """Each token's next, or itself."""
    return {"input_ids": _tokens(), "labels": _tokens()}


def texts() -> Inputs:
    """A class of each text."""
    return {"input_ids": _tokens(), "labels": _labels()}


def images(size: int = 32) -> Callable[[], Inputs]:
    """A class of each image."""
    return lambda: {"pixel_values": _numbers(3, size, size), "labels": _labels()}


def scenes() -> Inputs:
    """A class of each pixel of each image."""
    labels = torch.randint(CLASSES, (ROWS, 32, 32), generator=_generator())
    return {"pixel_values": _numbers(3, 32, 32), "labels": labels}


def pictures() -> Inputs:
    """Images alone."""
    return {"pixel_values": _numbers(3, 16, 16)}


def captions() -> Inputs:
    """Tokens, some of which stand for parts of an image."""
    tokens = _tokens()
    tokens[:, 1:5] = IMAGE_TOKEN
    return {"input_ids": tokens, "pixel_values": _numbers(3, 8, 8), "labels": tokens.clone()}


def typed_captions() -> Inputs:
    """With the kind of each token."""
    made = captions()
    return {**made, "token_type_ids": (made["input_ids"] == IMAGE_TOKEN).long()}


def pairs() -> Inputs:
    """Images and their texts."""
    return {"input_ids": _tokens(), "pixel_values": _numbers(3, 16, 16)}


def sounds() -> Inputs:
    """A class of each sound."""
    return {"input_values": _numbers(400), "labels": _labels()}


def speech() -> Inputs:
    """What is said in spectra."""
    return {"input_features": _numbers(8, 32), "labels": _tokens()}


def series() -> Inputs:
    """How series go on."""
    return {"past_values": _numbers(32, 2), "future_values": _numbers(8, 2)}


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers`, the class of its configuration, the arguments of that, and its inputs.

    `named` are further arguments of a call.
    """

    model: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[], Inputs] = language
    named: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """With random weights, the same at every call; experts as matmuls that can be split."""
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, self.model)(
            getattr(transformers, self.config)(**self.options)
        )
        if any("expert" in name for name in self.options):
            model.set_experts_implementation("batched_mm")
        return model.train()


_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_LLM = {
    **_TEXT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {**_LLM, "head_dim": 8}
_MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
_BERT = {**_TEXT, "max_position_embeddings": 64, "pad_token_id": 0}
_VIT = {k: v for k, v in _TEXT.items() if k != "vocab_size"}
_SMALL = {**_VIT, "image_size": 8, "patch_size": 4}
_STAGES = {"depths": [1, 1], "num_labels": CLASSES}
_DECODER = {**_LLM, "head_dim": 8}


def _causal(name: str, options: Mapping[str, Any] = _LLM, config: str = "") -> Architecture:
    return Architecture(f"{name}ForCausalLM", config or f"{name}Config", options)


def _masked(name: str, options: Mapping[str, Any] = _BERT) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", options)


def _classifier(
    name: str, options: Mapping[str, Any], inputs: Callable[[], Inputs] | None = None
) -> Architecture:
    options = {"num_labels": CLASSES, **options}
    return Architecture(
        f"{name}ForImageClassification", f"{name}Config", options, inputs or images()
    )


ARCHITECTURES: dict[str, Architecture] = {
    "Llama": _causal("Llama"),
    "Mistral": _causal("Mistral", {**_LLM, "sliding_window": 8}),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3", _HEADS),
    "Gemma": _causal("Gemma", _HEADS),
    "Gemma 2": _causal("Gemma2", _HEADS),
    "Gemma 3": _causal("Gemma3", _HEADS, "Gemma3TextConfig"),
    "Phi": _causal("Phi"),
    "Phi 3": _causal("Phi3"),
    "OLMo 2": _causal("Olmo2"),
    "StableLM": _causal("StableLm"),
    "Cohere": _causal("Cohere"),
    "Granite": _causal("Granite"),
    "SmolLM 3": _causal("SmolLM3"),
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config",
                          {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "GPT-J": _causal("GPTJ", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4,
                              "rotary_dim": 4, "n_positions": 64}),
    "GPT-NeoX": _causal("GPTNeoX", _BERT),
    "OPT": _causal("OPT", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "BLOOM": _causal("Bloom", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Falcon": _causal("Falcon", _TEXT),
    "Mamba": _causal("Mamba", _MAMBA),
    "Mamba 2": _causal("Mamba2", {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "Mixtral": _causal("Mixtral", {**_LLM, "num_local_experts": 4}),
    "Qwen2-MoE": _causal("Qwen2Moe", {**_LLM, "num_experts": 4, "moe_intermediate_size": 32,
                                      "shared_expert_intermediate_size": 32}),
    "DeepSeek-V3": _causal("DeepseekV3", {
        **_LLM, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1}),
    "gpt-oss": _causal("GptOss", {**_HEADS, "num_local_experts": 4}),
    "Llama, classes": Architecture("LlamaForSequenceClassification", "LlamaConfig",
                                   {**_LLM, "num_labels": CLASSES}, texts),
    "BERT": _masked("Bert"),
    "RoBERTa": _masked("Roberta"),
    "ALBERT": _masked("Albert", {**_BERT, "embedding_size": 16}),
    "DistilBERT": _masked("DistilBert", {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4,
                                         "hidden_dim": 64, "max_position_embeddings": 64}),
    "ELECTRA": _masked("Electra", {**_BERT, "embedding_size": 16}),
    "DeBERTa-v2": _masked("DebertaV2", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                                        "position_buckets": 8, "max_relative_positions": 16}),
    "ModernBERT": _masked("ModernBert", {**_BERT, "bos_token_id": 1, "eos_token_id": 2}),
    "FNet": _masked("FNet", {**_BERT, "tpu_short_seq_length": TOKENS}),
    "XLNet": Architecture("XLNetLMHeadModel", "XLNetConfig",
                          {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "T5": Architecture("T5ForConditionalGeneration", "T5Config",
                       {"vocab_size": WORDS, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2,
                        "num_heads": 4, "decoder_start_token_id": 0}),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", {
        "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64}),
    "ViT": _classifier("ViT", {**_VIT, "image_size": 32, "patch_size": 8}),
    "DeiT": _classifier("DeiT", {**_VIT, "image_size": 32, "patch_size": 8}),
    "BEiT": _classifier("Beit", {**_VIT, "image_size": 32, "patch_size": 8}),
    "DINOv2": _classifier("Dinov2", {**_VIT, "image_size": 28, "patch_size": 7}, images(28)),
    "Swin": _classifier("Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
                                 "num_heads": [2, 4], "window_size": 4}),
    "ConvNeXt": _classifier("ConvNext", {"hidden_sizes": [8, 16], "num_stages": 2, **_STAGES}),
    "ConvNeXt v2": _classifier("ConvNextV2", {"hidden_sizes": [8, 16], "num_stages": 2, **_STAGES}),
    "ResNet": _classifier("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic",
                                     **_STAGES}),
    "RegNet": _classifier("RegNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "groups_width": 4,
                                     **_STAGES}),
    "PoolFormer": _classifier("PoolFormer", {
        "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1], **_STAGES}),
    "MobileViT": _classifier("MobileViT", {
        "image_size": 32, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
        "num_attention_heads": 4}),
    "SegFormer": Architecture("SegformerForSemanticSegmentation", "SegformerConfig", {
        "num_encoder_blocks": 2, "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
        **_STAGES}, scenes),
    "ViT-MAE": Architecture("ViTMAEForPreTraining", "ViTMAEConfig", {
        **_VIT, "image_size": 16, "patch_size": 4, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64}, pictures),
    "CLIP": Architecture("CLIPModel", "CLIPConfig", {
        "text_config": {**_TEXT, "eos_token_id": 2, "max_position_embeddings": 32},
        "vision_config": {**_VIT, "image_size": 16, "patch_size": 4}, "projection_dim": 16,
        }, pairs, {"return_loss": True}),
    "LLaVA": Architecture("LlavaForConditionalGeneration", "LlavaConfig", {
        "vision_config": {"model_type": "clip_vision_model", **_SMALL},
        "text_config": {"model_type": "llama", **_LLM}, "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1}, captions),
    "PaliGemma": Architecture("PaliGemmaForConditionalGeneration", "PaliGemmaConfig", {
        "vision_config": {"model_type": "siglip_vision_model", **_SMALL},
        "text_config": {"model_type": "gemma", **_DECODER}, "image_token_index": IMAGE_TOKEN,
        "projection_dim": 32, "hidden_size": 32}, typed_captions),
    "Gemma 3, images": Architecture("Gemma3ForConditionalGeneration", "Gemma3Config", {
        "vision_config": {"model_type": "siglip_vision_model", **_SMALL},
        "text_config": {"model_type": "gemma3_text", **_DECODER}, "image_token_index": IMAGE_TOKEN,
        "mm_tokens_per_image": 4}, typed_captions),
    "BLIP-2": Architecture("Blip2ForConditionalGeneration", "Blip2Config", {
        "vision_config": _SMALL, "qformer_config": {**_TEXT, "encoder_hidden_size": 32},
        "text_config": {"model_type": "opt", **_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32},
        "num_query_tokens": 4, "image_token_index": IMAGE_TOKEN}, captions),
    "Whisper": Architecture("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, speech),
    "Wav2Vec2": Architecture("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
        **_TEXT, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        "num_labels": CLASSES, "apply_spec_augment": False, "layerdrop": 0.0, "classifier_proj_size": 16,
        }, sounds),
    "PatchTST": Architecture("PatchTSTForPrediction", "PatchTSTConfig", {
        "num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "prediction_length": 8}, series),
}  # fmt: skip
