"""Runs one golden file and checks exit code and last line.

usage: run.py PROGRAM MODEL FILE pass|fail [option of `tandem golden`...]
MODEL: needle-bf16 | needle-fp8fp4 | needle-nvfp4 (also bundled as deploy/models/needle).
FILE: looked for in tests/data/golden, then in $TANDEM_TEST_DATA/golden. What is in neither place
is skipped (exit 77) with the reason.
"""
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
NUMBER = r"(\d+\.\d+e[-+]\d+|inf)"
LAST = re.compile(rf"golden: cases (\d+), worst rel err {NUMBER}, median {NUMBER}, greedy mismatches \d+$"
                  r"|golden: cases (\d+), overlap( layer \d+ \d+\.\d+ %,?)+$")


def find(bundled, below, needs):
    data = os.environ.get("TANDEM_TEST_DATA")
    for path in bundled + ([f"{data}/{below}"] if data else []):
        if os.path.exists(path):
            return path
    where = f"not in {data}" if data else "TANDEM_TEST_DATA is not set"
    print(f"skipped: needs {needs}; {where}")
    sys.exit(77)


def main():
    program, model, golden, expected, *options = sys.argv[1:]
    bundled = [HERE + "/../../deploy/models/needle"] if model == "needle-nvfp4" else []
    folder = find(bundled, "models/" + model, "the checkpoint " + model)
    path = find([HERE + "/../data/golden/" + golden], "golden/" + golden, "the golden file " + golden)
    r = subprocess.run([program, "--model", folder, "--golden", path, *options],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    print(r.stdout, end="")
    print(r.stderr, end="", file=sys.stderr)
    if "no GPU can be used here" in r.stderr:
        print(f"skipped: {r.stderr.strip()}")
        return 77
    lines = r.stdout.splitlines()
    last = LAST.match(lines[-1]) if lines else None
    if not last or int(last[1] or last[4]) < 1:
        print("the last line is not in the format of the tool")
        return 1
    want = {"pass": 0, "fail": 1}[expected]
    if r.returncode != want:
        print(f"exit code: expected {want}, found {r.returncode}")
    return int(r.returncode != want)


sys.exit(main())
