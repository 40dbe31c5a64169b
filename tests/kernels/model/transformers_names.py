"""What transformers says for the official tensor names: applied to whole names, in this order. Shared by
the check of the loader's layouts and the benchmark beside transformers."""

TRANSFORMERS = [
    (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"), (r"^layers\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."), (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"), (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"self_attn\.indexer\.", "self_attn.compressor.indexer."),
    (r"(compressor\.(?:indexer\.)?)wkv\.", r"\1kv_proj."),
    (r"(compressor\.(?:indexer\.)?)wgate\.", r"\1gate_proj."),
    (r"(compressor\.(?:indexer\.)?)norm\.", r"\1kv_norm."),
    (r"(compressor\.(?:indexer\.)?)ape$", r"\1position_bias"),
    (r"\.wq_a\.", ".q_a_proj."), (r"\.q_norm\.", ".q_a_norm."), (r"\.wq_b\.", ".q_b_proj."),
    (r"self_attn\.wkv\.", "self_attn.kv_proj."), (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"gate\.bias$", "gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."),
]
