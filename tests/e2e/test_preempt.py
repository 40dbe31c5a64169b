#!/usr/bin/env python3
"""A pool that is too small for everybody at once, and a worker that dies behind an answer nobody has
seen yet: the texts are those of the same requests alone.

usage: test_preempt.py BUILD [unittest arguments]"""
import concurrent.futures
import os
import pathlib
import random
import signal
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

N = 300  # tokens of an answer


# What depends on the tokens before, which an attempt that goes on has in its prompt.
WISHES = [{}, {"frequency_penalty": 0.4, "presence_penalty": 0.6}, {"repetition_penalty": 1.2},
          {"logit_bias": {"200": 3, "300": -5, "1": 2}}, {"frequency_penalty": -0.1, "min_tokens": 290},
          {"repetition_penalty": 0.95, "logit_bias": {"400": 2}, "presence_penalty": 1}]


def asked(seed):
    rng = random.Random(seed)
    return {"model": "needle", "prompt": [0] + [rng.randrange(7, 1700) for _ in range(299)],
            "max_tokens": N, "temperature": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True,
            **WISHES[seed % 6]}


def counts(c):
    status, j = c.get("/v1/cluster")
    assert status == 200, j
    return j["counts"]


def whole(c, body):
    """(tokens, logprobs) of a completion that is not streamed"""
    status, j = c.post("/v1/completions", body)
    assert status == 200, j
    choice = j["choices"][0]
    assert choice["finish_reason"] == "length" and j["usage"]["completion_tokens"] == body["max_tokens"], j["usage"]
    assert j["usage"]["prompt_tokens"] == len(body["prompt"])
    return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


def streamed(c, body):
    tokens, logprobs, finish = [], [], None
    for chunk in c.stream("/v1/completions", body):
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            if choice.get("logprobs"):
                tokens += choice["logprobs"]["tokens"]
                logprobs += choice["logprobs"]["token_logprobs"]
    assert finish == "length", finish
    return tokens, logprobs


class TestFullPool(unittest.TestCase):
    def equal_to_alone(self, **settings):
        """Six hundred tokens take three pages each; eight are there, and two each reserved."""
        with e2e.Cluster(max_context=4096, pool_pages=8, reserve_tokens=16, max_running=8,
                         **settings) as c:
            bodies = [asked(seed) for seed in range(1, 7)]
            alone = [whole(c, b) for b in bodies]
            self.assertEqual(counts(c)["preempted"], 0)
            self.assertGreater(len({tuple(t) for t, _ in alone}), 5)
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                ways = [streamed, whole] * 3
                got = list(pool.map(lambda f, b: f(c, b), ways, bodies))
            for (tokens, logprobs), (want, want_logprobs) in zip(got, alone):
                self.assertEqual(len(tokens), N)
                self.assertEqual(tokens, want)
                self.assertEqual(logprobs, want_logprobs)
            after = counts(c)
            print("preempted", after["preempted"], "busy", after["busy"])
            self.assertGreater(after["preempted"], 0)
            self.assertEqual(after["retries"], 0)
            self.assertEqual(after["failed"], 0)
            c.wait_baseline()

    def test_disaggregated(self):
        self.equal_to_alone()

    @unittest.skipUnless(e2e.WHOLE, "one worker for both roles: tests/nightly")
    def test_colocated(self):
        self.equal_to_alone(router__colocate="on", cluster__prefill=0)

    def test_more_than_the_pool_is_refused_with_both_numbers(self):
        with e2e.Cluster(max_context=4096, pool_pages=8, max_running=2) as c:
            status, j = c.post("/v1/completions", asked(1) | {"max_tokens": 2000})
            self.assertEqual(status, 400, j)
            self.assertIn("2300", j["error"]["message"])
            self.assertIn("2048", j["error"]["message"])


class TestWholeAnswer(unittest.TestCase):
    def test_decode_dies_behind_an_unseen_answer(self):
        with e2e.Cluster(max_context=4096, max_running=4, cluster__decode=2) as c:
            body = asked(7) | {"max_tokens": 2 * N}  # longer, to be met under way
            alone = whole(c, body)
            got = []
            t = threading.Thread(target=lambda: got.append(whole(c, body)))
            t.start()
            until = time.monotonic() + e2e.PATIENCE
            victim = None
            while victim is None:
                assert time.monotonic() < until
                _, j = c.get("/v1/cluster")
                under_way = [r for r in j["requests"] if r["tokens"] >= 100]
                busy = [w["name"] for w in j["workers"] if w["role"] == "decode" and w["legs"]]
                victim = busy[0] if under_way and busy else None
                time.sleep(0.01)
            os.kill(c.pid(victim), signal.SIGKILL)
            t.join(e2e.PATIENCE)
            self.assertEqual(got, [alone])
            self.assertEqual(counts(c)["retries"], 1)
            r = c.tool("restart", victim, "--config", c.config)
            self.assertEqual(r.returncode, 0, r.stderr)


if __name__ == "__main__":
    e2e.main("__main__")
