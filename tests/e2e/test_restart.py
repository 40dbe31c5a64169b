#!/usr/bin/env python3
"""One role restarts while the cluster works: two prefill and two decode workers as real processes,
restarted by the scripts of deploy/ops as an operator would. No other process changes, streams elsewhere do
not notice, its own are retried while no token was shown and end in an error frame otherwise. Any
role may start first.

usage: test_restart.py BUILD [unittest arguments]"""
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402
import traced  # noqa: E402

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
        self.start()

    def run(self):
        host, port = self.address.split(":")
        conn = http.client.HTTPConnection(host, int(port), timeout=e2e.PATIENCE)
        try:
            conn.request("POST", "/v1/completions", self.body, {"Content-Type": "application/json"})
            answer = conn.getresponse()
            if answer.status != 200:
                self.error = json.loads(answer.read())["error"]
                self.end = f"http {answer.status}"
                return
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
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
    def wait(condition, what, seconds=e2e.PATIENCE):
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
        r = self.c.ops("restart", name, *more)
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

    def on_decode_0(self, tokens, n):
        """A stream on the worker that a rolling restart takes first."""
        self.assertEqual(self.c.ops("drain", "decode@1").returncode, 0)
        s, worker = self.placed("decode", lambda: Stream(self.c, tokens, n))
        self.assertEqual(self.c.ops("resume", "decode@1").returncode, 0)
        self.assertEqual(worker, "decode@0")
        s.begun.wait(30)
        return s

    def rolling(self, *args):
        return subprocess.Popen([self.c.ops_path("rolling-restart"), *args, "--config", self.c.config], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def prefill_is_done(self):
        self.wait(lambda: not any(n.startswith("prefill") for n in self.workers(legs=1)),
                  "prefill workers have nothing")

    def complete(self, s, tokens, n):
        """The stream ended well, and says what the same request says now."""
        s.join(e2e.PATIENCE)
        self.assertEqual((s.end, s.finish, s.error), ("done", "length", None))
        again = Stream(self.c, tokens, n)
        again.join(e2e.PATIENCE)
        self.assertEqual(again.end, "done")
        self.assertEqual(s.text, again.text)

    def test_decode_with_streams(self):
        n, mine, other = 800, prompt(300, 1), prompt(400, 2)
        a, worker = self.placed("decode", lambda: Stream(self.c, mine, 20000))
        a.begun.wait(e2e.PATIENCE)
        b, elsewhere = self.placed("decode", lambda: Stream(self.c, other, n))
        b.begun.wait(e2e.PATIENCE)
        self.assertNotEqual(worker, elsewhere)
        self.restart(worker)
        a.join(e2e.PATIENCE)
        self.assertGreater(len(a.text), 0)
        self.assertIsNone(a.finish, "a stream whose worker is gone must not look complete")
        self.assertIsNotNone(a.error)
        self.assertIn("lost", a.error["message"])
        self.assertNotEqual(a.end, "done")
        self.complete(b, other, n)

    def test_prefill_before_the_first_token(self):
        long, n, other = prompt(8000, 3), 8, prompt(300, 4)
        b = Stream(self.c, other, 800)
        b.begun.wait(e2e.PATIENCE)
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
        a.begun.wait(e2e.PATIENCE)
        self.prefill_is_done()
        for worker in ("prefill@0", "prefill@1"):
            self.restart(worker)
            self.pids[worker] = self.c.pid(worker)
        self.complete(a, tokens, 800)

    def dies_inside_a_send(self, name, receiver):
        """Its receiver hears again by itself, of the others nobody notices, and its successor serves."""
        tokens = prompt(300, 9)
        s, worker = self.placed("decode", lambda: Stream(self.c, tokens, 500))
        s.begun.wait(e2e.PATIENCE)
        self.prefill_is_done()
        role = name.split("@")[0]
        traced.kill_inside_a_send(self.pids[name], self.pids[receiver],
                                  [p for n, p in self.pids.items() if n.startswith(role) and n != name])
        self.restart(name)
        self.complete(Stream(self.c, prompt(300, 10), 8), prompt(300, 10), 8)
        if worker != name:
            self.complete(s, tokens, 500)
        self.assertIn("new queue", (self.c.dir / f"{receiver}.log").read_text())
        self.c.wait_baseline()  # links that nobody needs just now are made again as well

    def test_prefill_dies_inside_a_send(self):
        self.dies_inside_a_send("prefill@0", "decode@0")

    def test_decode_dies_inside_a_send(self):
        self.dies_inside_a_send("decode@1", "prefill@0")

    def test_killed_worker_comes_back(self):
        os.kill(self.pids["decode@1"], signal.SIGKILL)
        self.wait(lambda: "decode@1" not in self.workers(), "the loss is seen")
        self.restart("decode@1")

    def test_router(self):
        a = Stream(self.c, prompt(300, 7), 20000)
        a.begun.wait(e2e.PATIENCE)
        self.restart("router")
        a.join(e2e.PATIENCE)
        self.assertIsNone(a.finish)
        self.assertTrue(a.end.startswith("cut"), a.end)
        self.wait(lambda: len(self.page()["pairs"]) == 4 and all(p["proven"] for p in self.page()["pairs"]),
                  "all workers are back and proven")
        self.c.wait_baseline()  # what the old router left is let go
        b = Stream(self.c, prompt(300, 8), 8)
        b.join(e2e.PATIENCE)
        self.assertEqual(b.end, "done")

    @contextlib.contextmanager
    def load(self, n):
        """`n` clients that stream all the time; afterwards nothing they asked for was lost."""
        stop, failures, answers = threading.Event(), [], []

        def client(k):
            while not stop.is_set():
                s = Stream(self.c, prompt(200 + 10 * k, 20 + k), 40)
                s.join(e2e.PATIENCE)
                (answers if s.end == "done" else failures).append((k, s.text, s.end, s.error))
        threads = [threading.Thread(target=client, args=(k,)) for k in range(n)]
        for t in threads:
            t.start()
        try:
            yield answers
        finally:
            stop.set()
            for t in threads:
                t.join()
        self.assertEqual(failures, [])
        self.assertEqual(len({(k, text) for k, text, _, _ in answers}), n)  # each always the same

    def test_rolling_restart_loses_nothing(self):
        old = {name: self.c.pid(name) for name in ALL}
        long = prompt(300, 40)
        with self.load(3):
            a = Stream(self.c, long, 3000)
            a.begun.wait(30)
            rolling = self.rolling()
            away = []  # how many workers were not there or drained, whenever it was looked at
            while rolling.poll() is None:
                there = [w for w in self.page()["workers"] if not w["draining"]]
                away.append(len(WORKERS) - len(there))
            out, err = rolling.communicate()
        self.assertEqual((rolling.returncode, err), (0, ""))
        self.assertEqual(re.findall(r"^(\S+) restarted: .* serves after", out, re.M),
                         ["decode@0", "decode@1", "prefill@0", "prefill@1"])
        self.assertIn("4 workers restarted\n", out)
        self.assertEqual(max(away), 1)
        self.complete(a, long, 3000)
        now = {name: self.c.pid(name) for name in ALL}
        self.assertEqual(now["router"], old["router"])
        self.assertFalse(set(WORKERS) & {n for n in ALL if now[n] == old[n]})
        linked = {w["name"]: w["pid"] for w in self.page()["workers"]}
        self.assertEqual(linked, {n: now[n] for n in WORKERS})

    @unittest.skipUnless(e2e.WHOLE, "one role instead of all: tests/nightly")
    def test_rolling_restart_of_one_role(self):
        r = self.c.ops("rolling-restart", "prefill")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertIn("2 workers restarted\n", r.stdout)
        changed = {n for n in ALL if self.c.pid(n) != self.pids[n]}
        self.assertEqual(changed, {"prefill@0", "prefill@1"})

    def test_rolling_restart_stops_at_the_first_that_stays_away(self):
        good = self.c.config.read_text()
        self.c.config.write_text(good + "[decode@1]\nmodel.dir = /nonexistent\n")
        try:
            with self.load(2):
                r = self.c.ops("rolling-restart")
        finally:
            self.c.config.write_text(good)
        self.assertEqual(r.returncode, 1)
        self.assertRegex(r.stderr, r"stopped after 1 of 4 workers: decode@1 ended while starting; `tandem logs decode@1")
        changed = {n for n in WORKERS if self.c.pid(n) != self.pids[n]}
        self.assertEqual(changed, {"decode@0", "decode@1"})
        # and with one away it does not take another one
        pids = {n: self.c.pid(n) for n in ALL}
        r = self.c.ops("rolling-restart")
        self.assertEqual(r.returncode, 1)
        self.assertIn("stopped after 0 of 3 workers: decode@1 is not in the fleet", r.stderr)
        self.assertEqual({n: self.c.pid(n) for n in ALL}, pids)
        self.assertEqual(self.c.ops("restart", "decode@1").returncode, 0)

    def test_rolling_restart_waits_for_the_others(self):
        a = self.on_decode_0(prompt(300, 42), 2000)
        rolling = self.rolling("decode")
        self.wait(lambda: self.workers(draining=True) == ["decode@0"], "it drains")
        os.kill(self.pids["prefill@1"], signal.SIGKILL)
        self.assertRegex(rolling.stdout.readline(), "decode@0 restarted: .* serves after")
        time.sleep(3)  # in which it would go on
        self.assertEqual(self.c.pid("decode@1"), self.pids["decode@1"])
        self.assertEqual(self.workers(draining=True), [])
        self.assertIsNone(rolling.poll())
        self.assertEqual(self.c.ops("restart", "prefill@1").returncode, 0)
        out, _ = rolling.communicate()
        self.assertEqual(rolling.returncode, 0)
        self.assertIn("2 workers restarted\n", out)
        self.complete(a, prompt(300, 42), 2000)

    def test_rolling_restart_gives_work_back(self):
        """What does not become idle, or is interrupted, takes work again and keeps its process."""
        a = self.on_decode_0(prompt(300, 41), 20000)
        r = self.c.ops("rolling-restart", "decode", "--timeout", "1")
        self.assertEqual(r.returncode, 1)
        self.assertIn("stopped after 0 of 2 workers: decode@0 still has 1 requests after 1 s", r.stderr)
        self.assertEqual(self.workers(draining=True), [])
        rolling = self.rolling("decode")
        self.wait(lambda: self.workers(draining=True) == ["decode@0"], "it drains")
        rolling.terminate()
        _, err = rolling.communicate()
        self.assertEqual(rolling.returncode, 1)
        self.assertIn("interrupted", err)
        self.assertEqual(self.workers(draining=True), [])
        self.assertEqual({n: self.c.pid(n) for n in ALL}, self.pids)
        r = self.c.ops("drain", "decode@0", "--timeout", "0")
        self.assertEqual(r.returncode, 0, r.stderr)
        r = self.c.ops("rolling-restart", "prefill")
        self.assertEqual(r.returncode, 1)
        self.assertIn("decode@0 is drained", r.stderr)
        self.assertEqual(self.c.ops("resume", "decode@0").returncode, 0)
        self.restart("decode@0")
        a.join(30)
        self.assertIsNone(a.finish)

    def test_drain_and_resume(self):
        a, worker = self.placed("decode", lambda: Stream(self.c, prompt(300, 9), 1200))
        r = self.c.ops("drain", worker, "--timeout", "0")
        self.assertEqual((r.returncode, r.stdout), (0, f"{worker} drains\n"), r.stderr)
        for salt in range(3):
            b, elsewhere = self.placed("decode", lambda: Stream(self.c, prompt(100, 30 + salt), 200))
            self.assertNotEqual(elsewhere, worker)
            b.join(e2e.PATIENCE)
            self.wait(lambda: elsewhere not in self.workers(legs=1), "it ends there")
        self.complete(a, prompt(300, 9), 1200)
        r = self.c.ops("drain", worker)
        self.assertEqual(r.returncode, 0, r.stderr)
        r = self.c.ops("status", worker, "--json")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIs(json.loads(r.stdout)["draining"], True)
        r = self.c.ops("resume", worker)
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
            (("rolling-restart", "router"), 2, "expected prefill, decode or nothing"),
            (("rolling-restart", "decode@0"), 2, "decode@0"), (("restart",), 2, "which role"), (("restart", "decode"), 1, "which one"),
            (("restart", "cook@0"), 1, "cook@0"), (("restart", "decode@5"), 1, "describes no such"),
            (("drain", "router"), 1, "cannot be drained"), (("drain", "decode@0", "--follow"), 2, "--follow"),
            (("logs", "router", "--lines", "x"), 2, "--lines"), (("resume", "a", "b"), 2, "unexpected"),
        ]:
            r = self.c.ops(*args)
            self.assertEqual(r.returncode, code, args)
            self.assertIn(word, r.stderr, args)
        self.assertEqual({n: self.c.pid(n) for n in ALL}, self.pids)

    def test_logs(self):
        r = self.c.ops("logs", "decode@1", "--lines", "1000")
        self.assertIn("decode@1 setting max_context = 32768", r.stdout)
        self.assertNotIn("prefill@0 setting", r.stdout)
        r = self.c.ops("logs")
        for name in ALL:
            self.assertIn(f"{name}.log", r.stdout)


class TestAlone(unittest.TestCase):
    def test_rolling_restart_says_what_it_costs(self):
        with e2e.Cluster(max_context=2048, max_running=2) as c:
            r = c.ops("rolling-restart")
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertIn("2 workers restarted\n", r.stdout)
            for name in ("decode@0", "prefill@0"):
                self.assertIn(f"{name} is alone in its role: requests are refused", r.stderr)


class TestUnits(unittest.TestCase):
    """The same scripts where a service manager runs the roles: a systemctl of this test's own, which
    knows units by pid files and starts the real programs."""

    SYSTEMCTL = """#!/bin/sh
cd {units}
case $1,$3 in
show,LoadState) echo loaded ;;
show,ActiveState) [ -f $5 ] && echo active || echo inactive ;;
show,UnitFileState) echo disabled ;;
show,MainPID) cat $5 ;;
list-units,*) cat failed 2>/dev/null ;;
restart,*|start,*)
    [ ! -f $2 ] || {{ kill $(cat $2); while kill -0 $(cat $2) 2>/dev/null; do sleep 0.02; done; }}
    name=${{2#tandem-}} name=${{name%.service}} role=${{name%@*}}
    case $name in *@*) set -- $2 --name ${{name#*@}} ;; *) set -- $2 ;; esac
    unit=$1; shift
    setsid {build}/$role/tandem-$role --config {config} "$@" </dev/null >>../$name.log 2>&1 &
    echo $! >$unit ;;
esac
"""

    def setUp(self):
        self.c = e2e.Cluster(max_context=2048, max_running=4)
        self.units = self.c.dir / "units"
        (self.units / "bin").mkdir(parents=True)
        systemctl = self.units / "bin" / "systemctl"
        systemctl.write_text(self.SYSTEMCTL.format(units=self.units, build=e2e.BUILD, config=self.c.config))
        systemctl.chmod(0o755)
        self.env = os.environ | {"PATH": f"{systemctl.parent}:{os.environ['PATH']}"}
        self.addCleanup(self.end)
        for name in ALL:
            subprocess.run([systemctl, "start", f"tandem-{name}.service"], check=True)
        self.wait_all()

    def end(self):
        pids = [int(p.read_text()) for p in self.units.glob("*.service")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        TestRestart.wait(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids), "they end", 20)
        self.c.__exit__(None)

    def wait_all(self):
        TestRestart.wait(lambda: self.links() == set(WORKERS) and all(p["proven"] for p in self.page()["pairs"]),
                         "all pairs proven")

    def page(self):
        try:
            j = self.c.get("/v1/cluster")[1]
        except OSError:
            j = {}
        return {"workers": [], "pairs": []} | j  # a router that starts tells of itself alone

    def links(self):
        return {w["name"] for w in self.page()["workers"]}

    def pid(self, name):
        return int((self.units / f"tandem-{name}.service").read_text())

    def ops(self, *args):
        return self.c.ops(*args, env=self.env)

    def test_units(self):
        pids = {n: self.pid(n) for n in ALL}
        r = self.ops("restart", "prefill@1", "--drain")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertIn("serves after", r.stdout)
        self.assertEqual([n for n in ALL if self.pid(n) != pids[n]], ["prefill@1"])
        # a unit that has failed keeps the others from being taken away
        (self.units / "failed").write_text("tandem-decode@7.service loaded failed failed x\n")
        r = self.ops("rolling-restart")
        self.assertEqual(r.returncode, 1)
        self.assertIn("stopped after 0 of 4 workers: tandem-decode@7.service is not in the fleet", r.stderr)
        (self.units / "failed").unlink()
        # a worker without a unit is another host's
        hidden = self.units / "tandem-decode@1.service"
        away = hidden.rename(self.units / "elsewhere")
        pids = {n: self.pid(n) for n in ALL if n != "decode@1"}
        r = self.ops("rolling-restart")
        away.rename(hidden)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertIn("decode@1 is not of this host", r.stdout)
        self.assertIn("3 workers restarted, 1 left alone\n", r.stdout)
        self.assertEqual({n for n in pids if self.pid(n) != pids[n]}, {"decode@0", "prefill@0", "prefill@1"})
        self.wait_all()


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
            deadline = time.monotonic() + e2e.PATIENCE
            while True:
                try:
                    with urllib.request.urlopen(c.url + "/ready", timeout=e2e.PATIENCE) as r:
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
            codes = [p.wait(e2e.PATIENCE) for p in processes]
            c.__exit__(None)
        self.assertEqual(codes, [0, 0, 0])


if __name__ == "__main__":
    e2e.main("__main__")
