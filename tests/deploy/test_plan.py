#!/usr/bin/env python3
"""`tandem plan` from a config.json and nothing else: both roles, every line, the table; the format read
from any revision of the file; what does not fit is exit code 1 and names a setting that then fits.

usage: test_plan.py TANDEM CONFIG_DIR [unittest arguments]     CONFIG_DIR: of the real model"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TANDEM, REAL = sys.argv[1], pathlib.Path(sys.argv[2])


def plan(*args):
    return subprocess.run([TANDEM, "plan", *map(str, args)], text=True, capture_output=True)


def weights(text):
    return int(re.search(r"^ +weights +(\d+) bytes", text, re.M)[1])


class TestPlan(unittest.TestCase):
    def model(self, **changes):
        d = tempfile.TemporaryDirectory()
        self.addCleanup(d.cleanup)
        config = json.loads((REAL / "config.json").read_text()) | changes
        (pathlib.Path(d.name) / "config.json").write_text(json.dumps(config))
        return d.name

    def fits(self, *args):
        r = plan(*args)
        self.assertEqual(r.returncode, 0, r.stderr)
        return r.stdout

    def test_lines_and_table(self):
        text = self.fits("--model", self.model(), "--memory", 96, "--gpus", 4)
        for role in ("prefill", "decode"):
            part = re.search(rf"^{role}: .*?(?=^\w|\Z)", text, re.M | re.S)[0]
            for word in ("weights", "CSA entries", "indexer keys", "HCA entries", "windows", "CSA state",
                         "indexer state", "HCA state", "index workspace", "scratch", "graphs", "libraries",
                         "context", "slabs", "left free"):
                self.assertRegex(part, rf"(?m)^  .*{word}.* \d+ bytes")
            device, host = part.split("of the host:")
            for block in (device, host):
                lines = [int(n) for n in re.findall(r"^  \S.* (\d+) bytes", block.split("left free")[0], re.M)]
                self.assertEqual(sum(lines[:-1]), lines[-1], block)
            rows = [tuple(map(int, r)) for r in re.findall(r"^ +(\d+)  (\d+)$", part, re.M)]
            pages = int(re.search(r"(\d+) pages of 256", part)[1])
            self.assertEqual(rows[-1][0], 1 << 20)
            self.assertEqual([n for _, n in rows], [min(16, pages // -(-c // 256)) for c, _ in rows])

    def test_more_gpus_hold_more(self):
        last = 0
        for memory in (96, 141):
            for gpus in (2, 4):
                text = self.fits("--model", self.model(), "--memory", memory, "--gpus", gpus, "--role", "decode",
                                 "--set", "max_context=131072")
                pages = int(re.search(r"(\d+) pages of 256", text)[1])
                last = 0 if gpus == 2 else last
                self.assertGreater(pages, last)
                last = pages

    def test_refusals(self):
        m = self.model()
        r = plan("--model", m, "--memory", 96)
        self.assertEqual((r.returncode, r.stdout), (1, ""))
        self.assertEqual(r.stderr.count("more GPUs"), 2)
        args = ("--model", m, "--memory", 96, "--gpus", 2, "--format", "nvfp4", "--role", "decode")
        r = plan(*args)
        self.assertEqual(r.returncode, 1)
        largest = re.search(r"set max_context to at most (\d+)", r.stderr)[1]
        self.fits(*args, "--set", f"max_context={largest}")
        self.fits(*args, "--set", "mem_fraction=95")
        r = plan("--model", m, "--memory", 96, "--gpus", 3)
        self.assertEqual(r.returncode, 1)
        self.assertIn("divisor", r.stderr)

    def test_format_of_any_revision(self):
        fp4 = self.fits("--model", self.model(), "--role", "decode")
        self.assertIn("decode: fp4 weights", fp4)
        q = json.loads((REAL / "config.json").read_text())["quantization_config"]
        later = self.model(quantization_config=q | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"})
        first = self.model(quantization_config=q | {
            "quant_algo": None, "quantized_layers": {"layers.0.ffn.experts.0.w1": {"quant_algo": "NVFP4"}}})
        nvfp4 = [self.fits("--model", m, "--memory", 141, "--gpus", 2, "--role", "decode") for m in (later, first)]
        self.assertEqual(nvfp4[0], nvfp4[1])
        self.assertIn("decode: nvfp4 weights", nvfp4[0])
        given = self.fits("--model", later, "--memory", 141, "--gpus", 2, "--role", "decode", "--format", "fp4")
        self.assertLess(weights(given), weights(nvfp4[0]))
        self.assertIn("bf16 weights", self.fits("--model", self.model(quantization_config=None)))

    def test_wrong_use(self):
        for args, word in [(("--format", "int8"), "int8"), (("--gpus", "2"), "--memory"), (("--memory", "x"), "--memory"),
                           (("--role", "router"), "router"), (("here",), "here"), (("--nonsense",), "unknown")]:
            r = plan(*args)
            self.assertEqual(r.returncode, 2, args)
            self.assertIn(word, r.stderr)
        r = plan()
        self.assertEqual(r.returncode, 1)
        self.assertIn("model.dir", r.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
