"""The same weights under every layout's names must load as the same rows, and a mixture of layouts
must be refused. Renamed copies are made here, by tables of their own, in a temporary folder.

usage: check_names.py WEIGHT_ROWS MODEL_NAME    (needle-bf16 | needle-fp8fp4 | needle-nvfp4)
Looks in deploy/models/needle (needle-nvfp4) and $TANDEM_TEST_DATA/models; exit 77: not there.
"""
import functools
import glob
import hashlib
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile

import transformers_names

ROOT = os.path.dirname(os.path.abspath(__file__)) + "/../../.."

TRANSFORMERS = [(r"\.scale$", ".weight_scale_inv"), *transformers_names.TRANSFORMERS]
SGLANG = [(r"^layers\.", "model.layers."), (r"gate\.tid2eid$", "topk.tid2eid")]
CONVERTER = [(r"^layers\.", "model.layers."), (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."),
             (r"\.scale$", ".weight_scale_inv"), (r"gate\.bias$", "gate.e_score_correction_bias")]

REFERENCE_KEYS = {
    "hidden_size": "dim", "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers", "num_hash_layers": "n_hash_layers",
    "num_nextn_predict_layers": "n_mtp_layers", "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts", "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale", "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps", "sliding_window": "window_size",
    "max_position_embeddings": "max_seq_len",
}
REFERENCE_SAME = ["vocab_size", "q_lora_rank", "o_groups", "o_lora_rank", "head_dim", "rope_theta",
                  "compress_rope_theta", "compress_ratios", "index_n_heads", "index_head_dim",
                  "index_topk", "n_routed_experts", "n_shared_experts", "swiglu_limit", "hc_mult",
                  "hc_sinkhorn_iters", "hc_eps"]


def find(name):
    places = [ROOT + "/deploy/models/needle"] if name == "needle-nvfp4" else []
    if os.environ.get("TANDEM_TEST_DATA"):
        places.append(os.environ["TANDEM_TEST_DATA"] + "/models/" + name)
    return next((p for p in places if os.path.exists(p + "/config.json")), None)


def read(folder):
    """name -> [dtype, shape, bytes]"""
    tensors = {}
    for path in sorted(glob.glob(folder + "/*.safetensors")):
        with open(path, "rb") as f:
            blob = f.read()
        n = int.from_bytes(blob[:8], "little")
        for name, e in json.loads(blob[8:8 + n]).items():
            if name != "__metadata__":
                b, end = e["data_offsets"]
                tensors[name] = [e["dtype"], e["shape"], blob[8 + n + b:8 + n + end]]
    return tensors


def write(folder, config, tensors, file="model.safetensors"):
    with open(folder + "/config.json", "w") as f:
        json.dump(config, f)
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder + "/" + file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.writelines(t[2] for t in tensors.values())


def rename(tensors, rules):
    out = {}
    for name, t in tensors.items():
        for pattern, to in rules:
            name = re.sub(pattern, to, name)
        assert name not in out, name
        out[name] = t
    return out


def stack(tensors, config):
    """transformers' own form: the experts of a layer in two tensors."""
    out = {k: v for k, v in tensors.items() if ".mlp.experts." not in k}
    n = config["n_routed_experts"]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}.mlp.experts."
        def part(e, what):
            return tensors[f"{base}{e}.{what}.weight"]
        dtype, (inner, hidden), _ = part(0, "gate_proj")
        out[base + "gate_up_proj"] = [dtype, [n, 2 * inner, hidden], b"".join(
            part(e, "gate_proj")[2] + part(e, "up_proj")[2] for e in range(n))]
        out[base + "down_proj"] = [dtype, [n, hidden, inner], b"".join(
            part(e, "down_proj")[2] for e in range(n))]
    return out


@functools.cache
def bf16(code, k):
    """An e4m3 code times 2^k."""
    man, exp = code & 7, code >> 3 & 15
    value = (1 + man / 8) * 2.0 ** (exp - 7) if exp else man * 2.0 ** -9
    return struct.pack("<f", math.copysign(value * 2.0 ** k, -1.0 if code >> 7 else 1.0))[2:]


def expand_wo_a(tensors):
    """As the reference converter: wo_a in bf16, which holds e4m3 times a power of two exactly."""
    out = dict(tensors)
    for name in [k for k in tensors if k.endswith("attn.wo_a.weight") and tensors[k][0] == "F8_E4M3"]:
        _, (rows, cols), data = out[name]
        _, (_, blocks), scales = out.pop(name.removesuffix("weight") + "scale")
        bits = []
        for i, code in enumerate(data):
            k = scales[i // cols // 128 * blocks + i % cols // 128] - 127
            bits.append(bf16(code, k))
        out[name] = ["BF16", [rows, cols], b"".join(bits)]
    return out


def reference_config(config):
    out = {new: config[old] for old, new in REFERENCE_KEYS.items()}
    out |= {k: config[k] for k in REFERENCE_SAME}
    rope = config["rope_scaling"]
    return out | {"original_seq_len": rope["original_max_position_embeddings"],
                  "rope_factor": rope["factor"], "beta_fast": rope["beta_fast"],
                  "beta_slow": rope["beta_slow"], "dtype": "fp8", "scale_fmt": "ue8m0",
                  "expert_dtype": "fp4"}


def without_quantisation(config):
    return {k: v for k, v in config.items()
            if k not in ("quantization_config", "quantization", "expert_dtype")}


def revisions(config):
    """config.json as revisions of the same files have it, and one that says nothing or lies."""
    plain = without_quantisation(config)
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
           "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    layers = range(config["num_hidden_layers"])
    yield "nothing said", plain
    yield "current", plain | {"quantization_config": fp8 | {
        "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16,
        "kv_cache_quant_algo": None, "ignore": ["*.attn.*", "head", "mtp.*"],
        "quantized_layers": {f"layers.{n}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
                             for n in layers}}}
    yield "first", plain | {"quantization": {
        "quant_algo": None, "kv_cache_quant_algo": None, "quantized_layers": {
            f"layers.{n}.ffn.experts.{e}.w{w}": {"quant_algo": "NVFP4", "awq_block_size": 16}
            for n in layers for e in range(config["n_routed_experts"]) for w in (1, 2, 3)}}}
    yield "another format named", plain | {"expert_dtype": "fp4", "quantization_config": fp8}


class Loader:
    def __init__(self, program):
        self.program = program

    def load(self, config, tensors, file="model.safetensors"):
        """(hash of all rows, fingerprint), or the sentence of the refusal."""
        with tempfile.TemporaryDirectory() as folder:
            write(folder, config, tensors, file)
            p = subprocess.run([self.program, folder], capture_output=True)
        said = p.stderr.decode().strip()
        if p.returncode:
            return said
        return hashlib.sha256(p.stdout).hexdigest(), said


def check(failures, what, ok, found):
    print(f"{'ok  ' if ok else 'FAIL'} {what}" + ("" if ok else f": {found}"))
    failures += [] if ok else [what]


def equal_layouts(loader, config, tensors, quantised, failures):
    want = loader.load(config, tensors)
    check(failures, "official names", isinstance(want, tuple), want)
    hugging = rename(tensors, TRANSFORMERS)
    for what, other in [("transformers, experts one by one", hugging),
                        ("SGLang", rename(tensors, SGLANG)),
                        ("transformers' modules, official words", rename(tensors, CONVERTER))]:
        found = loader.load(config, other)
        check(failures, what, found == want, found)
    draft = {"model.layers.%d.shared_head.norm.weight" % config["num_hidden_layers"]:
             ["BF16", [4], bytes(8)], "mtp.0.head.weight": ["BF16", [4], bytes(8)]}
    with_draft = config | {"compress_ratios": config["compress_ratios"] + [0]}
    found = loader.load(with_draft, rename(tensors, SGLANG) | draft)
    check(failures, "SGLang with a draft layer", found == want, found)
    found = loader.load(config, rename(tensors, SGLANG) | draft)
    check(failures, "a draft layer the configuration does not have is refused",
          "expected no such name" in found, found)
    for what, revision in revisions(config):
        found = loader.load(revision, tensors)
        check(failures, f"config.json, {what}", found == want, found)
    found = loader.load(reference_config(config), tensors, "model0-mp1.safetensors")
    check(failures, "reference configuration and file", found == want, found)
    if quantised:
        found = loader.load(reference_config(config), expand_wo_a(tensors))
        check(failures, "wo_a expanded to bf16", found[0] == want[0] and found[1] != want[1], found)
        found = loader.load(config, stack(hugging, config))
        check(failures, "stacked quantised experts are refused",
              "expected BF16 or F32 (quantised experts one by one)" in found, found)
    else:
        found = loader.load(config, stack(hugging, config))
        check(failures, "transformers, experts stacked", found[0] == want[0], found)


def refusals(loader, config, tensors, failures):
    """One layer under another layout's names, word by word; then names of no layout at all."""
    one = r"^(layers\.1\..*|embed\.weight)$"
    words = [r"^(layers\.)", r"\.(attn)\.", r"\.(ffn)\.", r"(attn_norm)", r"(embed)", r"(hc_attn)",
             r"(wq_a)", r"attn\.(compressor)", r"\.(w2)\.", r"gate\.(bias)", r"(\.scale)$"]
    for word in words:
        mixed, changed = {}, 0
        for name, t in tensors.items():
            other = next(iter(rename({name: t}, TRANSFORMERS)))
            wanted = re.search(one if "compressor" not in word else r"^layers\.2\.", name)
            use = wanted and re.search(word, name) and other != name
            mixed[other if use else name] = t
            changed += bool(use)
        if not changed:
            continue
        found = loader.load(config, mixed)
        check(failures, f"{changed} names of another layout by {word} are refused",
              "names of one layout throughout" in found and "beside" in found, found)
    for what, rules in [("blk.", [(r"^layers\.", "blk.")]), ("encoder.", [(r"^", "encoder.")])]:
        found = loader.load(config, rename(tensors, rules))
        check(failures, f"unknown names {what} are refused", "found nothing" in found, found)
    found = loader.load(config | {"dim": config["hidden_size"]}, tensors)
    check(failures, "a configuration of both kinds is refused", "found both" in found, found)
    hugging = rename(tensors, TRANSFORMERS)
    del hugging["model.layers.2.self_attn.compressor.indexer.q_b_proj.weight"]
    found = loader.load(config, hugging)
    check(failures, "a missing tensor is named", "layers.2.attn.indexer.wq_b.weight (its official "
          "name): expected by config.json, found nothing" in found, found)


def main():
    program, name = sys.argv[1:]
    folder = find(name)
    if not folder:
        print(f"skipped: {name} is read from $TANDEM_TEST_DATA/models, which is not there")
        return 77
    with open(folder + "/config.json") as f:
        config = json.load(f)
    loader, failures = Loader(program), []
    tensors = read(folder)
    equal_layouts(loader, config, tensors, name != "needle-bf16", failures)
    refusals(loader, config, tensors, failures)
    return int(bool(failures))


sys.exit(main())
