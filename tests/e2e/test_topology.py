#!/usr/bin/env python3
"""A preset of `tandem topology` put on the CPU: its check finds nothing, `tandem up` starts every worker
that the file names, each with its own section, and workers of two ranks answer as a plain pair does.

usage: test_topology.py BUILD [unittest arguments]"""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

RANKS = 2  # the bundled model has two output groups
PROMPTS = [[0] + [7 + k * step % 1600 for k in range(280)] for step in (29, 31, 37)]


def ask(c):
    texts = []
    for prompt in PROMPTS:
        status, j = c.post("/v1/completions", {"model": "needle", "prompt": prompt, "max_tokens": 24, "temperature": 0,
                                               "ignore_eos": True, "logprobs": 1})
        assert status == 200, j
        texts.append((j["choices"][0]["text"], j["choices"][0]["logprobs"]["token_logprobs"]))
    return texts


class TestTopology(unittest.TestCase):
    def test_preset_on_the_cpu(self):
        with e2e.Cluster(max_context=8192) as c:
            plain = ask(c)
        c = e2e.Cluster()
        sets = {"device": "cpu", "tp": RANKS, "max_context": 8192, "run_dir": c.dir, "numerics": "plain",
                "model.name": "needle", "router.listen": c.settings["router.listen"], "threads": RANKS,
                "chunk_tokens": 512, "decode@1:max_running": 5}
        r = c.tool("topology", "2+2+2+2", "--model", e2e.MODEL, *(f"--set={k}={v}" for k, v in sets.items()))
        self.assertEqual(r.returncode, 0, r.stderr)
        c.config.write_text(r.stdout)
        r = c.tool("topology", "--check", c.config)
        self.assertEqual((r.returncode, r.stdout.splitlines()[-1]), (0, "0 errors, 0 warnings"), r.stdout)
        with c:
            workers = {w["name"]: w for w in c.get("/v1/cluster")[1]["workers"]}
            self.assertEqual(sorted(workers), ["decode@0", "decode@1", "prefill@0", "prefill@1"])
            self.assertEqual([workers[f"decode@{i}"]["max_running"] for i in range(2)], [32, 5])
            self.assertEqual([int(w["settings"]["tp"]) for w in workers.values()], [RANKS] * 4)
            self.assertEqual(ask(c), plain)
            c.wait_baseline()


if __name__ == "__main__":
    e2e.main("__main__")
