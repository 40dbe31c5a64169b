#!/usr/bin/env python3
"""`tandem plan` from a config.json and nothing else: both roles, every line, the table; the format read
from any revision of the file; what does not fit is exit code 1 and names a setting that then fits. And
--presets: what they hold is what each role's own plan says, and predictions are the worked numbers.

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
        two = self.model(o_groups=2)
        r = plan("--model", two, "--memory", 96, "--gpus", 4)
        self.assertEqual(r.returncode, 1)
        self.assertIn("4 ranks share the model's 2 output groups", r.stderr)

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

    # ---- presets ----

    def presets(self, *args):
        """{preset: its lines}, and the lines before them."""
        text = self.fits("--model", self.model(), "--format", "nvfp4", "--presets", *args)
        head, *parts = re.split(r"(?m)^(?=[\d+x]+: )", text)
        return {p.split(":")[0]: p for p in parts}, head

    def balance(self, part):
        """{context: (batch, P, D, GPUs for prefill, for decode, requests/s of prefill, of decode, goodput, %)}"""
        rows = re.findall(r"^ +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+) %",
                          part, re.M)
        return {int(r[0]): tuple(float(x) for x in r[1:]) for r in rows}

    def test_presets_hold_what_plans_say(self):
        parts, _ = self.presets()
        self.assertEqual(list(parts), ["4+4", "2x2+4", "2+2+2+2"])
        for name, part in parts.items():
            with tempfile.NamedTemporaryFile("w", suffix=".conf") as f:
                f.write(subprocess.run([TANDEM, "topology", name], text=True, capture_output=True).stdout)
                f.flush()
                text = self.fits("--model", self.model(), "--format", "nvfp4", "--config", f.name, "--memory", 96)
            for role in ("prefill", "decode"):
                own = re.search(rf"^{role}: .*?(?=^\w|\Z)", text, re.M | re.S)[0]
                tokens = int(re.search(r"pages of 256 tokens, (\d+) tokens", own)[1])
                workers, ranks, each, total = map(int, re.search(
                    rf"^  {role} +(\d+) x tp (\d) +(\d+) pool tokens each, +(\d+) in all", part, re.M).groups())
                self.assertEqual((each, total), (tokens, workers * tokens), name)
                self.assertIn(f"{ranks} GPUs of 96.0 GB", own)
                if role == "decode":
                    held = {int(k) * 1024: int(n) for n, k in
                            re.findall(r" (\d+) of (\d+)K", part.split("at once:")[1].split("\n")[0])}
                    shown = dict((int(c), workers * int(n)) for c, n in re.findall(r"^ +(\d+)  (\d+)$", own, re.M))
                    self.assertEqual(held, {c: n for c, n in shown.items() if c in held})
                    self.assertIn(int(re.search(r"max_context (\d+)", part)[1]), held)

    def test_predictions_are_the_worked_numbers(self):
        parts, head = self.presets()
        self.assertIn("predicted", head.splitlines()[0])
        self.assertRegex(head, r"model: a decode step reads 7\.77 GB, of which every rank reads 2\.\d\d, and in each of 43 layers\n"
                         r"  6 \(1 sequence\) to 200 \(64\) experts of 14\.16 MB")
        kv = {int(c): float(mb) for c, mb in re.findall(r"^ +(\d+) +([\d.]+) +[\d.]+ +[\d.]+ \(", head, re.M)}
        flop = {int(c): float(g) for c, g in re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +([\d.]+) \(", head, re.M)}
        for context, mb, gflop in ((8192, 40.1, 28.0), (32768, 151, 29.4), (131072, 593, 34.6)):
            self.assertAlmostEqual(kv[context] / mb, 1, delta=0.01)
            self.assertAlmostEqual(flop[context] / gflop, 1, delta=0.01)
        # worked as if ranks shared every byte; what each reads whole, the KV state too, costs more
        rows = self.balance(parts["4+4"])
        for context, p, d, share in ((8192, 1.17, 2.41, 74), (32768, 4.68, 2.47, 76)):
            batch, found_p, found_d, *_, found_share = rows[context]
            self.assertEqual(batch, 64)
            self.assertAlmostEqual(found_p / p, 1, delta=0.01)
            self.assertTrue(1.0 < found_d / d < 1.15, found_d)
            self.assertAlmostEqual(found_share, share, delta=4)
        self.assertAlmostEqual(rows[131072][1], 18.72, delta=0.01)
        self.assertGreater(rows[131072][2], 2.6)
        for part in parts.values():
            for context, (_, p, d, best_p, best_d, rate_p, rate_d, goodput, share) in self.balance(part).items():
                self.assertAlmostEqual(best_p + best_d, 8, delta=0.11)
                self.assertAlmostEqual(best_p / best_d, p / d, delta=0.05 * p / d)
                self.assertEqual(goodput, min(rate_p, rate_d))
                self.assertAlmostEqual(goodput * (p + d) / 8 * 100, share, delta=3)

    def test_assumptions(self):
        parts, head = self.presets("--prefill-rate", 14000, "--output", 2048, "--floor-share", 30, "--gpu-read", 2.9,
                                   "--reduction-us", 7.5, "--link", 82)
        before = self.balance(self.presets()[0]["4+4"])[8192]
        after = self.balance(parts["4+4"])[8192]
        self.assertAlmostEqual(after[1], before[1] / 2, delta=0.01)
        self.assertAlmostEqual(after[2], before[2] * 2 * 2 / 2, delta=0.02)
        for line in ("--prefill-rate 14000 ", "--output 2048 ", "--floor-share 30 ", "--gpu-read 2.90 ", "--link 82 ",
                     "--reduction-us 7.5 "):
            self.assertIn(line, head)
        self.assertRegex(parts["4+4"], r"decode step, 4 ranks: 86 of 16 KB .*for 1 sequence, 135 MB\s+for 64; 0\.6[45] ms")

    def test_reductions_and_kv(self):
        parts, _ = self.presets()
        four, two = parts["4+4"], parts["2+2+2+2"]
        # fp32 is twice the worked 67 MB in bf16, so 0.42 s a chunk where that is 0.21
        self.assertRegex(four, r"chunk of 8192, 4 ranks: 86 of 134 MB: a rank receives 17\.3 GB; 0\.42 s, 52 us a token:\s+"
                         r"at most 19\d\d\d prompt tokens/s a worker before any arithmetic, LESS than the 28000 assumed")
        self.assertRegex(two, r"chunk of 4096, 2 ranks: 86 of 67 MB: a rank receives 5\.8 GB; 0\.14 s, 34 us a token:\s+"
                         r"at most 29\d\d\d .*beside the 14000 assumed")
        self.assertRegex(four, r"a rank receives 4\.2 MB for 1 sequence")
        for part, ranks in ((four, 4), (two, 2)):
            roles = re.findall(r"^    (replicate|split) +(\d+) +[\d.]+ GB +(\d+) of 128K +([\d.]+) MB +([\d.]+) MB/(\d+) "
                               r"+(\d+) MB/(\d+)$", part, re.M)
            self.assertEqual([r[0] for r in roles], ["replicate", "split"] * 2)
            for whole, split in (roles[:2], roles[2:]):
                self.assertAlmostEqual(int(split[1]) / int(whole[1]) / ranks, 1, delta=0.02)
                self.assertGreaterEqual(int(split[2]), int(whole[2]))
                # beside the sums of 43 layers and the embedding, in 41 of them queries and parts of 64 heads, in
                # 21 of these candidates
                sums, others = 87 * 2 * 4096 * 4, (ranks - 1) / ranks
                parts_of = 41 * 64 * (2 * 512 + 2) * 4 + 21 * ranks * 512 * 8
                self.assertAlmostEqual(float(whole[3]), sums * others / 1e6, delta=0.006)
                self.assertAlmostEqual(float(split[3]), (sums + parts_of) * others / 1e6, delta=0.006)
                for r in (whole, split): # in proportion
                    self.assertAlmostEqual(float(r[4]) / int(r[5]) / float(r[3]), 1, delta=0.05)
                    self.assertAlmostEqual(float(r[6]) / int(r[7]) / float(r[3]), 1, delta=0.05)
            read, less = re.search(r"a rank reads ([\d.]+) GB in a step of \d+ at 128K replicated, ([\d.]+) split", part).groups()
            self.assertGreater(float(read), float(less))

    def test_layouts_of_one_role(self):
        plain = ("--model", self.model(), "--format", "nvfp4", "--memory", 96, "--gpus", 4, "--role", "decode")
        text, split = self.fits(*plain), self.fits(*plain, "--set", "kv_layout=split")
        tokens = [int(re.search(r"pages of (\d+) tokens", t)[1]) for t in (text, split)]
        self.assertEqual(tokens, [256, 1024])
        shown = re.search(r"^  KV state by kv_layout.*\Z", text, re.M | re.S)[0]
        self.assertIn(shown, split)
        for name, t in (("replicate", text), ("split", split)):
            all_tokens = re.search(r"pages of \d+ tokens, (\d+) tokens", t)[1]
            self.assertRegex(shown, rf"{name} +{all_tokens} ")
        self.assertNotIn("KV state by", self.fits(*plain[:-3], 1, *plain[-2:], "--memory", 400))

    def test_presets_that_do_not_fit(self):
        r = plan("--model", self.model(), "--format", "nvfp4", "--presets", "--memory", 80)
        self.assertEqual(r.returncode, 1)
        self.assertIn("2+2+2+2: prefill: weights", r.stderr)
        self.assertRegex(r.stdout, r"(?m)^4\+4: ")
        self.assertNotRegex(r.stdout, r"(?m)^2\+2\+2\+2: ")

    def test_wrong_use(self):
        for args, word in [(("--format", "int8"), "int8"), (("--gpus", "2"), "--memory"), (("--gpus", "3", "--memory", "96"), "1, 2, 4 or 8"), (("--memory", "x"), "--memory"),
                           (("--role", "router"), "router"), (("here",), "here"),
                           (("--presets", "--gpus", "2", "--memory", "96"), "--presets"), (("--output", "0"), "--output"),
                           (("--floor-share", "200"), "--floor-share"), (("--link", ""), "--link"), (("--nonsense",), "unknown")]:
            r = plan(*args)
            self.assertEqual(r.returncode, 2, args)
            self.assertIn(word, r.stderr)
        r = plan()
        self.assertEqual(r.returncode, 1)
        self.assertIn("model.dir", r.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
