#!/usr/bin/env python3
"""A handoff changes nothing: for prompts of every residue that matters, prefill + transfer + decode
gives the tokens and logprobs of a decode worker that does it all itself.

usage: test_handoff.py BUILD [unittest arguments]"""
import pathlib
import random
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

CHUNK = 384  # of the prefill worker: neither a divisor nor a multiple of 256 alone


def lengths():
    found = set(range(1, 10))
    for edge in (128, 256, CHUNK, 512, 768, 1024):
        found |= set(range(edge - 2, edge + 3))
    found |= set(range(640, 656))  # every residue of 4 away from any edge, and more
    found |= {2051, 2053, 3001}
    return sorted(found)


class TestHandoff(unittest.TestCase):
    def answers(self, prompts, **settings):
        got = []
        with e2e.Cluster(max_context=4096, chunk_tokens=CHUNK, **settings) as c:
            client = c.client()
            for p in prompts:
                r = client.completions.create(model="needle", prompt=p, max_tokens=6, temperature=0,
                                              logprobs=2, extra_body={"ignore_eos": True})
                got.append((r.choices[0].logprobs.tokens, r.choices[0].logprobs.token_logprobs,
                            r.usage.prompt_tokens))
            handoffs = c.wait_baseline()["decode@0"]["handoffs_ok"]
        return got, handoffs

    def compare(self, pairs, **settings):
        """`pairs`: settings of clusters whose answers must be those of one worker for both roles."""
        seed = random.SystemRandom().randrange(1 << 32)
        print("seed", seed)
        rng = random.Random(seed)
        prompts = [[0] + [rng.randrange(7, 1700) for _ in range(n - 1)] for n in lengths()]
        together, none = self.answers(prompts, router__colocate="on", cluster__prefill=0, **settings)
        self.assertEqual(none, 0)
        for pair in pairs:
            apart, handoffs = self.answers(prompts, **pair, **settings)
            self.assertGreaterEqual(handoffs, len(prompts))
            for p, a, b in zip(prompts, apart, together):
                self.assertEqual(a, b, f"prompt of {len(p)} tokens, seed {seed}, {pair}")
                self.assertEqual(a[2], len(p))

    def test_equal_to_colocated(self):
        self.compare([{}])

    @unittest.skipUnless(e2e.WHOLE, "five clusters of several ranks: tests/nightly")
    def test_workers_of_other_sizes(self):
        two = {"tp": 2, "threads": 2}
        self.compare([{"prefill": two}, {"decode": two}])
        self.compare([{"decode": two}, {"prefill": two, "decode": two}], kv_layout="split")


if __name__ == "__main__":
    e2e.main("__main__")
