"""`tandem index-diff` on the bundled model: bf16 keys keep the choice, fp8 keys do not; usage.

usage: index_diff.py PROGRAM MODEL
"""
import re
import subprocess
import sys

program, model = sys.argv[1:]
failures = 0


def run(want, *options):
    global failures
    r = subprocess.run([program, "index-diff", *options], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, text=True)
    print(r.stdout, end="")
    if r.returncode != want:
        print(f"{options}: expected exit {want}, found {r.returncode}")
        failures += 1
    return r.stdout


def shares(text):
    rows = re.findall(r"^ +(\d+) +([\d.]+) % +([\d.]+) % +([\d.]+) %$", text, re.M)
    return {int(layer): [float(x) for x in rest] for layer, *rest in rows}


def expect(what, fine):
    global failures
    if not fine:
        print("not so:", what)
        failures += 1


at = ["--model", model, "--length", "2051"]
plain = shares(run(0, *at, "--set", "numerics=plain"))
expect("the three CSA layers", sorted(plain) == [2, 4, 5])
expect("bf16 above 98 % everywhere", all(s[0] >= 98 for s in plain.values()))
expect("fp8 far below it in layer 4", 75 < plain[4][1] < 92)
expect("fp4 below fp8", all(s[2] < s[1] < s[0] for s in plain.values()))
said = run(1, *at, "--set", "index_key_dtype=fp8")
expect("the served type is named", "served fp8" in said and "FAILED" in said)
sim4 = shares(run(0, *at, "--set", "index_sim4=on", "--set", "index_key_dtype=fp4"))
expect("after sim4 fp4 and bf16 keys lose nothing", all(s[0] == s[2] == 100 for s in sim4.values()))
expect("--length that takes all", "--length" in run(1, "--model", model, "--length", "200"))
run(2, "--model", model)
run(2, "--length", "2051")
run(2, *at, "--set", "index_key_dtype=fp7")
run(0, "--help")
print("index-diff:", "FAILED" if failures else "ok")
sys.exit(1 if failures else 0)
