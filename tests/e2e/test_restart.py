#!/usr/bin/env python3
"""One role restarts while the cluster works: two prefill and two decode workers as real processes,
restarted by `tandem restart` as an operator would. No other process changes, streams elsewhere do
not notice, its own are retried while no token was shown and end in an error frame otherwise. Any
role may start first.

usage: test_restart.py BUILD [unittest arguments]"""
import http.client
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

WORKERS = ("prefill@0", "prefill@1", "decode@0", "decode@1")
ALL = ("router",) + WORKERS


def prompt(n, salt):
    return [0] + [7 + (i * i * 31 + i * 17 + salt * 101) % 1600 for i in range(n - 1)]


class Stream(threading.Thread):
    """One streamed completion; what came and how it ended. Sampled, so that text keeps coming; with its
    seed the same request always gets the same answer."""

    def __init__(self, c, tokens, max_tokens):
        super().__init__(daemon=True)
        self.address = c.url.removeprefix("http://")
        self.body = json.dumps({"model": "needle", "prompt": tokens, "max_tokens": max_tokens,
                                "temperature": 1.0, "seed": 11, "stream": True, "ignore_eos": True})
        self.text, self.finish, self.error, self.end = "", None, None, None
        self.begun = threading.Event()
        self.gap = 0.0
        self.start()

    def run(self):
        host, port = self.address.split(":")
        conn = http.client.HTTPConnection(host, int(port), timeout=120)
        try:
            conn.request("POST", "/v1/completions", self.body, {"Content-Type": "application/json"})
            answer = conn.getresponse()
            if answer.status != 200:
                self.error = json.loads(answer.read())["error"]
                self.end = f"http {answer.status}"
                return
            last = time.monotonic()
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last) if self.text else 0.0, now
                if line == b"data: [DONE]\n":
                    self.end = "done"
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]
                    continue
                for choice in event["choices"]:
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish
                    if choice["text"]:
                        self.begun.set()
            self.end = self.end or "cut"
        except (http.client.HTTPException, OSError) as e:
            self.end = self.end or f"cut ({type(e).__name__})"
        finally:
            self.begun.set()
            conn.close()


class TestRestart(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.c = e2e.Cluster(max_context=32768, max_running=8, cluster__prefill=2, cluster__decode=2,
                            pool_pages=512)
        cls.c.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.c.__exit__(None)

    @classmethod
    def page(cls):
        status, j = cls.c.get("/v1/cluster")
        assert status == 200, j
        return j

    @staticmethod
    def wait(condition, what, seconds=120):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{what}: not within {seconds} s"
            time.sleep(0.02)

    def workers(self, **having):
        """Names of workers whose value is at least the given one."""
        return [w["name"] for w in self.page()["workers"]
                if all(w[k] >= v for k, v in having.items())]

    def setUp(self):
        self.wait(lambda: len(self.page()["pairs"]) == 4 and all(p["proven"] for p in self.page()["pairs"]),
                  "all pairs proven")
        self.wait(lambda: not self.workers(legs=1), "all idle")
        self.pids = {name: self.c.pid(name) for name in ALL}

    def restart(self, name, *more):
        r = self.c.tool("restart", name, "--config", self.c.config, *more)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("serves after", r.stdout)
        now = {n: self.c.pid(n) for n in ALL}
        self.assertEqual({n: p for n, p in now.items() if n != name},
                         {n: p for n, p in self.pids.items() if n != name})
        self.assertNotEqual(now[name], self.pids[name])
        for pid in now.values():
            os.kill(pid, 0)
        linked = {w["name"]: w["pid"] for w in self.page()["workers"]}
        self.assertLessEqual(set(linked.items()), set(now.items()))

    def placed(self, role, make):
        """Starts a stream when no other runs on the returned worker of `role`."""
        before = set(self.workers(legs=1))
        s = make()
        found = []

        def seen():
            found[:] = [n for n in self.workers(legs=1) if n not in before and n.startswith(role)]
            return found
        self.wait(seen, f"the stream on a {role} worker")
        return s, found[0]

    def prefill_is_done(self):
        self.wait(lambda: not any(n.startswith("prefill") for n in self.workers(legs=1)),
                  "prefill workers have nothing")

    def complete(self, s, tokens, n):
        """The stream ended well, and says what the same request says now."""
        s.join(120)
        self.assertEqual((s.end, s.finish, s.error), ("done", "length", None))
        again = Stream(self.c, tokens, n)
        again.join(120)
        self.assertEqual(again.end, "done")
        self.assertEqual(s.text, again.text)
        self.assertLess(s.gap, 5.0)

    def test_decode_with_streams(self):
        n, mine, other = 800, prompt(300, 1), prompt(400, 2)
        a, worker = self.placed("decode", lambda: Stream(self.c, mine, 20000))
        a.begun.wait(30)
        b, elsewhere = self.placed("decode", lambda: Stream(self.c, other, n))
        b.begun.wait(30)
        self.assertNotEqual(worker, elsewhere)
        self.restart(worker)
        a.join(30)
        self.assertGreater(len(a.text), 0)
        self.assertIsNone(a.finish, "a stream whose worker is gone must not look complete")
        self.assertIsNotNone(a.error)
        self.assertIn("lost", a.error["message"])
        self.assertNotEqual(a.end, "done")
        self.complete(b, other, n)

    def test_prefill_before_the_first_token(self):
        long, n, other = prompt(8000, 3), 8, prompt(300, 4)
        b = Stream(self.c, other, 800)
        b.begun.wait(30)
        self.prefill_is_done()
        retries = self.page()["counts"]["retries"]
        a, worker = self.placed("prefill", lambda: Stream(self.c, long, n))
        self.assertFalse(a.begun.is_set(), "a longer prompt is needed")
        self.restart(worker)
        self.complete(a, long, n)
        self.assertGreater(self.page()["counts"]["retries"], retries)
        self.complete(b, other, 800)

    def test_decode_before_the_first_token(self):
        long, n = prompt(8000, 5), 8
        retries = self.page()["counts"]["retries"]
        a, worker = self.placed("decode", lambda: Stream(self.c, long, n))
        self.assertFalse(a.begun.is_set(), "a longer prompt is needed")
        self.restart(worker)
        self.complete(a, long, n)
        self.assertGreater(self.page()["counts"]["retries"], retries)

    def test_prefill_behind_the_handoff(self):
        tokens = prompt(300, 6)
        a, _ = self.placed("decode", lambda: Stream(self.c, tokens, 800))
        a.begun.wait(30)
        self.prefill_is_done()
        for worker in ("prefill@0", "prefill@1"):
            self.restart(worker)
            self.pids[worker] = self.c.pid(worker)
        self.complete(a, tokens, 800)

    def test_killed_worker_comes_back(self):
        os.kill(self.pids["decode@1"], signal.SIGKILL)
        self.wait(lambda: "decode@1" not in self.workers(), "the loss is seen")
        self.restart("decode@1")

    def test_router(self):
        a = Stream(self.c, prompt(300, 7), 20000)
        a.begun.wait(30)
        self.restart("router")
        a.join(30)
        self.assertIsNone(a.finish)
        self.assertTrue(a.end.startswith("cut"), a.end)
        self.wait(lambda: len(self.page()["pairs"]) == 4 and all(p["proven"] for p in self.page()["pairs"]),
                  "all workers are back and proven")
        self.c.wait_baseline(15)  # what the old router left is let go
        b = Stream(self.c, prompt(300, 8), 8)
        b.join(60)
        self.assertEqual(b.end, "done")

    def test_drained_restarts_lose_nothing(self):
        stop, failures, answers = threading.Event(), [], []

        def load(k):
            while not stop.is_set():
                s = Stream(self.c, prompt(200 + 10 * k, 20 + k), 40)
                s.join(120)
                (answers if s.end == "done" else failures).append((k, s.text, s.end, s.error))
        threads = [threading.Thread(target=load, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        try:
            for worker in WORKERS:
                self.restart(worker, "--drain")
                self.pids[worker] = self.c.pid(worker)
        finally:
            stop.set()
            for t in threads:
                t.join()
        self.assertEqual(failures, [])
        self.assertEqual(len({(k, text) for k, text, _, _ in answers}), 3)  # each always the same

    def test_drain_and_resume(self):
        a, worker = self.placed("decode", lambda: Stream(self.c, prompt(300, 9), 1200))
        r = self.c.tool("drain", worker, "--timeout", "0", "--config", self.c.config)
        self.assertEqual((r.returncode, r.stdout), (0, f"{worker} drains\n"), r.stderr)
        for salt in range(3):
            b, elsewhere = self.placed("decode", lambda: Stream(self.c, prompt(100, 30 + salt), 200))
            self.assertNotEqual(elsewhere, worker)
            b.join(60)
            self.wait(lambda: elsewhere not in self.workers(legs=1), "it ends there")
        self.complete(a, prompt(300, 9), 1200)
        r = self.c.tool("drain", worker, "--config", self.c.config)
        self.assertEqual(r.returncode, 0, r.stderr)
        r = self.c.tool("status", worker, "--json", "--config", self.c.config)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIs(json.loads(r.stdout)["draining"], True)
        r = self.c.tool("resume", worker, "--config", self.c.config)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertNotIn(worker, self.workers(draining=True))

    def test_who_may_drain(self):
        ok, path = {"worker": "decode@0"}, "/v1/cluster/resume"
        self.assertEqual(self.c.post(path, ok), (200, {"worker": "decode@0", "draining": False, "requests": 0}))
        for header in ("Origin", "Forwarded", "Via", "X-Forwarded-For", "X-Real-IP"):
            status, j = self.c.post(path, ok, [(header, "http://example.org")])
            self.assertEqual((status, j["error"]["code"]), (403, "not_local"), header)
        cases = [({"worker": "decode@9"}, 404), ({"worker": 1}, 400), ({}, 400), (b"[]", 400), (b"", 400),
                 ({"worker": "decode@0", "force": True}, 400), ({"worker": "decode@0\0"}, 404)]
        for body, want in cases:
            self.assertEqual(self.c.post(path, body)[0], want, body)
        self.assertEqual(self.c.post(path, ok, [("Content-Type", "text/plain")])[0], 415)
        self.assertEqual(self.c.get("/v1/cluster/drain")[0], 405)

    def test_wrong_use(self):
        for args, code, word in [
            (("restart",), 2, "which role"), (("restart", "decode"), 1, "which one"),
            (("restart", "cook@0"), 1, "cook@0"), (("restart", "decode@5"), 1, "describes no such"),
            (("drain", "router"), 1, "cannot be drained"), (("drain", "decode@0", "--follow"), 2, "--follow"),
            (("logs", "router", "--lines", "x"), 2, "--lines"), (("resume", "a", "b"), 2, "unexpected"),
        ]:
            r = self.c.tool(*args, "--config", self.c.config)
            self.assertEqual(r.returncode, code, args)
            self.assertIn(word, r.stderr, args)
        self.assertEqual({n: self.c.pid(n) for n in ALL}, self.pids)

    def test_logs(self):
        r = self.c.tool("logs", "decode@1", "--lines", "1000", "--config", self.c.config)
        self.assertIn("decode@1 setting max_context = 32768", r.stdout)
        self.assertNotIn("prefill@0 setting", r.stdout)
        r = self.c.tool("logs", "--config", self.c.config)
        for name in ALL:
            self.assertIn(f"{name}.log", r.stdout)


class TestOrder(unittest.TestCase):
    def test_any_role_first(self):
        for order in itertools.permutations(("router", "prefill", "decode")):
            with self.subTest(order=order):
                self.one(order)

    def one(self, order):
        c = e2e.Cluster(max_context=2048, max_running=2)
        processes = []
        try:
            for role in order:
                with open(c.dir / f"{role}.log", "wb") as log:
                    processes.append(subprocess.Popen(
                        [e2e.BUILD / role / f"tandem-{role}", "--config", c.config], stdout=log, stderr=log))
                time.sleep(0.5)  # long enough to have dialed and failed
            deadline = time.monotonic() + 30
            while True:
                try:
                    with urllib.request.urlopen(c.url + "/ready", timeout=5) as r:
                        if r.status == 200:
                            break
                except OSError:
                    pass
                self.assertLess(time.monotonic(), deadline, f"not ready: {order}")
                time.sleep(0.05)
            self.assertTrue(all(p.poll() is None for p in processes))
        except BaseException:
            c.print_logs()
            raise
        finally:
            for p in processes:
                p.terminate()
            codes = [p.wait(20) for p in processes]
            c.__exit__(None)
        self.assertEqual(codes, [0, 0, 0])


if __name__ == "__main__":
    e2e.main("__main__")
