#!/usr/bin/env python3
"""An engine that hangs in a process that lives: its thread alone is stopped, as a debugger stops one
(ptrace), while loop, links and heartbeats go on. The router sees it in what the engine does not do.

usage: test_hung_engine.py BUILD [unittest arguments]"""
import concurrent.futures
import http.client
import json
import pathlib
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402
from traced import DETACH, stop_thread, trace  # noqa: E402

TIMEOUT_MS = 8000  # engine_timeout_ms: a step takes milliseconds, but a busy machine may take it from us


class StoppedEngine:
    """The engine's thread of a worker, stopped; goes on at the end. One thread of ours traces it."""

    def __init__(self, pid):
        self.pid = pid
        tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
        self.tid = next(int(t.name) for t in tasks if (t / "comm").read_text().strip() == "engine")

    def __enter__(self):
        stop_thread(self.pid, self.tid)
        return self

    def __exit__(self, *_):
        trace(DETACH, self.tid)


def body(seed, n, prompt=300):
    return {"model": "needle", "prompt": [0] + [7 + (seed * 7919 + i * 31) % 1600 for i in range(prompt)],
            "max_tokens": n, "temperature": 1.0, "seed": seed, "ignore_eos": True}


def whole(c, b):
    status, j = c.post("/v1/completions", b)
    assert status == 200, j
    return j["choices"][0]["text"]


class Stream(threading.Thread):
    """A stream that others may look at while it runs."""

    def __init__(self, c, b):
        super().__init__()
        self.conn = http.client.HTTPConnection(c.url.removeprefix("http://"), timeout=e2e.PATIENCE)
        self.body, self.events, self.done, self.error = b | {"stream": True}, 0, False, None
        self.start()

    def run(self):
        self.conn.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
        answer = self.conn.getresponse()
        assert answer.status == 200, answer.read()
        try:
            for line in answer:
                if line == b"data: [DONE]\n":
                    self.done = True
                elif line.startswith(b"data: {"):
                    self.error = json.loads(line[6:]).get("error") or self.error
                    self.events += 1
        except http.client.IncompleteRead:
            pass  # how a stream that was cut off ends
        self.conn.close()


class TestHungEngine(unittest.TestCase):
    def cluster(self, **more):
        return e2e.Cluster(cluster__prefill=2, cluster__decode=2, max_context=8192, heartbeat_ms=100,
                           engine_timeout_ms=TIMEOUT_MS, chunk_tokens=256, **more)

    def worker(self, c, name):
        status, page = c.get("/v1/cluster")
        self.assertEqual(status, 200, page)
        return next(w for w in page["workers"] if w["name"] == name)

    def until(self, what, holds, seconds=e2e.PATIENCE):
        end = time.monotonic() + seconds
        while not holds():
            self.assertLess(time.monotonic(), end, f"not in {seconds} s: {what}")
            time.sleep(0.02)

    def test_decode(self):
        with self.cluster() as c:
            asked = [body(seed, 400) for seed in range(4)]
            alone = [whole(c, b) for b in asked]
            pid = c.pid("decode@0")
            streams = [Stream(c, body(100 + i, 4000)) for i in range(4)]
            self.until("every stream has begun", lambda: all(s.events > 3 for s in streams))
            self.until("both decode workers have work",
                       lambda: all(self.worker(c, f"decode@{i}")["ledger"]["slots_owned"] for i in (0, 1)))
            begun = time.monotonic()
            with StoppedEngine(pid):
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    # Some of these wait for the engine that hangs, and move on.
                    answers = [pool.submit(whole, c, b) for b in asked]
                    self.until("decode@0 is stalled", lambda: self.worker(c, "decode@0")["stalled"])
                    self.assertGreater(time.monotonic() - begun, TIMEOUT_MS / 1e3 / 2)
                    self.assertEqual(c.get("/ready")[0], 200)
                    self.assertEqual([a.result(e2e.PATIENCE) for a in answers], alone)
                self.assertEqual(whole(c, asked[0]), alone[0])
                for s in streams:
                    s.join(e2e.PATIENCE)
                    self.assertFalse(s.is_alive())
                ended = [s for s in streams if not s.done]
                # What was shown cannot be taken back: an honest error, for those of that worker alone.
                self.assertTrue(0 < len(ended) < 4, [s.events for s in streams])
                self.assertTrue(all(s.error and "has not advanced" in s.error["message"] for s in ended), ended)
                self.assertTrue(all(s.error is None for s in streams if s.done))
                self.assertTrue(self.worker(c, "decode@0")["stalled"])  # and its link is still up
            self.until("decode@0 goes on", lambda: not self.worker(c, "decode@0")["stalled"])
            c.wait_baseline()
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                self.assertEqual(list(pool.map(lambda b: whole(c, b), asked)), alone)
            self.assertEqual(c.pid("decode@0"), pid)
            self.assertNotIn("is lost", (c.dir / "router.log").read_text())

    def test_prefill(self):
        with self.cluster() as c:
            asked = [body(seed, 8, prompt=2000) for seed in range(4)]
            alone = [whole(c, b) for b in asked]
            with StoppedEngine(c.pid("prefill@0")):
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    self.assertEqual(list(pool.map(lambda b: whole(c, b), asked)), alone)
                self.assertTrue(self.worker(c, "prefill@0")["stalled"])
                self.assertEqual(whole(c, asked[1]), alone[1])
            self.until("prefill@0 goes on", lambda: not self.worker(c, "prefill@0")["stalled"])
            c.wait_baseline()
            self.assertNotIn("is lost", (c.dir / "router.log").read_text())


if __name__ == "__main__":
    e2e.main(__name__)
