#!/usr/bin/env python3
"""Workers of one and of two ranks in every pairing: the needle is found, and text, log probabilities and
what the indexer chose are those of one rank; a second choice and a streamed answer too. With
kv_layout = split, where ranks share the entries, likewise.

usage: test_tp.py BUILD [unittest arguments]"""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

# Several pages, the fact in the first one.
FILLER = "At noon, the miller and the pilot packed the wagon. Nobody in the harbor found the quiet bell. "
PROMPT = ("Read the notes. The secret code of ZEBRA is OMEGA-4492-DELTA. " + 40 * FILLER +
          "\n\nWhat is the secret code of ZEBRA?")
NUMERICS = "ref"


def role(ranks):
    return {"tp": ranks, "threads": ranks}


def ask(prefill, decode, layout="replicate"):
    with e2e.Cluster(max_context=8192, max_running=4, numerics=NUMERICS, kv_layout=layout, prefill=role(prefill),
                     decode=role(decode)) as c:
        body = {"model": "needle", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0,
                "logprobs": True, "top_logprobs": 4, "return_indexer_topk": True}
        status, found = c.post("/v1/chat/completions", body)
        assert status == 200, found
        assert found["usage"]["prompt_tokens"] > 3 * 256, found["usage"]
        drawn = {"model": "needle", "prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "seed": 7, "n": 2,
                 "ignore_eos": True}
        status, two = c.post("/v1/completions", drawn)
        assert status == 200, two
        c.wait_baseline()
        workers = c.get("/v1/cluster")[1]["workers"]
        return found["choices"], [x["text"] for x in two["choices"]], workers


class TestTp(unittest.TestCase):
    def test_pairings(self):
        want, texts, _ = ask(1, 1)
        self.assertEqual(want[0]["message"]["content"], "OMEGA-4492-DELTA")
        self.assertNotEqual(texts[0], texts[1])
        for prefill, decode in ((2, 1), (1, 2), (2, 2)):
            with self.subTest(prefill=prefill, decode=decode):
                choices, drawn, workers = ask(prefill, decode)
                self.assertEqual(choices, want)
                self.assertEqual(drawn, texts)
                self.assertEqual(len({w["numerics"] for w in workers}), 1, workers)

    def test_shared_entries(self):
        want, texts, alone = ask(1, 1, "split")
        self.assertEqual(want[0]["message"]["content"], "OMEGA-4492-DELTA")
        self.assertIn("entries in 8 parts", alone[0]["numerics"])
        for prefill, decode in ((1, 2), (2, 2)):
            with self.subTest(prefill=prefill, decode=decode):
                choices, drawn, workers = ask(prefill, decode, "split")
                self.assertEqual(choices, want)
                self.assertEqual(drawn, texts)
                self.assertEqual(len({w["numerics"] for w in workers}), 1, workers)
                # a page of two ranks has 512 tokens, so half as many hold as much
                pages = {w["role"]: (w["page_tokens"], w["pages"]) for w in workers}
                self.assertEqual(pages, {"prefill": (256 * prefill, 64 // prefill),
                                         "decode": (256 * decode, 64 // decode)})

    def test_what_the_model_cannot_share(self):
        for settings, word in (({"tp": 4, "threads": 4}, "2 output groups"), ({"tp": 3}, "1, 2, 4 or 8"),
                               ({"tp": 2, "threads": 1}, "one for each of 2 ranks")):
            with self.assertRaisesRegex(RuntimeError, word):
                with e2e.Cluster(max_context=4096, decode=settings):
                    pass


if __name__ == "__main__":
    e2e.main(__name__)
