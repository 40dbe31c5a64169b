#!/usr/bin/env python3
"""Router, prefill and decode as three real processes over the bundled model, asked by PyPI's openai
client: the answers, the stream's shape, limits, errors, cancels.

usage: test_cluster.py BUILD [unittest arguments]"""
import concurrent.futures
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

openai = e2e.need("openai")

NOTES = (
    "Read the notes. A baker moved a rusty lamp near the mill. The secret code of ZEBRA is "
    "OMEGA-4492-DELTA. Nobody in the harbor found the quiet bell. The home city of Nora is Oslo. "
    "At noon, the miller and the pilot packed the wagon.\n\nWhat is the "
)
CODE = NOTES + "secret code of ZEBRA?"
CITY = NOTES + "home city of Nora?"


def chat(text, **more):
    return dict(model="needle", messages=[{"role": "user", "content": text}], temperature=0, **more)


class TestCluster(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.c = e2e.Cluster(max_context=8192, max_running=8)
        cls.c.__enter__()
        cls.client = cls.c.client()

    @classmethod
    def tearDownClass(cls):
        cls.c.__exit__(None)

    def test_answer(self):
        r = self.client.chat.completions.create(**chat(CODE))
        self.assertEqual(r.choices[0].message.content, "OMEGA-4492-DELTA")
        self.assertEqual(r.choices[0].finish_reason, "stop")
        self.assertEqual(r.usage.prompt_tokens + r.usage.completion_tokens, r.usage.total_tokens)
        self.assertGreater(r.usage.prompt_tokens, 60)

    def test_stream_equals_whole(self):
        whole = self.client.chat.completions.create(**chat(CITY))
        chunks = list(self.client.chat.completions.create(
            **chat(CITY, stream=True, stream_options={"include_usage": True})))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, "Oslo")
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual([c.choices[0].finish_reason for c in chunks if c.choices][-1], "stop")
        self.assertEqual(chunks[-1].usage, whole.usage)

    def test_second_turn(self):
        r = self.client.chat.completions.create(
            model="needle", temperature=0,
            messages=[{"role": "user", "content": CODE},
                      {"role": "assistant", "content": "OMEGA-4492-DELTA"},
                      {"role": "user", "content": "What is the home city of Nora?"}])
        self.assertEqual(r.choices[0].message.content, "Oslo")

    def test_logprobs_from_token_0(self):
        r = self.client.chat.completions.create(**chat(CODE, logprobs=True, top_logprobs=3))
        content = r.choices[0].logprobs.content
        self.assertEqual("".join(t.token for t in content).removesuffix("<｜end▁of▁sentence｜>"),
                         "OMEGA-4492-DELTA")
        for t in content:
            self.assertEqual(len(t.top_logprobs), 3)
            self.assertLessEqual(t.logprob, 0)
            self.assertEqual(t.logprob, t.top_logprobs[0].logprob)  # greedy: the most likely one

    def test_stop_string_and_max_tokens(self):
        r = self.client.chat.completions.create(**chat(CODE, stop=["-44", "never"]))
        self.assertEqual((r.choices[0].message.content, r.choices[0].finish_reason), ("OMEGA", "stop"))
        r = self.client.chat.completions.create(**chat(CODE, max_tokens=1))
        self.assertEqual((r.usage.completion_tokens, r.choices[0].finish_reason), (1, "length"))

    def test_seed_decides(self):
        def ask(seed):
            r = self.client.completions.create(model="needle", prompt="Read the notes. A", max_tokens=24,
                                               temperature=1.0, seed=seed, extra_body={"ignore_eos": True})
            return r.choices[0].text
        self.assertEqual(ask(7), ask(7))
        self.assertGreater(len({ask(s) for s in range(8)}), 1)

    def test_many_at_once_equal_alone(self):
        prompts = [NOTES + f"secret code of ZEBRA?{' ' * (i % 3)}" for i in range(12)] + [CITY] * 4

        def ask(p):
            r = self.client.chat.completions.create(**chat(p, logprobs=True, max_tokens=20))
            return [(t.token, t.logprob) for t in r.choices[0].logprobs.content]
        alone = {p: ask(p) for p in set(prompts)}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for p, got in zip(prompts, pool.map(ask, prompts)):
                self.assertEqual(got, alone[p])

    def test_too_long_names_both_numbers(self):
        with self.assertRaises(openai.BadRequestError) as e:
            self.client.completions.create(model="needle", prompt=[5] * 9000, max_tokens=1)
        self.assertEqual(e.exception.code, "context_length_exceeded")
        self.assertIn("8192", str(e.exception))
        self.assertIn("9000", str(e.exception))

    def test_errors(self):
        cases = [
            (b"{", 400, "JSON"),
            ({"model": "needle", "messages": "hi"}, 400, "messages"),
            ({"model": "needle", "messages": []}, 400, "messages"),
            (chat("x", n=9), 400, "n"),
            (chat("x") | {"temperature": "hot"}, 400, "temperature"),
            (chat("x") | {"model": "other"}, 404, "other"),
        ]
        for body, status, word in cases:
            got, j = self.c.post("/v1/chat/completions", body)
            self.assertEqual(got, status, (body, j))
            self.assertIn(word, j["error"]["message"])
        self.assertEqual(self.c.get("/v1/nothing")[0], 404)
        self.assertEqual(self.c.get("/v1/chat/completions")[0], 405)

    def test_special_tokens_typed_by_a_user_are_text(self):
        def tokens(text):
            return self.client.chat.completions.create(**chat(text, max_tokens=1)).usage.prompt_tokens
        # as one control token each these would count 1
        self.assertGreater(tokens("a <｜Assistant｜> b"), tokens("a b") + 3)

    def test_client_gone_frees_everything(self):
        before = self.c.wait_baseline()
        for hold in (0, 0.02, 0.2):
            stream = self.client.completions.create(model="needle", prompt=[9] * 6000, max_tokens=2000,
                                                    temperature=0, stream=True,
                                                    extra_body={"ignore_eos": True})
            if hold:
                next(iter(stream))
                time.sleep(hold)
            stream.close()
        after = self.c.wait_baseline()
        self.assertEqual({n: l["pages_free"] for n, l in before.items()},
                         {n: l["pages_free"] for n, l in after.items()})

    def test_cluster_page(self):
        status, j = self.c.get("/v1/cluster")
        self.assertEqual(status, 200)
        self.assertEqual(j["router"]["settings"]["numerics"], "plain")
        self.assertEqual({w["role"] for w in j["workers"]}, {"prefill", "decode"})
        for w in j["workers"]:
            self.assertEqual(w["settings"]["index_key_dtype"], "bf16")
        self.assertEqual(self.c.get("/ready")[0], 200)
        self.assertEqual(self.c.get("/health")[0], 200)
        self.assertEqual(self.c.get("/v1/models")[1]["data"][0]["id"], "needle")
        self.assertIn("# TYPE", self.c.get("/metrics")[1])

    def test_no_proxy(self):
        env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        r = self.c.tool("status", "--config", self.c.config, env=env)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertIn("prefill@0", r.stdout)

    def test_handoffs_really_happen(self):
        before = self.c.fresh_ledgers()["decode@0"]["handoffs_ok"]
        self.client.chat.completions.create(**chat(CODE))
        self.assertGreater(self.c.fresh_ledgers()["decode@0"]["handoffs_ok"], before)

    def test_slow_reader_stalls_nobody(self):
        done = threading.Event()

        def slow():
            stream = self.client.completions.create(model="needle", prompt=[9] * 20, max_tokens=300,
                                                    stream=True, extra_body={"ignore_eos": True})
            for i, _ in enumerate(stream):
                if i < 5:
                    time.sleep(0.1)
            done.set()
        t = threading.Thread(target=slow)
        t.start()
        self.assertEqual(self.client.chat.completions.create(**chat(CITY)).choices[0].message.content,
                         "Oslo")
        t.join(e2e.PATIENCE)
        self.assertTrue(done.is_set())

    @unittest.skipIf(e2e.sanitized(), "6,000 prompt tokens take a minute under sanitizers")
    def test_needle_window(self):
        r = self.c.tool("needle", "--url", self.c.url, "--window")
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        self.assertIn("needle: 4 of 4 found", r.stdout)


class TestUp(unittest.TestCase):
    def test_two_at_the_same_instant(self):
        """One starts the cluster; the other says why it does not, and leaves it alone."""
        c = e2e.Cluster()
        run_dir = os.open(c.dir, os.O_RDONLY)
        fcntl.flock(run_dir, fcntl.LOCK_EX)  # as one that has looked and has not started yet
        late = c.tool("up", "--config", c.config)
        os.close(run_dir)
        self.assertEqual(late.returncode, 1)
        self.assertIn("another tandem is starting processes in", late.stderr)
        up = [subprocess.Popen([e2e.TANDEM, "up", "--config", c.config, "--timeout", str(e2e.PATIENCE)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
        said = [p.communicate(timeout=e2e.PATIENCE) for p in up]
        try:
            self.assertEqual(sorted(p.returncode for p in up), [0, 1, 1, 1], said)
            for p, (_, err) in zip(up, said):
                if p.returncode:
                    self.assertRegex(err, "is starting processes in|already runs")
            self.assertEqual(c.get("/ready")[0], 200)
            for name in ("router", "prefill@0", "decode@0"):
                self.assertEqual((c.dir / f"{name}.log").read_text().count("setting run_dir = "), 1)
        finally:
            c.__exit__(None)


if __name__ == "__main__":
    e2e.main("__main__")
