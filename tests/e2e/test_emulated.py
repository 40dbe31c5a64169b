#!/usr/bin/env python3
"""Workers on an emulated GPU with a pool that is too small for everybody: no page is left when one is
admitted (BUSY) and when one grows (preemption), and the text is that of one that went through. Slabs
are pinned, blocks packed and unpacked by the device's kernels, between real processes. A token takes
the emulator tens of milliseconds, so the model has one layer and answers are short.

usage: test_emulated.py BUILD PREFILL DECODE"""
import concurrent.futures
import pathlib
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

PROMPT, NEW = 254, 8  # the third token of an answer takes a page more
BODY = {"model": "needle", "prompt": [0] + [7 + (k * 29) % 1600 for k in range(PROMPT - 1)], "max_tokens": NEW,
        "temperature": 0, "ignore_eos": True, "logprobs": 0}


def with_workers(folder, prefill, decode):
    """A build folder whose workers are these: `tandem` starts what lies beside it."""
    for name, program in (("router/tandem-router", e2e.BUILD / "router/tandem-router"),
                          ("prefill/tandem-prefill", prefill), ("decode/tandem-decode", decode)):
        (folder / name).parent.mkdir()
        (folder / name).symlink_to(pathlib.Path(program).resolve())
    (folder / "deploy").mkdir()
    return shutil.copy(e2e.TANDEM, folder / "deploy")


class TestEmulated(unittest.TestCase):
    def ask(self, c):
        status, j = c.post("/v1/completions", BODY)
        self.assertEqual(status, 200, j)
        self.assertEqual(j["usage"]["completion_tokens"], NEW)
        return j["choices"][0]["logprobs"]["tokens"], j["choices"][0]["logprobs"]["token_logprobs"]

    def test_no_page_is_left(self):
        with e2e.Cluster(device="cuda:0", load_format="random", random__layers="4", force_ref="all", pool_pages=2,
                         reserve_tokens=1, max_running=3, max_context=512, chunk_tokens=256,
                         engine_timeout_ms=600000, transfer_timeout_ms=600000) as c:
            for role in ("prefill@0", "decode@0"):
                self.assertIn("memory slabs, pinned", (c.dir / f"{role}.log").read_text())
            self.assertIn("blocks are packed there", (c.dir / "prefill@0.log").read_text())
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                got = list(pool.map(lambda _: self.ask(c), range(2)))
            self.assertEqual(got[0], got[1])  # the older one was never interrupted
            counts = c.get("/v1/cluster")[1]["counts"]
            print({k: counts[k] for k in ("preempted", "busy", "retries", "failed")})
            self.assertGreater(counts["preempted"], 0)
            self.assertGreater(counts["busy"], 0)
            self.assertEqual((counts["retries"], counts["failed"]), (0, 0))
            c.wait_baseline()


with tempfile.TemporaryDirectory() as folder:
    e2e.TANDEM = with_workers(pathlib.Path(folder), *sys.argv[2:4])
    del sys.argv[2:]
    e2e.main("__main__")
