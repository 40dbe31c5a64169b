#!/usr/bin/env python3
"""The targets of a build folder that its tests need and what is installed, one a line: `ninja` alone would also
build what no test of these suites runs.

usage: needed.py BUILD [SUITE...]      without the tests of these suites"""
import json
import pathlib
import sys


def needed(build, without):
    """Paths from the build folder, sorted."""
    info = pathlib.Path(build) / "meson-info"
    targets = json.loads((info / "intro-targets.json").read_text())
    files = {t["id"]: t["filename"] for t in targets}
    found = {f for t in targets if t["installed"] for f in t["filename"]}
    for test in json.loads((info / "intro-tests.json").read_text()):
        if not without & {s.split(":")[-1] for s in test["suite"]}:
            found |= {f for d in test["depends"] for f in files[d]}
    root = pathlib.Path(build).resolve()
    return sorted(str(pathlib.Path(f).resolve().relative_to(root)) for f in found)


if __name__ == "__main__":
    print("\n".join(needed(sys.argv[1], set(sys.argv[2:]))))
