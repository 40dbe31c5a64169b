#!/usr/bin/env python3
"""A pool far smaller than the model's context: its size is a limit that clients are told, a full one
is answered with 429 and a time, and nobody gets another's text.

usage: test_small_pool.py BUILD [unittest arguments]"""
import concurrent.futures
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

PAGES = 4
LIMIT = 256 * PAGES


def prompt(n, i=0):
    return [0] + [7 + (i * 131 + k * 29) % 1600 for k in range(n - 1)]


class TestSmallPool(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.c = e2e.Cluster(pool_pages=PAGES, max_running=8, queue_timeout_ms=1000)
        cls.c.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.c.__exit__(None, None, None)

    def tearDown(self):
        self.c.wait_baseline()

    def ask(self, ids, **more):
        """(status, answer, headers)"""
        return self.c.post_whole("/v1/completions", {"model": "needle", "prompt": ids, "temperature": 0,
                                                     "ignore_eos": True, **more})

    def answer(self, ids, **more):
        status, j, _ = self.ask(ids, **more)
        self.assertEqual(status, 200, j)
        return j

    def test_no_output_limit_given(self):
        r = self.answer(prompt(1000))
        self.assertEqual(r["choices"][0]["finish_reason"], "length")
        self.assertEqual(r["usage"]["total_tokens"], LIMIT)

    def test_limit_in_tokens(self):
        self.assertEqual(self.answer(prompt(LIMIT - 8), max_tokens=8)["usage"]["total_tokens"], LIMIT)
        for n, new in ((LIMIT - 8, 9), (LIMIT, 1), (5 * LIMIT, 1)):
            status, j, _ = self.ask(prompt(n), max_tokens=new)
            self.assertEqual(status, 400, j)
            self.assertIn(f" {n} tokens", j["error"]["message"])
            self.assertIn(f" {LIMIT} tokens", j["error"]["message"])

    def test_full(self):
        alone = self.answer(prompt(300, 1), max_tokens=500)["choices"][0]["text"]

        def one(_):
            status, j, headers = self.ask(prompt(300, 1), max_tokens=500)
            if status == 200:
                return j["choices"][0]["text"]
            self.assertEqual(status, 429, j)
            self.assertGreaterEqual(int(headers["Retry-After"]), 1)
            return None

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            got = list(pool.map(one, range(12)))
        self.assertIn(alone, got)
        self.assertIn(None, got)
        self.assertLessEqual(set(got), {alone, None})


if __name__ == "__main__":
    e2e.main(__name__)
