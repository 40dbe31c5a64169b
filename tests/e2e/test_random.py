#!/usr/bin/env python3
"""A cluster of random weights: nothing but config.json and a tokenizer on the disk; the same seed gives
the same text in another cluster and in another storage of nothing else, another seed another one.

usage: test_random.py BUILD [unittest arguments]"""
import pathlib
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

PROMPT = [0] + [7 + k * 29 % 1600 for k in range(299)]


class TestRandom(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = pathlib.Path(tempfile.mkdtemp(prefix="tandem-random-", dir="/tmp"))
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(e2e.MODEL / name, cls.dir)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.dir)

    def text(self, **settings):
        with e2e.Cluster(model__dir=self.dir, load_format="random", numerics="auto", **settings) as c:
            status, j = c.post("/v1/completions", {"model": "needle", "prompt": PROMPT, "max_tokens": 40,
                                                   "temperature": 0, "ignore_eos": True, "logprobs": 1})
            self.assertEqual(status, 200, j)
            self.assertEqual(j["usage"]["completion_tokens"], 40)
            shown = c.get("/v1/cluster")[1]
            self.assertIn("random", str(shown))
            return j["choices"][0]["text"], j["choices"][0]["logprobs"]["token_logprobs"]

    def test_seed_is_the_model(self):
        first = self.text(random__seed=5)
        self.assertTrue(all(-50 < p <= 0 for p in first[1]), first)
        self.assertEqual(self.text(random__seed=5), first)
        self.assertNotEqual(self.text(random__seed=6), first)

    def test_other_layers_and_format(self):
        few = self.text(random__layers="4,128", random__format="nvfp4")
        self.assertNotEqual(self.text(random__layers="4,128", random__format="fp4"), few)

    def test_without_weights_a_checkpoint_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "safetensors"):
            with e2e.Cluster(model__dir=self.dir):
                pass

    def test_layers_are_checked(self):
        for bad in ("0,5", "4,", ",", "4 128"):
            with self.assertRaisesRegex(RuntimeError, "random.layers"):
                with e2e.Cluster(model__dir=self.dir, load_format="random", random__layers=bad):
                    pass


if __name__ == "__main__":
    e2e.main(__name__)
