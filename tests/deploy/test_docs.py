#!/usr/bin/env python3
"""Commands in documents are commands: every `tandem WORD --option` of an indented block or of inline code
in README.md, BENCHMARKS.md and deploy/*.md is in that command's --help.

usage: test_docs.py TANDEM [unittest arguments]"""
import pathlib
import re
import subprocess
import sys
import unittest

TANDEM = pathlib.Path(sys.argv[1]).resolve()
TREE = pathlib.Path(__file__).resolve().parents[2]


def commands(text):
    """Simple commands of a document's code, continued lines joined; of a table's alternatives all words."""
    text = re.sub(r"\\\n\s*", " ", text).replace("\\|", " ")
    for line in text.splitlines():
        for found in [line.split(" #")[0]] if line.startswith("    ") else re.findall(r"`([^`]+)`", line):
            yield from re.split(r"[;&|>]", found)


class TestDocs(unittest.TestCase):
    def test_commands(self):
        r = subprocess.run([TANDEM, "--help"], text=True, capture_output=True)
        helps, seen = dict.fromkeys(re.findall(r"^  (\S+) +\S", r.stdout, re.M)), 0
        for path in [TREE / "README.md", TREE / "BENCHMARKS.md", *sorted((TREE / "deploy").glob("*.md"))]:
            for command in commands(path.read_text()):
                m = re.match(r"\s*(?:sudo )?(?:\S*/)?tandem +([a-z][a-z-]*)\b(.*)", command)
                if not m:
                    continue
                name, rest = m.groups()
                self.assertIn(name, helps, f"{path.name}: {command}")
                helps[name] = helps[name] or subprocess.run([TANDEM, name, "--help"], text=True, capture_output=True).stdout
                for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
                    self.assertRegex(helps[name], rf"{option}(?![\w-])", f"{path.name}: {command}")
                    seen += 1
        self.assertGreater(seen, 40)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:], verbosity=2)
