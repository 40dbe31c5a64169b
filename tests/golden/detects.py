"""`tandem golden` on changed copies of a golden file: a wrong logit, a wrong greedy token.

usage: detects.py PROGRAM
"""
import copy
import json
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
program, failures = sys.argv[1], 0
with open(HERE + "/../data/golden/needle-nvfp4.json", encoding="utf-8") as f:
    CASE = json.load(f)["cases"][1]
TOP = max(map(abs, CASE["last_logits"]))


def check(what, want, low, high, mismatches, case, *options):
    global failures
    with tempfile.TemporaryDirectory() as d:
        path = d + "/golden.json"
        with open(path, "w", encoding="utf-8") as f:
            json.dump({"source": "changed", "cases": [case]}, f)
        r = subprocess.run([program, "--model", HERE + "/../../deploy/models/needle", "--golden", path,
                            *options], stdout=subprocess.PIPE, text=True)
    last = re.search(r"worst rel err (\S+), median (\S+), greedy mismatches (\d+)$", r.stdout.strip())
    if (not last or r.returncode != want or not low <= float(last[1]) <= high
            or last[1] != last[2] or int(last[3]) != mismatches):
        print(f"{what}: expected exit {want}, error {low}..{high}, {mismatches} mismatches; found "
              f"exit {r.returncode}:\n{r.stdout}")
        failures += 1


check("as recorded", 0, 0, 2e-5, 0, CASE)
off = copy.deepcopy(CASE)
off["last_logits"][777] += 2e-3 * TOP
check("a logit off by 2e-3", 1, 1.9e-3, 2.1e-3, 0, off)
check("the same as served", 0, 1e-3, 5e-3, 0, off, "--as-served")
off["last_logits"][777] += 8e-3 * TOP
check("a logit off by 1e-2, as served", 1, 9e-3, 1.1e-2, 0, off, "--as-served")
token = copy.deepcopy(CASE)
token["greedy_ids"][-1] ^= 1
check("the last greedy token changed", 1, 0, 2e-5, 1, token)
check("the same as served: no near-tie", 1, 0, 5e-3, 1, token, "--as-served")
print("detects:", "FAILED" if failures else "ok")
sys.exit(1 if failures else 0)
