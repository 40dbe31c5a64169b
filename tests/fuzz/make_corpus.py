#!/usr/bin/env python3
"""Writes the seeds of the fuzz corpora: for each target whole inputs ("ok-...") and one broken input
per kind of damage ("bad-..."). Findings of the fuzzer are added beside them by hand.

usage: make_corpus.py          rewrites tests/fuzz/corpus/*/{ok,bad}-*
"""
import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"
H, INNER, LORA, V = 32, 32, 32, 2
DATA = 1 << 20  # the data area of fuzz_model.c


def put(target, name, data):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def dump(value):
    return json.dumps(value, separators=(",", ":"))


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else dump(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors():
    a, b = entry("BF16", [2, 2], 0, 8), entry("U8", [3], 8, 11)
    good = {"__metadata__": {"format": "pt"}, "layers.0.attn.wq_a.weight": a, "mtp.0.x": b}
    data = bytes(range(11))
    def both(x, y=None):
        return file({"layers.0.attn.wq_a.weight": x, "mtp.0.x": y or b}, data)
    put("safetensors", "ok-two", file(good, data))
    put("safetensors", "ok-empty", file({}))
    put("safetensors", "ok-spaces", file(dump(good).encode() + b"   ", data))
    put("safetensors", "ok-empty-tensor", both(entry("F32", [0, 7], 0, 0)))
    put("safetensors", "ok-unknown-dtype", both(entry("F4", [], 0, 8)))
    hugging = {f"model.layers.0.{n}": entry("U8", [1], i, i + 1) for i, n in enumerate(
        ["self_attn.q_a_proj.weight", "self_attn.q_a_proj.weight_scale_inv", "mlp.gate.weight",
         "mlp.gate.e_score_correction_bias", "self_attn.compressor.indexer.kv_norm.weight",
         "mlp.experts.gate_up_proj", "attn_hc.fn", "input_layernorm.weight", "mlp.topk.tid2eid"])}
    put("safetensors", "ok-transformers", file(hugging, bytes(9)))
    put("safetensors", "bad-empty", b"")
    put("safetensors", "bad-short", b"\x02\0\0\0{}")
    put("safetensors", "bad-truncated-json", file(dump(good).encode()[:-9], data))
    put("safetensors", "bad-truncated-data", file(good, data[:-1]))
    put("safetensors", "bad-huge-length", file(good, data, 1 << 63))
    put("safetensors", "bad-length-into-data", file(good, data, len(dump(good)) + 4))
    put("safetensors", "bad-overlap", both(a, entry("U8", [3], 7, 10)))
    put("safetensors", "bad-same-bytes", both(a, entry("BF16", [4], 0, 8)))
    put("safetensors", "bad-inside-out", both(entry("BF16", [0], 8, 0)))
    put("safetensors", "bad-negative", both(entry("BF16", [2, 2], -8, 0)))
    put("safetensors", "bad-past-end", both(a, entry("U8", [3], 9, 12)))
    put("safetensors", "bad-huge-offset", both(a, entry("U8", [3], 2**63 - 4, 2**63 - 1)))
    put("safetensors", "bad-too-large-integer", both(a, entry("U8", [3], 8, 2**64)))
    put("safetensors", "bad-huge-shape", both(entry("BF16", [2**62, 4], 0, 8)))
    put("safetensors", "bad-shape-wraps", both(entry("I64", [2**61, 1], 0, 0)))
    put("safetensors", "bad-negative-size", both(entry("BF16", [-2, -2], 0, 8)))
    put("safetensors", "bad-rank", both(entry("BF16", [1] * 8 + [4], 0, 8)))
    put("safetensors", "bad-float-size", both(entry("BF16", [4.0], 0, 8)))
    put("safetensors", "bad-dtype", both(entry(7, [4], 0, 8)))
    put("safetensors", "bad-array", file(b"[1]"))
    put("safetensors", "bad-entry", file({"x": 3}))
    twice = dump({"x": a}).encode()[:-1] + b"," + dump({"x": b}).encode()[1:]
    put("safetensors", "bad-twice", file(twice, data))
    put("safetensors", "bad-nul-name", file(b'{"a\\u0000b":' + dump(a).encode() + b"}", data))
    put("safetensors", "bad-utf8", file(b'{"\xff\xfe":' + dump(a).encode() + b"}", data))
    put("safetensors", "bad-deep", file(b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"))
    put("safetensors", "bad-official-twice", file({"norm.weight": a, "model.norm.weight": b}, data))
    put("safetensors", "bad-mixed", file({"layers.0.attn.wkv.weight": a,
                                          "layers.1.self_attn.wkv.weight": b}, data))
    put("safetensors", "ok-long-name", file({"layers.1.attn." + "x" * 3000: a}, data))


def index():
    names = ["norm.weight", "embed.weight", "head.weight"]
    good = {"metadata": {"total_size": 3}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    def mapped(**changes):
        return dump({"weight_map": good["weight_map"] | changes})
    put("index", "ok-whole", dump(good))
    put("index", "bad-empty", "")
    put("index", "bad-truncated", dump(good)[:-2])
    put("index", "bad-no-map", dump({"metadata": {}}))
    put("index", "bad-map-is-array", dump({"weight_map": names}))
    put("index", "bad-empty-map", dump({"weight_map": {}}))
    put("index", "bad-number", mapped(x=3))
    put("index", "bad-parent-folder", mapped(x="../a.safetensors"))
    put("index", "bad-absolute", mapped(x="/etc/passwd"))
    put("index", "bad-hidden", mapped(x=".a"))
    put("index", "bad-empty-name", mapped(x=""))
    put("index", "bad-long-name", mapped(x="a" * 256))
    put("index", "bad-other-shard", mapped(**{"norm.weight": "b.safetensors"}))
    put("index", "bad-unknown-tensor", mapped(x="a.safetensors"))
    put("index", "bad-missing-tensor", dump({"weight_map": {names[0]: "a.safetensors"}}))
    put("index", "bad-many-shards", dump({"weight_map": {f"t{i}": f"{i}" for i in range(4097)}}))
    put("index", "bad-twice", '{"weight_map":{"x":"a","x":"b"}}')
    put("index", "bad-deep", '{"weight_map":' + "[" * 5000 + "]" * 5000 + "}")


def config():
    good = {"model_type": "deepseek_v4", "attention_bias": False, "bos_token_id": 0,
            "eos_token_id": 1, "compress_ratios": [0, 4, 128, 0], "compress_rope_theta": 160000,
            "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
            "hidden_act": "silu", "hidden_size": 64, "index_head_dim": 128, "index_n_heads": 2,
            "index_topk": 16, "max_position_embeddings": 4096, "moe_intermediate_size": 32,
            "n_routed_experts": 2, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 2, "num_experts_per_tok": 1, "num_hash_layers": 1,
            "num_hidden_layers": 3, "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16,
            "q_lora_rank": 32, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16,
                             "original_max_position_embeddings": 65536, "type": "yarn"},
            "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
            "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False,
            "topk_method": "noaux_tc", "vocab_size": 8}
    reference = {"dim": 64, "moe_inter_dim": 32, "n_layers": 3, "n_hash_layers": 1, "n_heads": 2,
                 "n_activated_experts": 1, "score_func": "sqrtsoftplus", "route_scale": 1.5,
                 "q_lora_rank": 32, "rope_head_dim": 64, "norm_eps": 1e-6, "o_groups": 2,
                 "o_lora_rank": 16, "window_size": 128, "original_seq_len": 65536,
                 "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "dtype": "fp8",
                 "vocab_size": 8, "index_n_heads": 2, "index_topk": 16, "n_routed_experts": 2,
                 "n_shared_experts": 1, "swiglu_limit": 10.0, "hc_sinkhorn_iters": 20,
                 "hc_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
                 "compress_ratios": [0, 4, 128]}
    put("config", "ok-transformers", dump(good))
    put("config", "ok-reference", dump(reference))
    put("config", "ok-quantised", dump(good | {"quantization_config": {
        "quant_method": "fp8", "quantized_layers": {"layers.0.ffn.experts": {}}}}))
    put("config", "bad-both", dump(good | reference))
    for name, change in [
            ("layers-none", {"num_hidden_layers": 0}), ("layers-many", {"num_hidden_layers": 129}),
            ("ratios-short", {"compress_ratios": [0, 4]}), ("ratio", {"compress_ratios": [0, 4, 5]}),
            ("ratios-draft", {"compress_ratios": [0, 4, 128, 4]}),
            ("ratios-long", {"compress_ratios": [0, 4, 128] + [0] * 300}),
            ("huge", {"hidden_size": 2**62}), ("negative", {"vocab_size": -8}),
            ("groups", {"o_groups": 3}), ("id", {"eos_token_id": 8}), ("float", {"head_dim": 512.5}),
            ("experts", {"num_experts_per_tok": 3}), ("tiny", {"rms_norm_eps": 0}),
            ("string", {"hidden_size": "64"}), ("rope", {"rope_scaling": None}),
            ("other-model", {"model_type": "deepseek_v3"}), ("bool", {"norm_topk_prob": 1})]:
        put("config", "bad-" + name, dump(good | change))
    put("config", "bad-nan", dump(good | {"hc_eps": float("nan")}))
    put("config", "bad-infinite", dump(good).replace("1.5", "1e999"))
    put("config", "bad-positions", dump(reference | {"max_seq_len": 0}))
    put("config", "bad-integer", dump(good).replace(":512", ":" + "9" * 40))
    put("config", "bad-twice", dump(good)[:-1] + ',"vocab_size":8}')
    put("config", "bad-truncated", dump(good)[:-1])
    put("config", "bad-empty", "")
    put("config", "bad-deep", '{"x":' * 5000 + "1" + "}" * 5000)


SIZE = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}


def linear(out, base, rows, cols, kind, expert):
    if kind == "bf16":
        out[base + ".weight"] = ("BF16", [rows, cols])
    elif not expert or kind == "fp8":
        out[base + ".weight"] = ("F8_E4M3", [rows, cols])
        out[base + ".scale"] = ("F8_E8M0", [-(-rows // 128), -(-cols // 128)])
    elif kind == "fp4":
        out[base + ".weight"] = ("I8", [rows, cols // 2])
        out[base + ".scale"] = ("F8_E8M0", [rows, cols // 32])
    else:
        out[base + ".weight"] = ("U8", [rows, cols // 2])
        out[base + ".weight_scale"] = ("F8_E4M3", [rows, cols // 16])
        out[base + ".weight_scale_2"] = out[base + ".input_scale"] = ("F32", [])


def model_tensors(kind):
    out = {"embed.weight": ("BF16", [V, H]), "head.weight": ("BF16", [V, H]),
           "norm.weight": ("BF16", [H])}
    def hc(base, rows, scales):
        out[base + "_fn"] = ("F32", [rows, 4 * H])
        out[base + "_base"], out[base + "_scale"] = ("F32", [rows]), ("F32", [scales])
    def compressor(base, ratio, width, d):
        out[base + ".ape"], out[base + ".norm.weight"] = ("F32", [ratio, width]), ("BF16", [d])
        out[base + ".wkv.weight"] = out[base + ".wgate.weight"] = ("BF16", [width, H])
    hc("hc_head", 4, 1)
    for layer in (0, 1):
        p = f"layers.{layer}."
        a = p + "attn."
        out[p + "attn_norm.weight"] = out[p + "ffn_norm.weight"] = ("BF16", [H])
        hc(p + "hc_attn", 24, 3)
        hc(p + "hc_ffn", 24, 3)
        out[a + "attn_sink"] = ("F32", [1])
        out[a + "q_norm.weight"], out[a + "kv_norm.weight"] = ("BF16", [LORA]), ("BF16", [512])
        for name, rows, cols in [("wq_a", LORA, H), ("wq_b", 512, LORA), ("wkv", 512, H),
                                 ("wo_a", LORA, 512), ("wo_b", H, LORA)]:
            linear(out, a + name, rows, cols, kind, False)
        if layer == 0:
            compressor(a + "compressor", 4, 1024, 512)
            compressor(a + "indexer.compressor", 4, 256, 128)
            linear(out, a + "indexer.wq_b", 128, LORA, kind, False)
            out[a + "indexer.weights_proj.weight"] = ("BF16", [1, H])
            out[p + "ffn.gate.tid2eid"] = ("I64", [V, 1])
        else:
            compressor(a + "compressor", 128, 512, 512)
            out[p + "ffn.gate.bias"] = ("F32", [1])
        out[p + "ffn.gate.weight"] = ("BF16", [1, H])
        for e in ("shared_experts", "experts.0"):
            for name, rows, cols in [("w1", INNER, H), ("w2", H, INNER), ("w3", INNER, H)]:
                linear(out, f"{p}ffn.{e}.{name}", rows, cols, kind, e != "shared_experts")
    return out


def model():
    def header(tensors, align=1, late=()):
        """Tensors at multiples of `align`, those that end in one of `late` half of it later."""
        out, at = {}, 0
        for name, (dtype, shape) in tensors.items():
            at += -at % align + (align // 2 if name.endswith(tuple(late)) else 0)
            n = SIZE[dtype]
            for d in shape:
                n *= d
            out[name] = entry(dtype, shape, at, at + n)
            at += n
        assert at <= DATA
        return dump(out)
    bf16 = model_tensors("bf16")
    put("model", "ok-bf16", header(bf16))
    put("model", "ok-fp4", header(model_tensors("fp4")))
    put("model", "ok-fp8", header(model_tensors("fp8")))
    put("model", "bad-nvfp4-zero-factor", header(model_tensors("nvfp4")))
    put("model", "bad-ids", header(bf16) + "\0\x01")
    def experts_only(kind):
        """Routed experts quantised, all else bf16: what is in the fill then meets them alone."""
        out = model_tensors(kind)
        for name in [k for k in bf16 if ".experts." not in k and out.get(k) != bf16[k]]:
            out[name] = bf16[name]
            del out[name.removesuffix("weight") + "scale"]
        return out
    # Filled with 64 bytes over and over, ids are zero while factors and scales are not.
    nvfp4 = header(experts_only("nvfp4"), 64, ["weight_scale_2", "input_scale"]).encode() + b"\0"
    for name, factor in [("ok-nvfp4", 0.5), ("bad-nvfp4-negative-factor", -0.5),
                         ("bad-nvfp4-nan", float("nan"))]:
        put("model", name, nvfp4 + bytes(32) + struct.pack("<f", factor) + bytes(28))
    fp4 = header(experts_only("fp4"), 64, [".scale"]).encode() + b"\0"
    put("model", "bad-nan-scale", fp4 + bytes(63) + b"\xff")
    put("model", "bad-nan-weight", header(model_tensors("fp8"), 64).encode() + b"\0" + bytes(63) + b"\x7f")
    stacked = {k: v for k, v in bf16.items() if ".experts." not in k}
    for layer in (0, 1):
        base = f"layers.{layer}.ffn.experts."
        stacked[base + "gate_up_proj"] = ("BF16", [1, 2 * INNER, H])
        stacked[base + "down_proj"] = ("BF16", [1, H, INNER])
    for layer in (0, 1):
        for e in ("w1", "w2", "w3"):
            key = f"layers.{layer}.ffn.shared_experts.{e}.weight"
            new = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[e]
            stacked[key.replace(e, new)] = stacked.pop(key)
    put("model", "ok-stacked", header(stacked))
    put("model", "bad-stacked-shape", header(stacked | {
        "layers.1.ffn.experts.down_proj": ("BF16", [2, H, INNER])}))
    put("model", "bad-extra", header(bf16 | {"layers.0.attn.bias": ("BF16", [1])}))
    put("model", "ok-draft", header(bf16 | {"layers.2.attn.bias": ("BF16", [1])}))
    put("model", "bad-missing", header({k: v for k, v in bf16.items() if k != "norm.weight"}))
    put("model", "bad-dtype", header(bf16 | {"norm.weight": ("I8", [H])}))
    put("model", "bad-shape", header(bf16 | {"embed.weight": ("BF16", [H, V])}))


SPELLED, PLAIN, REASONING, CALLS, ONE_CALL, CUT, STOPS = (1 << i for i in range(7))


def reply():
    """~ stands for the DSML mark, ^ for </think>."""
    def one(name, options, text):
        for kind, mark in (("", b"\xf8"), ("-spelled", "｜DSML｜".encode())):
            data = text.encode().replace(b"~", mark).replace(b"^", b"\xf9")
            put("reply", name + kind, bytes([options | (SPELLED if kind else 0)]) + data)
    def call(name, *params):
        body = "".join(f'<~parameter name="{k}" string="{s}">{v}</~parameter>\n' for k, s, v in params)
        return f'<~invoke name="{name}">\n{body or chr(10)}</~invoke>\n'
    def calls(*made):
        return "<~tool_calls>\n" + "".join(made) + "</~tool_calls>"
    f = call("f", ("a", "true", "2>&1 <b> \"'\\\n</ </~x 毕🙂"), ("b", "false", '[1, {"c": null}]'))
    one("ok-call", CALLS | REASONING, "hm\n\n^Look:\n\n" + calls(f, call("g")))
    one("ok-unwrapped", CALLS, "abab STOP \n" + f)
    one("ok-unclosed-reasoning", CALLS | REASONING, "hm\n" + calls(f))
    one("ok-one", CALLS | ONE_CALL, calls(f, f))
    one("ok-stops", CALLS | STOPS, "STO\n\na" + calls(call("f", ("k", "true", "STOP"))))
    one("ok-faults", CALLS, calls('<~invoke name="f">\n<~parameter name="k">v</~parameter></~tool_calls>'))
    one("bad-no-tools", REASONING, "^" + calls(f))
    one("bad-plain", PLAIN | CALLS, calls(f))
    one("bad-cut", CALLS | CUT, calls(f)[:60])
    one("bad-prose", CALLS, "<~tool_calls> and <~invoke name=\"f\" <~invoke name=\"")
    one("bad-stop", CALLS | STOPS, "a STOP " + calls(f))
    put("reply", "bad-utf8", bytes([CALLS]) + b"c\xe6\xaf\xf0\x9f\x95\xed\xa0<\xf8\xf8")


def grammar():
    """Options as in fuzz_grammar.c: 1 text, 2 object, 3 schema, 4 pattern, 0 calls."""
    reasoning, one_call, token, tool, raw = 8, 16, 32, 64, 128
    def closed(**p):
        return {"type": "object", "properties": p, "required": list(p), "additionalProperties": False}
    tree = {"$defs": {"n": closed(v={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
            "$ref": "#/$defs/n"}
    seeds = {
        "object": (2, b"", b'{"a": [1, -2.5e+3, "\\u00e9\\ud83d\\ude00 \xc3\xa9", {}, null]}'),
        "closed": (3, closed(a={"type": "string", "maxLength": 3}, b={"type": "array", "items": {"type": "number"}}), b'{"a":"xyz","b":[1,2.5]}'),
        "open": (3, {"type": "object", "properties": {"a": {"enum": [1, "x", None, [2]]}}, "additionalProperties": {"type": "boolean"}}, b'{"a":"x","ab":true}'),
        "tree": (3, tree, b'{"v":1,"next":{"v":2,"next":null}}'),
        "one-of": (3 | reasoning, {"oneOf": [closed(k={"const": "a"}), closed(k={"const": "b"}, n={"minimum": -2.5, "type": "number"})]}, b'{"k":"b","n":-2.25}'),
        "all-of": (3, {"allOf": [{"type": "integer", "minimum": 7}, {"exclusiveMaximum": 1200}]}, b"1199"),
        "prefix": (3, {"prefixItems": [{"type": "string", "format": "date"}, {}], "minItems": 1, "maxItems": 3}, b'["2026-02-28",{},1]'),
        "string-pattern": (3, {"type": "string", "pattern": "^(a|b\\\\d){2,4}[^x-z]*$", "minLength": 3, "maxLength": 9}, b'"ab1ab2cd"'),
        "pattern": (4, b"(ab|a)(c|bcd){2}(d*)[\\u00e9-\\u{1F600}]?", b"abcbcdd"),
        "calls": (0 | tool | token, b"", closed(a={"type": "string"}, n={"type": ["integer", "null"]}),
                  '\n\n<\xfetool_calls>\n<\xfeinvoke name="name">\n<\xfeparameter name="a" string="true">x < y</\xfeparameter>\n'
                  '<\xfeparameter name="n" string="false">12</\xfeparameter>\n</\xfeinvoke>\n</\xfetool_calls>'.encode("latin-1")),
        "text-or-calls": (1 | tool | one_call, b"", {"type": "object"}, "a\n\n<｜DSML｜tool_calls>\n".encode()),
    }
    for name, (options, *parts) in seeds.items():
        put("grammar", "ok-" + name, bytes([options]) + b"\xff".join(x if isinstance(x, bytes) else dump(x).encode() for x in parts))
    for name, schema in {"keyword": {"uniqueItems": True}, "no-json": b"{", "self": {"$ref": "#"}, "nothing": {"type": []},
                         "one-of-overlap": {"oneOf": [{}, {}]}, "no-value": False,
                         "ways": {"$ref": "#/$defs/20", "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i - 1}"}] * 2} if i else False for i in range(21)}},
                         "look-ahead": {"pattern": "(?=a)b"}}.items():
        put("grammar", "bad-" + name, b"\x03" + (schema if isinstance(schema, bytes) else dump(schema).encode()))
    put("grammar", "bad-compiled", bytes([raw]) + b"TDG1" + bytes(60))


def tokenizer():
    """Options as in fuzz_tokenizer.c: an even byte and a text, an odd one and a tokenizer.json."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = dict(zip(plain, map(chr, plain)))
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    def split(pattern):
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    def added(i, name, normalized=False):
        return {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": True}
    words = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
             "\\s*[\r\n]+|\\s+(?!\\S)|\\s+")
    good = {"truncation": None, "padding": None, "added_tokens": [added(258, "<end>"), added(259, "<think>", True)], "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("\\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(words),
                              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}, "post_processor": None,
            "model": {"type": "BPE", "dropout": None, "vocab": {letters[i]: i for i in range(256)} | {"ab": 256, "abab": 257},
                      "merges": [["a", "b"], ["ab", "ab"]]}}
    def model(**change):
        return good | {"model": good["model"] | change}
    vocab = good["model"]["vocab"]
    for name, text in {"prose": "The cat's ab  abab\n\n 123456\t caf\u00e9 \u6bd5\u4e1a e\u0301 \U0001f642\u200d\U0001f642", "names": "<end><think>", "empty": ""}.items():
        put("tokenizer", "ok-" + name, b"\0" + text.encode())
    put("tokenizer", "ok-bytes", b"\0" + bytes(range(256)) * 2)
    put("tokenizer", "ok-file", b"\1" + dump(good).encode())
    bad = {"type": model(type="Unigram"), "two-ids": model(vocab=vocab | {"abab": 256}), "no-byte": model(vocab={k: v for k, v in vocab.items() if k != "a"}),
           "merge": model(merges=[["a", "zz"]]), "merge-twice": model(merges=[["a", "b"], ["a", "b"]]), "negative": model(vocab=vocab | {"abab": -1}),
           "huge": model(vocab=vocab | {"abab": 1 << 40}), "added-id": good | {"added_tokens": [added(5, "<x>")]},
           "added-twice": good | {"added_tokens": [added(258, "<x>"), added(259, "<x>")]}, "added-empty": good | {"added_tokens": [added(258, "")]},
           "pattern": good | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("."), split("."), split(".")]}},
           "normalizer": good | {"normalizer": {"type": "NFC"}}, "list": [], "no-model": {k: v for k, v in good.items() if k != "model"}}
    for name, value in bad.items():
        put("tokenizer", "bad-" + name, b"\1" + dump(value).encode())
    put("tokenizer", "bad-json", b"\1{\"model\":")


def chat():
    system, user, assistant, developer, tool, reminder = (bytes([i]) for i in range(6))
    def message(role, *fields):
        return role + b"\xfe".join(f.encode() if isinstance(f, str) else f for f in fields) + b"\xff"
    weather = '{"name": "get_weather", "parameters": {"maximum": 1e-05, "enum": ["\\u00e9\\ud83d\\ude42"]}}'
    def talk(*options):
        head = message(system, "Be brief.", "", "", weather, '{"type":"json_object"}')
        return bytes(options) + head + message(user, "Weather?") + message(
            assistant, "Look:", "hm", "", "", "", "a", "get_weather", '{"city":"Bern","n":12345678901234567890}',
            "b", "get_weather", "[not an object") + message(tool, "22", "", "b") + message(
            tool, "23", "", "a") + message(user, "and?")
    put("chat", "ok-tools", talk(2))
    put("chat", "ok-tools-spelled", talk(3))
    put("chat", "ok-effort", talk(2 + 8 + (3 << 4)))
    put("chat", "ok-developer", b"\x02" + message(developer, "x", "", "", weather) + message(assistant, "y", "z") +
        message(reminder, "today") + message(user, "<｜User｜></think>｜DSML｜"))
    put("chat", "ok-marks", b"\x00" + message(user, "<｜end▁of▁sentence｜><｜Assistant｜>") + message(assistant, "<think>"))
    put("chat", "bad-empty", b"")
    put("chat", "bad-role", b"\x00" + message(b"\x06", "x"))
    put("chat", "bad-developer", b"\x00" + message(developer))
    put("chat", "bad-tool", b"\x00" + message(system, "", "", "", "{"))
    put("chat", "bad-deep", b"\x00" + message(system, "", "", "", "[" * 600 + "]" * 600))


def request():
    ok = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}]}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}}}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    talk = {"model": "m", "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": False,
            "reasoning_effort": "max", "stop": ["x", "yz"], "max_completion_tokens": 9, "seed": 7,
            "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "logprobs": True,
            "top_logprobs": 3, "chat_template_kwargs": {"thinking": True}, "metadata": {"a": "b"},
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Yes."},
                         {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                         {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [
                             {"type": "text", "text": "22"}, {"type": "image_url"}]}]}
    def chat_body(name, value):
        put("request", name, b"\0" + (value if isinstance(value, bytes) else dump(value).encode()))
    def completion(name, **more):
        put("request", name, b"\1" + dump({"model": "m"} | more).encode())
    chat_body("ok-chat", ok)
    chat_body("ok-tools", talk)
    chat_body("ok-no-tools", talk | {"tool_choice": "none"})
    chat_body("bad-model", ok | {"model": "other"})
    chat_body("bad-unknown", ok | {"mirostat": 2})
    chat_body("bad-twice", dump(ok)[:-1].encode() + b',"model":"m"}')
    chat_body("ok-required", talk | {"tool_choice": "required"})
    chat_body("ok-named", talk | {"tool_choice": {"type": "function", "function": {"name": "f"}}})
    chat_body("bad-choice", talk | {"tool_choice": {"type": "function", "function": {"name": "g"}}})
    chat_body("ok-strict", talk | {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, None]}}, "required": ["a"]}}}]})
    chat_body("bad-strict", talk | {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "if": {}}}}]})
    chat_body("bad-name", talk | {"tools": [{"type": "function", "function": {"name": 'f"'}}]})
    chat_body("ok-format", ok | {"response_format": {"type": "json_object"}, "frequency_penalty": 0.5,
                                 "logit_bias": {"5": -1.5}, "repetition_penalty": 1.1, "min_tokens": 3})
    chat_body("ok-schema", ok | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "anyOf": [{"type": "array", "items": {"type": "integer"}, "maxItems": 3}, {"const": "x"}]}}}})
    chat_body("ok-guided-choice", ok | {"guided_choice": ["a|b", "c."]})
    chat_body("bad-format", ok | {"response_format": {"type": "yaml"}})
    chat_body("bad-schema", ok | {"guided_json": '{"type": "object", "if": {}}'})
    chat_body("bad-two-forms", ok | {"guided_regex": "a", "guided_choice": ["a"]})
    chat_body("bad-bias", ok | {"logit_bias": {"5": 101}})
    chat_body("bad-last", ok | {"messages": ok["messages"] + [{"role": "assistant", "content": "x"}]})
    chat_body("bad-integer", b'{"model":"m","seed":99999999999999999999}')
    chat_body("bad-utf8", b'{"model":"\xff"}')
    chat_body("bad-deep", b"[" * 3000)
    completion("ok-text", prompt="Once", max_tokens=3, stop="\n")
    completion("ok-ids", prompt=[1, 2, 3], logprobs=2)
    completion("ok-regex", prompt="x", structured_outputs={"regex": "[a-c]+(x|yz){2,3}"})
    completion("bad-regex", prompt="x", guided_regex="(?=a)")
    completion("bad-id", prompt=[1 << 20])
    completion("bad-suffix", prompt="x", suffix="y")
    completion("bad-empty", prompt=[])
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": "b"}}
    talk = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x"],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}], "temperature": 0.5,
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"},
            "messages": [{"role": "user", "content": "Weather?"},
                         {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
                                                           {"type": "text", "text": "Look:"}, used]},
                         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
                             {"type": "text", "text": "22"}], "is_error": False}, {"type": "text", "text": "and?"}]}]}
    def message(name, value):
        put("request", name, b"\2" + dump(value).encode())
    message("ok-messages", talk)
    message("ok-messages-plain", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]})
    message("bad-messages-limit", {k: v for k, v in talk.items() if k != "max_tokens"})
    message("bad-messages-image", talk | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    message("ok-messages-tool", talk | {"tool_choice": {"type": "tool", "name": "f"}})
    message("ok-messages-any", talk | {"tool_choice": {"type": "any"}, "output_config": {"format": {
        "type": "json_schema", "schema": {"type": "string"}}}})
    message("bad-messages-choice", talk | {"tool_choice": {"type": "tool", "name": "g"}})
    message("bad-messages-role", talk | {"messages": [{"role": "tool", "content": "x"}]})
    completion("ok-prompts", prompt=["Once", "Twice"], n=2)
    completion("bad-prompts", prompt=["Once", [1, "x"]])
    talk = {"model": "m", "instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}, "tool_choice": "auto",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
            "reasoning": {"effort": "max", "summary": "auto"}, "text": {"format": {"type": "text"}}, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"], "input": [
                {"role": "developer", "content": "Yes."}, {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": "Look:"},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "22"}, {"type": "input_image"}]}]}
    def response(name, value):
        put("request", name, b"\3" + dump(value).encode())
    response("ok-response", talk)
    response("ok-response-text", {"model": "m", "input": "x", "store": False})
    response("bad-response-input", talk | {"input": [{"type": "item_reference", "id": "x"}]})
    response("bad-response-previous", talk | {"previous_response_id": "resp_0"})
    response("bad-response-choice", talk | {"tool_choice": {"type": "web_search"}})
    response("bad-response-last", talk | {"input": talk["input"][:4]})


def json_texts():
    """The first byte: strict or loose."""
    ok = {"members": '{"a":{"b":[1,2.5e-3,-0,true,false,null]},"c":"\\u00e9\\uD83D\\uDE42\\n盐"}', "spaces": ' [ 1 ,\t{ } ,\r\n[] ] ',
          "word": "true", "keys": '{"\\t":"\\t","":{"\\u0041":["\\""]}}', "nul": '"\\u0000"', "long": str(1 - (1 << 63))}
    bad = {"empty": "", "twice": '{"a":1,"a":2}', "key": '{"\\u0000":1}', "half": '"\\uD83D"', "control": '"\x01"', "open": '[[{"a":',
           "behind": "[] 1", "comma": "[1,]", "zero": "01", "point": "1.", "huge": "1e999", "integer": str(1 << 63), "deep": "[" * 3000}
    for name, text in ok.items():
        put("json", f"ok-{name}", "0" + text)
    for name, text in bad.items():
        put("json", f"bad-{name}", "0" + text)
    put("json", "ok-loose", '1{"a":1,"a":' + str(1 << 70) + "}")
    put("json", "bad-utf8", b'0"\xed\xa0\x80"')


for old in CORPUS.glob("*/*"):
    if old.name.startswith(("ok-", "bad-")):
        old.unlink()
safetensors()
index()
config()
model()
reply()
chat()
request()
json_texts()
grammar()
tokenizer()
