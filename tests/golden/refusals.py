"""What `tandem golden` refuses, and with which words and exit code: wrong usage 2, else 1.

usage: refusals.py PROGRAM
"""
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = HERE + "/../../deploy/models/needle"
GOLDEN = HERE + "/../data/golden/needle-nvfp4.json"
program, failures = sys.argv[1], 0


def check(want, words, *args):
    global failures
    r = subprocess.run([program, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = r.stdout + r.stderr
    missing = [w for w in words if w not in said]
    if r.returncode != want or missing or "golden: cases" in r.stdout:
        print(f"{args}: expected exit {want}, found {r.returncode}; missing {missing} in: {said}")
        failures += 1


def with_case(folder, name, case, source="x"):
    path = f"{folder}/{name}"
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"source": source, "cases": [case]}, f)
    return path


def with_taps(folder, name, meta):
    header = json.dumps({"__metadata__": meta}).encode()
    with open(f"{folder}/{name}", "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
    return f"{folder}/{name}"


on = ["--model", MODEL, "--golden"]
plain = {"prompt_ids": [0, 3], "greedy_ids": [1], "last_logits": [0.5] * 2048}

r = subprocess.run([program, "--help"], stdout=subprocess.PIPE, text=True)
if r.returncode != 0 or "usage: tandem golden" not in r.stdout:
    print("--help: expected usage and exit 0")
    failures += 1
check(2, ["--model"], "--golden", GOLDEN)
check(2, ["--golden"], "--model", MODEL)
check(2, ["--device", "tpu"], *on, GOLDEN, "--device", "tpu")
check(2, ["unknown option"], *on, GOLDEN, "--frob")
check(2, ["unexpected argument"], *on, GOLDEN, "more")
check(2, ["--set", "nonsense"], *on, GOLDEN, "--set", "nonsense=1")
check(2, ["--set", "index_key_dtype"], *on, GOLDEN, "--set", "index_key_dtype=fp7")
check(1, ["expected plain", "found ref"], *on, GOLDEN, "--set", "numerics=ref")
check(2, ["--set", "numerics"], *on, GOLDEN, "--set", "numerics=exact")
check(1, ["force_ref", "softmax"], *on, GOLDEN, "--set", "force_ref=softmax")
check(1, ["cannot be opened"], *on, "/nonexistent/golden.json")
check(1, ["config.json"], "--model", "/nonexistent", "--golden", GOLDEN)
with tempfile.TemporaryDirectory() as d:
    both = {"prompt_ids": [0], "ref_bf16key": {}, "ref_fp4key": {}}
    as_plain = ["--set", "numerics=plain"]
    check(1, ["expected ref", "found plain"], *on, with_case(d, "a.json", both), *as_plain)
    check(1, ["expected ref"], *on, with_case(d, "b.json", plain, "as c (ref_bf16key)"), *as_plain)
    check(1, ["expected ref"], *on, with_case(d, "needle-x-ref.json", plain), *as_plain)
    check(1, ["greedy_ids"], *on, with_case(d, "a.json", both))
    check(1, ["numerics plain", "found ref"], *on, with_taps(d, "t.safetensors", {"numerics": "ref"}))
    check(1, ["numerics ref", "found plain"], *on,
          with_taps(d, "t-ref.safetensors", {"numerics": "plain"}))
    check(1, ["ids"], *on, with_taps(d, "p.safetensors", {"numerics": "plain"}))
    check(1, ["last_logits", "2048"], *on, with_case(d, "c.json", plain | {"last_logits": [1]}))
    check(1, ["prompt_ids[1]", "2047"], *on, with_case(d, "d.json", plain | {"prompt_ids": [0, 2048]}))
    check(1, ["prompt_ids"], *on, with_case(d, "e.json", plain | {"prompt_ids": []}))
    check(1, ["selected_last4"], *on, with_case(d, "f.json", {"prompt_ids": [0]}))
    check(1, ["selected_last4.2"], *on,
          with_case(d, "g.json", {"prompt_ids": [0] * 9, "selected_last4": {"2": []}}))
    bad = f"{d}/h.json"
    with open(bad, "w", encoding="utf-8") as f:
        f.write('{"cases": [')
    check(1, ["h.json", "expected JSON"], *on, bad)
print("refusals:", "FAILED" if failures else "ok")
sys.exit(1 if failures else 0)
