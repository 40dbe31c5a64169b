#!/usr/bin/env python3
"""Requests with n > 1 by PyPI's openai client: every choice is what a request of its own with the
choice's seed gives, to the last bit of its logprobs; one prompt is computed and handed over once;
nothing is left behind, whoever leaves, stops, is preempted or dies.

usage: test_choices.py BUILD [unittest arguments]"""
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

openai = e2e.need("openai")

STEP = 0x9E3779B97F4A7C15  # README: choice c of seed s is the answer to seed s + c * STEP


def choice_seed(seed, choice):
    s = (seed + choice * STEP) % 2**64
    return s - 2**64 if s >= 2**63 else s


def prompt(n, seed=1):
    rng = random.Random(seed)
    return [0] + [rng.randrange(7, 1700) for _ in range(n - 1)]


def asked(ids, n=1, seed=5, tokens=40, **more):
    return dict(model="needle", prompt=ids, n=n, seed=seed, max_tokens=tokens, temperature=1.0, logprobs=0,
                extra_body={"ignore_eos": True}) | more


def plain(choice):
    return (choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.text, choice.finish_reason)


def whole(client, **body):
    r = client.completions.create(**body)
    assert [c.index for c in r.choices] == list(range(body["n"])), r
    return [plain(c) for c in r.choices], r.usage


def streamed(client, **body):
    n = body["n"]
    tokens, logprobs, text, finish = [[[] for _ in range(n)] for _ in range(2)] + [[""] * n, [None] * n]
    usage, switches, last = [], 0, 0
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        if chunk.usage:
            usage.append(chunk.usage)
            assert not chunk.choices, chunk
        for c in chunk.choices:
            assert finish[c.index] is None, f"choice {c.index} goes on after its end"
            switches += c.index != last
            last = c.index
            text[c.index] += c.text
            finish[c.index] = c.finish_reason
            if c.logprobs:
                tokens[c.index] += c.logprobs.tokens
                logprobs[c.index] += c.logprobs.token_logprobs
    assert len(usage) == 1, usage
    assert n == 1 or switches > n, "the choices came one after the other"
    return list(zip(tokens, logprobs, text, finish)), usage[0]


def alone(client, ids, n, seed=5, **more):
    return [whole(client, **asked(ids, 1, choice_seed(seed, c), **more))[0][0] for c in range(n)]


def counts(c):
    return c.get("/v1/cluster")[1]["counts"]


class Choices:
    settings = {}

    @classmethod
    def setUpClass(cls):
        cls.c = e2e.Cluster(max_context=4096, max_running=6, pool_pages=64, **cls.settings)
        cls.c.__enter__()
        cls.client = cls.c.client()

    @classmethod
    def tearDownClass(cls):
        cls.c.__exit__(None)

    def test_each_is_a_request_of_its_own(self):
        # Lengths around a page's end: what is shared, what is copied, and where the first entry of a
        # page is closed by decode itself.
        for length in (3, 255, 256, 700):
            ids = prompt(length)
            want = alone(self.client, ids, 3)
            self.assertEqual(len({w[2] for w in want}), 3)
            for ask in (whole, streamed):
                with self.subTest(length=length, ask=ask.__name__):
                    got, usage = ask(self.client, **asked(ids, 3))
                    self.assertEqual(got, want)
                    self.assertEqual(usage.prompt_tokens, length)
                    self.assertEqual(usage.completion_tokens, 3 * 40)
        self.c.wait_baseline()

    def test_past_the_next_page(self):
        ids = prompt(500, 2)
        want = alone(self.client, ids, 3, tokens=60)
        self.assertEqual(whole(self.client, **asked(ids, 3, tokens=60))[0], want)

    def test_greedy_ones_are_equal(self):
        ids = prompt(300, 3)
        want = whole(self.client, **asked(ids, temperature=0))[0]
        self.assertEqual(whole(self.client, **asked(ids, 3, temperature=0))[0], want * 3)

    def test_chat_stream(self):
        body = dict(model="needle", messages=[{"role": "user", "content": "What is the code of ZEBRA?"}],
                    n=3, seed=9, temperature=1.3, max_tokens=30, logprobs=True, top_logprobs=2)
        roles, text, finish = [0] * 3, [""] * 3, [None] * 3
        for chunk in self.client.chat.completions.create(stream=True, **body):
            for c in chunk.choices:
                if c.delta.role:
                    self.assertEqual(text[c.index], "")
                    roles[c.index] += 1
                text[c.index] += c.delta.content or ""
                finish[c.index] = c.finish_reason or finish[c.index]
        self.assertEqual(roles, [1] * 3)
        r = self.client.chat.completions.create(**body)
        self.assertEqual([c.message.content for c in r.choices], text)
        self.assertEqual([c.finish_reason for c in r.choices], finish)
        self.assertNotIn(None, finish)
        one = [self.client.chat.completions.create(**body | dict(n=1, seed=choice_seed(9, c)))
               for c in range(3)]
        self.assertEqual([o.choices[0].message.content for o in one], text)
        self.assertEqual([o.choices[0].logprobs for o in one], [c.logprobs for c in r.choices])
        self.assertEqual(sum(o.usage.completion_tokens for o in one), r.usage.completion_tokens)
        self.assertEqual(one[0].usage.prompt_tokens, r.usage.prompt_tokens)

    def test_first_token_only(self):
        ids = prompt(300, 4)
        self.assertEqual(whole(self.client, **asked(ids, 3, tokens=1))[0], alone(self.client, ids, 3, tokens=1))
        self.c.wait_baseline()

    def test_one_prompt_is_computed_once(self):
        self.c.wait_baseline()
        before, metrics = self.c.fresh_ledgers(), self.metrics()
        whole(self.client, **asked(prompt(700, 5), 4))
        after, now = self.c.fresh_ledgers(), self.metrics()
        if "prefill@0" in after:
            self.assertEqual(after["decode@0"]["handoffs_ok"], before["decode@0"]["handoffs_ok"] + 1)
        self.assertEqual(now["tandem_prompt_tokens_total"] - metrics["tandem_prompt_tokens_total"], 700)
        self.assertEqual(now["tandem_completion_tokens_total"] - metrics["tandem_completion_tokens_total"], 160)
        self.assertEqual(now["tandem_time_to_first_token_seconds_count"],
                         metrics["tandem_time_to_first_token_seconds_count"] + 1)

    def metrics(self):
        lines = (line.rsplit(" ", 1) for line in self.c.get("/metrics")[1].splitlines() if line[0] != "#")
        return {k: float(v) for k, v in lines}

    def test_a_stop_string_ends_its_own_choice(self):
        ids = prompt(300, 6)
        texts = [w[2] for w in alone(self.client, ids, 3)]
        stop = next(texts[1][i:i + 3] for i in range(6, 60)
                    if not any(texts[1][i:i + 3] in t for t in (texts[0], texts[2], texts[1][:i + 2])))
        want = alone(self.client, ids, 3, stop=[stop])
        self.assertEqual([w[3] for w in want], ["length", "stop", "length"])
        for ask in (whole, streamed):
            got, usage = ask(self.client, **asked(ids, 3, stop=[stop]))
            self.assertEqual([g[2:] for g in got], [w[2:] for w in want])
            self.assertLess(usage.completion_tokens, 3 * 40)
        self.c.wait_baseline()

    def test_client_gone_frees_everything(self):
        before = self.c.wait_baseline()
        for hold in (0, 0.05, 0.3):
            stream = self.client.completions.create(stream=True, **asked(prompt(1500, 7), 6, tokens=2000))
            if hold:
                next(iter(stream))
                time.sleep(hold)
            stream.close()
        after = self.c.wait_baseline()
        self.assertEqual({n: l["pages_free"] for n, l in before.items()},
                         {n: l["pages_free"] for n, l in after.items()})

    def test_shared_pages_are_shown(self):
        stream = self.client.completions.create(stream=True, **asked(prompt(1500, 8), 4, tokens=2000))
        next(iter(stream))
        until = time.monotonic() + e2e.PATIENCE
        while self.c.ledgers()["decode@0"]["pages_shared"] != 5:  # of 1,500 tokens
            assert time.monotonic() < until, self.c.ledgers()
            time.sleep(0.1)
        ledger = self.c.ledgers()["decode@0"]
        self.assertEqual(ledger["slots_owned"], 4)
        self.assertLess(ledger["pages_owned"], 5 + 4 * 10)
        r = self.c.tool("status", "--url", self.c.url)
        self.assertIn("shared", r.stdout, r.stdout + r.stderr)
        stream.close()
        self.assertEqual(self.c.wait_baseline()["decode@0"]["pages_shared"], 0)

    def test_limits(self):
        for n, word in ((0, "1 to 8"), (9, "1 to 8"), (7, "at most 6"), ("2", "integer")):
            status, j = self.c.post("/v1/completions", {"model": "needle", "prompt": [5] * 20, "n": n})
            self.assertEqual((status, j["error"]["param"]), (400, "n"), j)
            self.assertIn(word, j["error"]["message"])
        status, j = self.c.post("/v1/completions", {"model": "needle", "prompt": "a", "n": 2, "best_of": 3})
        self.assertEqual((status, j["error"]["param"]), (400, "best_of"), j)
        self.assertEqual(self.c.post("/v1/completions", {"model": "needle", "prompt": "a", "n": 2, "best_of": 2,
                                                         "max_tokens": 1})[0], 200)


class TestDisaggregated(Choices, unittest.TestCase):
    pass


@unittest.skipUnless(e2e.WHOLE, "one worker for both roles: tests/nightly")
class TestColocated(Choices, unittest.TestCase):
    settings = {"router__colocate": "on", "cluster__prefill": 0}


class TestFullPool(unittest.TestCase):
    """Three times 540 tokens want 1 + 3 * 2 pages: five are there, and four are reserved."""

    def equal_to_alone(self, **settings):
        with e2e.Cluster(max_context=4096, pool_pages=5, reserve_tokens=16, max_running=4, **settings) as c:
            ids, client = prompt(300, 9), c.client()
            want = alone(client, ids, 3, tokens=240)
            self.assertEqual(counts(c)["preempted"], 0)
            for ask in (whole, streamed):
                got, usage = ask(client, **asked(ids, 3, tokens=240))
                self.assertEqual(got, want)
                self.assertEqual(usage.completion_tokens, 3 * 240)
            after = counts(c)
            self.assertGreater(after["preempted"], 1)
            self.assertEqual((after["retries"], after["failed"]), (0, 0))
            c.wait_baseline()

    def test_disaggregated(self):
        self.equal_to_alone()

    @unittest.skipUnless(e2e.WHOLE, "one worker for both roles: tests/nightly")
    def test_colocated(self):
        self.equal_to_alone(router__colocate="on", cluster__prefill=0)


class TestDecodeDies(unittest.TestCase):
    def test_whole_answers_go_on_and_streams_fail(self):
        with e2e.Cluster(max_context=4096, max_running=4, cluster__decode=2) as c:
            ids, client = prompt(300, 10), c.client()
            want = alone(client, ids, 3, tokens=400)
            for ask in (whole, streamed):
                got, error = [], []

                def run():
                    try:
                        got.append(ask(client, **asked(ids, 3, tokens=400))[0])
                    except (openai.APIError, OSError) as e:
                        error.append(e)
                t = threading.Thread(target=run)
                t.start()
                victim = self.victim(c)
                os.kill(c.pid(victim), signal.SIGKILL)
                t.join(e2e.PATIENCE)
                self.assertEqual(got, [want] if ask is whole else [])
                self.assertEqual(len(error), 0 if ask is whole else 1)
                r = c.tool("restart", victim, "--config", c.config)
                self.assertEqual(r.returncode, 0, r.stderr)
            self.assertGreaterEqual(counts(c)["retries"], 3)
            c.wait_baseline()

    @staticmethod
    def victim(c):
        until = time.monotonic() + e2e.PATIENCE
        while True:
            assert time.monotonic() < until
            _, j = c.get("/v1/cluster")
            busy = [w["name"] for w in j["workers"] if w["role"] == "decode" and w["legs"]]
            if busy and any(r["tokens"] >= 100 for r in j["requests"]):
                return busy[0]
            time.sleep(0.01)


if __name__ == "__main__":
    e2e.main("__main__")
