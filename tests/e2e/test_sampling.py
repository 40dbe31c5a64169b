#!/usr/bin/env python3
"""Penalties, logit_bias and min_tokens by PyPI's openai client: every chosen token is held against
the model's own logprobs, which the answer carries, and the definition of what shapes them; wherever
the prompt is computed.

usage: test_sampling.py BUILD [unittest arguments]"""
import collections
import pathlib
import random
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

openai = e2e.need("openai")
OURS = ("ignore_eos", "min_tokens", "repetition_penalty", "top_k")
EOS = 1


def prompt(n, seed=1):
    rng = random.Random(seed)
    return [0] + [rng.randrange(7, 1700) for _ in range(n - 1)]


def ask(client, ids, tokens=40, **more):
    body = {"temperature": 0, "logprobs": 20, "ignore_eos": True, **more}
    ours = {k: body.pop(k) for k in OURS if k in body}
    return client.completions.create(model="needle", prompt=ids, max_tokens=tokens, extra_body=ours, **body)


def chosen(r):
    """(chosen token, {candidate: the model's logprob}) of every token"""
    l = r.choices[0].logprobs
    return list(zip(l.tokens, l.top_logprobs))


def best(candidates, shaped):
    """The candidate with the best shaped logprob, if none outside the list could be better."""
    first = max(candidates, key=shaped)
    return first if shaped(first) > min(candidates.values()) + 1e-4 else None


class Sampling:
    settings = {}

    @classmethod
    def setUpClass(cls):
        cls.cluster = e2e.Cluster(max_context=4096, max_running=4, **cls.settings)
        cls.cluster.__enter__()
        cls.client = cls.cluster.client()

    @classmethod
    def tearDownClass(cls):
        cls.cluster.wait_baseline()
        cls.cluster.__exit__(None, None, None)

    def test_frequency_and_presence(self):
        checked = repeated = 0
        for frequency, presence, seed in ((1.5, 0, 1), (0, 1.5, 2), (0.4, 0.7, 3), (-0.5, -0.5, 4)):
            got = chosen(ask(self.client, prompt(60, seed), frequency_penalty=frequency, presence_penalty=presence))
            seen = collections.Counter()
            for token, candidates in got:
                want = best(candidates, lambda t: candidates[t] - frequency * seen[t] - presence * (seen[t] > 0))
                if want is not None:
                    self.assertEqual(token, want)
                    checked += 1
                    repeated += token != max(candidates, key=candidates.get)
                seen[token] += 1
        print("checked", checked, "changed", repeated)
        self.assertGreater(checked, 100)
        self.assertGreater(repeated, 10)

    def test_logit_bias(self):
        ids = prompt(50)
        plain = ask(self.client, ids, tokens=3)
        token, candidates = chosen(plain)[0]
        second = sorted(candidates, key=candidates.get)[-2]
        self.assertEqual(token, "<｜end▁of▁sentence｜>")  # such a prompt means nothing to this model
        banned = chosen(ask(self.client, ids, tokens=3, logit_bias={str(EOS): -100}))
        self.assertEqual(banned[0][0], second)
        self.assertEqual(banned[0][1], candidates)  # logprobs stay the model's
        forced = chosen(ask(self.client, ids, tokens=8, logit_bias={"500": 100}))
        self.assertEqual(len({t for t, _ in forced}), 1)
        self.assertNotEqual(forced[0][0], token)

    def test_min_tokens(self):
        ids = prompt(50)
        for least in (0, 1, 2, 17):
            r = ask(self.client, ids, ignore_eos=False, min_tokens=least, logit_bias={str(EOS): 100}, logprobs=None)
            self.assertEqual(r.usage.completion_tokens, least + 1)
            self.assertEqual(r.choices[0].finish_reason, "stop")
        # stop strings too: each token's text, and not before
        words = {"logit_bias": {str(EOS): -100}}
        tokens = [t for t, _ in chosen(ask(self.client, ids, **words))]
        r = ask(self.client, ids, stop=tokens[:16], min_tokens=9, **words)
        self.assertTrue(r.choices[0].text.startswith("".join(tokens[:9])), (r.choices[0].text, tokens))
        self.assertEqual(r.choices[0].finish_reason, "stop")

    def test_repetition_counts_the_prompt(self):
        ids = prompt(50) + [500] * 3
        r = ask(self.client, ids, tokens=1, logit_bias={"500": 100, "501": 40})
        self.assertEqual(chosen(ask(self.client, ids, tokens=1, logit_bias={"500": 100, "501": 40}))[0][0],
                         chosen(r)[0][0])
        other = ask(self.client, ids, tokens=1, logit_bias={"500": 100, "501": 40}, repetition_penalty=5)
        self.assertNotEqual(chosen(other)[0][0], chosen(r)[0][0])  # 100 / 5 < 40
        fresh = ask(self.client, prompt(50), tokens=1, logit_bias={"500": 100, "501": 40}, repetition_penalty=5)
        if 500 not in prompt(50):
            self.assertEqual(chosen(fresh)[0][0], chosen(r)[0][0])

    def test_choices(self):
        ids, wish = prompt(300), {"frequency_penalty": 0.8, "repetition_penalty": 1.1, "logit_bias": {"700": 4}}
        r = ask(self.client, ids, temperature=1, seed=5, n=3, **wish)
        for c in range(3):
            seed = (5 + c * 0x9E3779B97F4A7C15) % 2**64
            seed = seed - 2**64 if seed >= 2**63 else seed
            alone = ask(self.client, ids, temperature=1, seed=seed, **wish)
            self.assertEqual(alone.choices[0].logprobs, r.choices[c].logprobs)
        # nobody else's business
        plain = ask(self.client, ids, temperature=1, seed=5)
        beside = [ask(self.client, ids, temperature=1, seed=5, **wish), ask(self.client, ids, temperature=1, seed=5)]
        self.assertEqual(beside[1].choices[0].logprobs, plain.choices[0].logprobs)
        self.assertNotEqual(beside[0].choices[0].logprobs.tokens, plain.choices[0].logprobs.tokens)


class TestDisaggregated(Sampling, unittest.TestCase):
    pass


class TestColocated(Sampling, unittest.TestCase):
    settings = {"router__colocate": "on", "cluster__prefill": 0}


if __name__ == "__main__":
    e2e.main("__main__")
