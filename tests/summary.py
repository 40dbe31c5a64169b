#!/usr/bin/env python3
"""Adds up meson's test logs: the ten slowest, what failed, each skip's reason, then the one line

    tests: N passed, N failed, N skipped

usage: summary.py TESTLOG.json...      exit code 1 when a test failed or none ran
"""
import json
import sys


def show(results, failed=0):
    """(where, a line of a test log) of each test; the exit code. `failed`: what is no test's and failed."""
    passed = skipped = 0
    took = []
    for where, r in results:
        name = f"{where}: {r['name']}"
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
    return 1 if failed or not passed else 0


def main():
    results, unread = [], 0
    for path in sys.argv[1:]:
        try:
            with open(path, encoding="utf-8") as log:
                results += [(path.split("/")[0], json.loads(line)) for line in log]
        except OSError as e:
            print(f"no test log: {e}")
            unread += 1
    return show(results, unread)


if __name__ == "__main__":
    sys.exit(main())
