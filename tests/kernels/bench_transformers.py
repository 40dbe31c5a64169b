#!/usr/bin/env python3
"""Prefill beside Hugging Face transformers: the same bf16 checkpoint, the same two pinned cores, the
same run, turns taken. Theirs is float32 on torch; ours is bench_engine (plain numerics, fp32 sums).

usage: bench_transformers.py MODEL_DIR [--bench BUILD/tests/kernels/bench_engine] [--cores 0,1]
                             [--tokens 4509] [--rounds 5] [--chunk 512]

MODEL_DIR is a checkpoint without quantization (official or transformers names). Needs torch and a
transformers that knows DeepSeek-V4. Prints versions, the class and how its weights were loaded, every
round, and the ratio of medians. Exit code 2: something is missing, with a sentence. Nothing is
asserted about speed.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/kernels/model"))
from transformers_names import TRANSFORMERS as RENAME  # noqa: E402  used only where transformers does not map them
PROMPT = 4509  # what bench_engine's `prefill` part feeds

def fail(sentence):
    print(f"bench_transformers: {sentence}", file=sys.stderr)
    sys.exit(2)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=pathlib.Path)
    p.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/tests/kernels/bench_engine")
    p.add_argument("--cores", default="0,1")
    p.add_argument("--tokens", type=int, default=PROMPT)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--chunk", type=int, default=512)
    a = p.parse_args()
    a.cores = [int(c) for c in a.cores.split(",")]
    if not (a.model / "config.json").is_file():
        fail(f"{a.model}: expected a folder with config.json")
    if not a.bench.is_file():
        fail(f"{a.bench}: expected the program bench_engine; build it or say --bench")
    config = json.loads((a.model / "config.json").read_text())
    if "quantization_config" in config:
        fail(f"{a.model}: expected a checkpoint without quantization_config: both sides read bf16 weights")
    return a, config


def renamed(name):
    for pattern, to in RENAME:
        name = re.sub(pattern, to, name)
    return name


def state_dict(torch, folder, wanted):
    """The checkpoint in transformers' names, experts stacked (w1 rows before w3 rows)."""
    from safetensors.torch import load_file
    state, experts = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(str(path)).items():
            name = renamed(name)
            deeper = name.replace("indexer.weights_proj", "indexer.scorer.weights_proj")
            name = deeper if deeper in wanted else name
            tensor = tensor if tensor.dtype in (torch.int64, torch.int32) else tensor.float()
            m = re.match(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$", name)
            if m:
                experts.setdefault(m[1], {}).setdefault(int(m[2]), {})[m[3]] = tensor
            else:
                state[name] = tensor
    for prefix, by_number in experts.items():
        ordered = [by_number[i] for i in sorted(by_number)]
        state[prefix + ".gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in ordered])
        state[prefix + ".down_proj"] = torch.stack([e["down"] for e in ordered])
    return state


def without(keys, pattern=r"(rotary|inv_freq|^mtp\.)"):
    return sorted(k for k in keys if not re.search(pattern, k))


def load(torch, transformers, folder):
    """The model in float32 and how its weights came in; every parameter must have come from the file."""
    kind = transformers.AutoModelForCausalLM
    options = {"output_loading_info": True}
    missing = ["(not tried)"]
    for word in ("dtype", "torch_dtype"):
        try:
            model, info = kind.from_pretrained(str(folder), **{word: torch.float32}, **options)
            missing = without(info["missing_keys"]) + without(map(str, info.get("mismatched_keys", [])))
            if not missing:
                return model, "from_pretrained"
            print(f"from_pretrained left {len(missing)} parameters at random, e.g. {missing[:3]}")
            break
        except TypeError as e:
            print(f"from_pretrained({word}=...): {e}")
        except (ValueError, KeyError, OSError, RuntimeError) as e:
            print(f"from_pretrained: {type(e).__name__}: {str(e)[:300]}")
            break
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder))
        model = kind.from_config(config).float()
        result = model.load_state_dict(state_dict(torch, folder, set(model.state_dict())), strict=False)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as e:
        fail(f"transformers {transformers.__version__} cannot make this model: {type(e).__name__}: {str(e)[:300]}")
    missing = without(result.missing_keys)
    if missing:
        fail(f"{len(missing)} parameters of {type(model).__name__} are not in the checkpoint under the names "
             f"known here, e.g. {missing[:5]}; left over: {without(result.unexpected_keys)[:5]}")
    return model, "renamed by this script"


def prefill_of(torch, model, ids):
    """A function that runs the prompt once, and what it asks of the model."""
    last = {}
    for options in ({"use_cache": True, "logits_to_keep": 1}, {"use_cache": True},
                    {"use_cache": False, "logits_to_keep": 1}, {"use_cache": False}):
        def once(n=ids.shape[1], options=options):
            with torch.inference_mode():
                return model(input_ids=ids[:, :n], **options).logits[0, -1]
        try:
            once(300)
            return once, options
        except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, IndexError) as e:
            last[str(options)] = f"{type(e).__name__}: {str(e)[:200]}"
    fail(f"the model cannot run a prompt: {last}")


def ours(a):
    """Tokens per second of one prompt of 4,509 tokens, and the machine's share as it prints it."""
    run = subprocess.run([str(a.bench), str(a.model), str(len(a.cores)), str(a.chunk), "prefill"],
                         capture_output=True, text=True, check=False)
    m = re.search(r"prefill of 4,509 tokens: (\d+) tok/s", run.stdout)
    if run.returncode != 0 or not m:
        fail(f"{a.bench} said: {run.stdout[-300:]} {run.stderr[-300:]}")
    share = re.search(r"\d+ % of the machine's \d+", run.stdout)
    return float(m[1]), share[0] if share else ""


def cpu_name():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return "?"
    m = re.search(r"model name\s*:\s*(.*)", text)
    wide = [w for w in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{w}\b", text)]
    return f"{m[1] if m else '?'} ({' '.join(wide)})"


def main():
    a, config = arguments()
    try:
        os.sched_setaffinity(0, a.cores)  # before torch counts its cores; children inherit it
    except OSError as e:
        fail(f"cores {a.cores}: {e}; this process may use {sorted(os.sched_getaffinity(0))}")
    for word in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[word] = str(len(a.cores))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        import transformers
    except ImportError as e:
        fail(f"needs torch and transformers: {e}")
    torch.set_num_threads(len(a.cores))
    torch.manual_seed(1)
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{cpu_name()}, cores {a.cores}, torch threads {torch.get_num_threads()}")

    model, how = load(torch, transformers, a.model)
    model.eval()
    attention = getattr(model.config, "_attn_implementation", "?")
    experts = getattr(model.config, "_experts_implementation", "?")
    parameters = sum(p.numel() for p in model.parameters())
    types = sorted({str(p.dtype) for p in model.parameters()})
    print(f"{type(model).__module__}.{type(model).__name__} of {type(model.config).__name__}, {parameters} "
          f"parameters, {types}, attention {attention}, experts {experts}; weights {how}")

    ids = torch.randint(3, config["vocab_size"], (1, a.tokens))
    once, options = prefill_of(torch, model, ids)
    print(f"one forward pass over {a.tokens} tokens with {options}")
    logits = once()
    if not bool(torch.isfinite(logits).all()):
        fail("logits are not finite")

    theirs, mine = [], []
    for i in range(a.rounds):
        t0 = time.perf_counter()
        once()
        theirs.append(a.tokens / (time.perf_counter() - t0))
        rate, share = ours(a)
        mine.append(rate)
        print(f"round {i + 1}: transformers {theirs[-1]:.0f} tok/s, ours {rate:.0f} tok/s ({share})", flush=True)
    ratio = statistics.median(mine) / statistics.median(theirs)
    print(f"median of {a.rounds}: transformers float32 {statistics.median(theirs):.0f} tok/s, "
          f"ours {statistics.median(mine):.0f} tok/s at {PROMPT} tokens: {ratio:.1f} times")
    if a.tokens != PROMPT:
        print(f"note: transformers had {a.tokens} tokens, ours {PROMPT}")


main()
