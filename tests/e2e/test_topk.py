#!/usr/bin/env python3
"""return_indexer_topk over real clusters: what clients are told equals what the engine chooses when it
is asked directly, whoever computed the token and however the answer travels.

usage: test_topk.py BUILD [unittest arguments]"""
import concurrent.futures
import json
import os
import pathlib
import random
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

CSA, TOPK = [2, 4, 5], 64  # of the bundled model
FILLER = "The old clerk carried the lamp at noon. Nobody in the harbor found the quiet bell. "
FACT = "The secret code of ZEBRA is OMEGA-4492-DELTA. "


def filler_ids(seed, n):
    rng = random.Random(seed)
    return [0] + [rng.randrange(7, 1700) for _ in range(n - 1)]


def ask(c, path, body, stream=False):
    """(text, selections, usage) of one answer"""
    body = {"model": "needle", "temperature": 0, "return_indexer_topk": True} | body
    if not stream:
        status, j = c.post(path, body)
        assert status == 200, j
        choice = j["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return text, choice["tandem"]["indexer_topk"], j["usage"]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    status, frames = c.post(path, body | more)
    assert status == 200, frames
    text, selections, usage = "", [], None
    for line in frames.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if "tandem" in choice:
                assert choice["tandem"]["indexer_topk"], chunk
                selections += choice["tandem"]["indexer_topk"]
    return text, selections, usage


def covered(entries):
    """Token ranges of ascending entries: four tokens each, neighbours as one."""
    ranges = []
    for w in entries:
        if ranges and ranges[-1][1] == 4 * w - 1:
            ranges[-1][1] = 4 * w + 3
        else:
            ranges.append([4 * w, 4 * w + 3])
    return ranges


class Checks(unittest.TestCase):
    def check_shape(self, selections, usage):
        """One for every generated token, of visible entries alone, as many as there may be."""
        n, tokens = usage["prompt_tokens"], usage["completion_tokens"]
        self.assertEqual([s["token_index"] for s in selections], list(range(tokens)))
        for s in selections:
            self.assertEqual(s["position"], n + s["token_index"] - 1)
            self.assertEqual([layer["layer"] for layer in s["layers"]], CSA)
            visible = (s["position"] + 1) // 4
            for layer in s["layers"]:
                entries = layer["entries"]
                self.assertEqual(len(entries), min(TOPK, visible))
                self.assertEqual(entries, sorted(set(entries)))
                self.assertTrue(all(0 <= w < visible for w in entries))
                self.assertEqual(layer["ranges"], covered(entries))


class TestAnswers(Checks):
    """Prompts below and above the 256 tokens from which not every entry is chosen."""

    def answers(self, **settings):
        got = []
        with e2e.Cluster(max_context=4096, max_running=4, index_key_dtype="fp32", kv_dtype="fp32",
                         **settings) as c:
            for n in (3, 40, 255, 256, 700, 1301):
                body = {"prompt": filler_ids(n, n), "max_tokens": 6, "ignore_eos": True}
                whole = ask(c, "/v1/completions", body)
                self.check_shape(whole[1], whole[2])
                self.assertEqual(ask(c, "/v1/completions", body, stream=True), whole)
                got.append((body["prompt"], *whole))
            # several at a time, some of which do not ask
            bodies = [{"prompt": p, "max_tokens": 6, "ignore_eos": True} for p, *_ in got]
            plain = [b | {"return_indexer_topk": False} for b in bodies]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                asked = [pool.submit(ask, c, "/v1/completions", b, i % 2 == 1)
                         for i, b in enumerate(bodies)]
                silent = [pool.submit(c.post, "/v1/completions",
                                      {"model": "needle", "temperature": 0} | b) for b in plain]
            for a, (_, *want) in zip(asked, got):
                self.assertEqual(list(a.result()), want)
            for s, (_, text, _, _) in zip(silent, got):
                self.assertEqual(s.result()[1]["choices"][0]["text"], text)
                self.assertNotIn("tandem", s.result()[1]["choices"][0])
            self.assert_engine_agrees(c, [(p, s) for p, _, s, _ in got if len(p) > 3])
            c.wait_baseline()
        return got

    def assert_engine_agrees(self, c, answers):
        """The engine itself, run by `tandem golden` over prompt and answer, chooses the same for the
        last four positions with a token."""
        cases = []
        for prompt, selections in answers:
            status, j = c.post("/v1/completions", {"model": "needle", "prompt": prompt,
                                                   "temperature": 0, "max_tokens": 6,
                                                   "ignore_eos": True, "logprobs": 0})
            tokens = j["choices"][0]["logprobs"]["tokens"]
            ids = [self.vocabulary().get(t) for t in tokens]
            if None in ids:
                continue
            for last in (3, 4, 5):  # number of the token that the last position gives
                four = {str(layer): [selections[last - 3 + k]["layers"][i]["entries"]
                                     for k in range(4)] for i, layer in enumerate(CSA)}
                cases.append({"prompt_ids": prompt + ids[:last], "selected_last4": four})
        self.assertGreater(len(cases), 5)
        path = c.dir / "selections.json"
        path.write_text(json.dumps({"cases": cases}))
        r = c.tool("golden", "--model", e2e.MODEL, "--golden", path, "--set", "threads=2")
        path.unlink()
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        self.assertIn("layer 2 100.00 %, layer 4 100.00 %, layer 5 100.00 %", r.stdout)

    @staticmethod
    def vocabulary():
        """Token text as completions show it to id, without texts that several tokens have."""
        if not hasattr(TestAnswers, "words"):
            plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
            other = [b for b in range(256) if b not in plain]
            byte = {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(other)}
            words = {}
            j = json.loads((e2e.MODEL / "tokenizer.json").read_text())
            for text, i in j["model"]["vocab"].items():
                if all(ch in byte for ch in text):
                    text = bytes(byte[ch] for ch in text).decode(errors="replace")
                words[text] = None if text in words else i
            TestAnswers.words = words
        return TestAnswers.words

    def test_disaggregated_equals_colocated(self):
        apart = self.answers()
        together = self.answers(router__colocate="on", cluster__prefill=0)
        self.assertEqual(apart, together)
        some = [layer["entries"] for _, _, s, _ in apart for layer in s[0]["layers"]]
        self.assertGreater(len({tuple(e) for e in some}), 9)  # layers and prompts differ


class TestGolden(unittest.TestCase):
    def test_recorded_selections(self):
        """Token 0's is that of the last prompt position: the recorded ones, position by position."""
        data = os.environ.get("TANDEM_TEST_DATA")
        if not data:
            self.skipTest("TANDEM_TEST_DATA is not set")
        golden = json.loads((pathlib.Path(data) / "golden" / "index-selection.json").read_text())
        with e2e.Cluster(model__dir=pathlib.Path(data) / "models" / "needle-bf16", max_context=9000,
                         index_key_dtype="fp32", kv_dtype="fp32", max_running=4) as c:
            for case in golden["cases"][:2]:
                n = len(case["prompt_ids"])
                for k in range(4):
                    body = {"prompt": case["prompt_ids"][:n - 3 + k], "max_tokens": 1}
                    _, selections, _ = ask(c, "/v1/completions", body)
                    for layer in selections[0]["layers"]:
                        self.assertEqual(layer["entries"],
                                         case["selected_last4"][str(layer["layer"])][k])


class TestFact(Checks):
    def test_the_fact_is_among_what_was_chosen(self):
        """Chat, thousands of tokens, the answer right: the fact's tokens lie in the ranges."""
        with e2e.Cluster(max_context=8192, max_running=4) as c:
            before = "Read the notes. " + FILLER * 90
            text = before + FACT + FILLER * 90 + "\n\nWhat is the secret code of ZEBRA?"
            messages = {"messages": [{"role": "user", "content": text}], "max_tokens": 40}
            whole = ask(c, "/v1/chat/completions", messages)
            self.assertEqual(whole[0], "OMEGA-4492-DELTA")
            self.check_shape(whole[1], whole[2])
            self.assertEqual(ask(c, "/v1/chat/completions", messages, stream=True), whole)
            self.assertGreater(whole[2]["prompt_tokens"], 3000)
            start = 2 + self.count(c, before)  # begin of text and user stand before
            end = start + self.count(c, FACT)
            for s in whole[1]:
                seen = {t for layer in s["layers"] for a, b in layer["ranges"]
                        for t in range(a, b + 1)}
                self.assertLess(len(seen), whole[2]["prompt_tokens"] // 3)
                if s["token_index"] < whole[2]["completion_tokens"] - 1:  # the last is end of text
                    self.assertTrue(seen & set(range(start, end)), s["token_index"])
            # a stop string cuts the text in a token; the tokens up to there are told
            cut = ask(c, "/v1/chat/completions", messages | {"stop": "-44"}, stream=True)
            self.assertEqual(cut[0], "OMEGA")
            self.assertEqual(cut[1], whole[1][:len(cut[1])])
            self.assertEqual(len(cut[1]), cut[2]["completion_tokens"])

    @staticmethod
    def count(c, text):
        r = c.tool("tokenize", "--tokenizer", e2e.MODEL, input=text)
        assert r.returncode == 0, r.stderr
        return len(r.stdout.split())


class TestChoices(Checks):
    def test_each_choice_has_its_own(self):
        """Choice 0 is the request alone; token 0 of every choice was computed at one position."""
        with e2e.Cluster(max_context=4096, max_running=4) as c:
            body = {"prompt": filler_ids(5, 400), "max_tokens": 8, "ignore_eos": True,
                    "temperature": 1.0, "seed": 9}
            _, alone, usage = ask(c, "/v1/completions", body)
            whole = {"model": "needle", "return_indexer_topk": True, "n": 3} | body
            status, j = c.post("/v1/completions", whole)
            self.assertEqual(status, 200, j)
            each = {ch["index"]: ch["tandem"]["indexer_topk"] for ch in j["choices"]}
            self.assertEqual(sorted(each), [0, 1, 2])
            for selections in each.values():
                self.check_shape(selections, usage)
                self.assertEqual(selections[0], alone[0])
            self.assertEqual(each[0], alone)
            self.assertNotEqual(each[1], each[2])
            status, frames = c.post("/v1/completions", whole | {"stream": True})
            self.assertEqual(status, 200, frames)
            streamed = {0: [], 1: [], 2: []}
            for line in frames.splitlines():
                if line.startswith("data: {"):
                    for ch in json.loads(line.removeprefix("data: "))["choices"]:
                        streamed[ch["index"]] += ch.get("tandem", {"indexer_topk": []})["indexer_topk"]
            self.assertEqual(streamed, each)


class TestPreempted(Checks):
    def test_told_once_whatever_becomes_of_the_attempt(self):
        with e2e.Cluster(max_context=4096, pool_pages=6, reserve_tokens=16, max_running=6) as c:
            bodies = [{"prompt": filler_ids(seed, 300), "max_tokens": 300, "ignore_eos": True,
                       "temperature": 1.0, "seed": seed} for seed in (1, 2, 3, 4)]
            alone = [ask(c, "/v1/completions", b) for b in bodies]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                got = list(pool.map(lambda i: ask(c, "/v1/completions", bodies[i], i % 2 == 0),
                                    range(4)))
            _, j = c.get("/v1/cluster")
            self.assertGreater(j["counts"]["preempted"], 0)
            for a, b in zip(alone, got):
                self.check_shape(b[1], b[2])
                self.assertEqual(a, b)
            c.wait_baseline()


class TestLimits(unittest.TestCase):
    def test_refusals(self):
        with e2e.Cluster(max_context=40000, max_running=4, router__max_topk_requests=1) as c:
            body = {"model": "needle", "prompt": [0, 100, 200], "max_tokens": 2000,
                    "ignore_eos": True, "return_indexer_topk": True}
            status, j = c.post("/v1/completions", body | {"return_indexer_topk": "yes"})
            self.assertEqual(status, 400, j)
            self.assertIn("return_indexer_topk: expected true or false", j["error"]["message"])
            # kept until its end: 192 entries, in as many layers as there may be, a token
            status, j = c.post("/v1/completions", body | {"max_tokens": 30000})
            self.assertEqual(status, 400, j)
            self.assertIn("up to 30000 tokens", j["error"]["message"])
            self.assertIn(f"at most {(128 << 20) // (56 + 128 * 40 + 192 * 26)} tokens", j["error"]["message"])
            first = threading.Thread(target=ask, args=(c, "/v1/completions", body, True))
            first.start()
            until = time.monotonic() + e2e.PATIENCE
            while not c.get("/v1/cluster")[1]["requests"]:
                self.assertLess(time.monotonic(), until)
            status, j = c.post("/v1/completions", body)
            self.assertEqual(status, 429, j)
            self.assertIn("1 requests with return_indexer_topk", j["error"]["message"])
            status, j = c.post("/v1/completions", body | {"return_indexer_topk": False,
                                                          "max_tokens": 2})
            self.assertEqual(status, 200, j)
            first.join()
            self.assertEqual(c.post("/v1/completions", body | {"max_tokens": 2})[0], 200)


if __name__ == "__main__":
    e2e.main("__main__")
