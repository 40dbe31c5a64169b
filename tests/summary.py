#!/usr/bin/env python3
"""Adds up meson's test logs: the ten slowest, what failed, each skip's reason, then the one line

    tests: N passed, N failed, N skipped

usage: summary.py TESTLOG.json...      exit code 1 when a test failed or none ran
"""
import json
import sys

passed = failed = skipped = 0
took = []
for path in sys.argv[1:]:
    try:
        with open(path, encoding="utf-8") as log:
            results = [json.loads(line) for line in log]
    except OSError as e:
        print(f"no test log: {e}")
        failed += 1
        continue
    for r in results:
        name = f"{path.split('/')[0]}: {r['name']}"
        took.append((r["duration"], name))
        if r["result"] in ("OK", "EXPECTEDFAIL"):
            passed += 1
        elif r["result"] == "SKIP":
            skipped += 1
            said = (r.get("stdout") or "").strip() or (r.get("stderr") or "").strip()
            print(f"skipped {name}: {said.splitlines()[-1] if said else 'no reason given'}")
            if not said:
                failed += 1
        else:
            failed += 1
            print(f"failed {name}: {r['result']}")
print(f"the slowest of {sum(t for t, _ in took):.0f} s:")
for seconds, name in sorted(took, reverse=True)[:10]:
    print(f"{seconds:8.1f} s  {name}")
print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed or not passed else 0)
