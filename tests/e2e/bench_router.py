#!/usr/bin/env python3
"""What the router costs, and how soon each role is ready. Workers are tests/router/fake_worker, so
nothing but the router computes.

  stall   the longest gap between two events of a stream whose tokens come every 20 ms, alone and while
          prompts of 4 MB are posted one after the other: what is longer than alone, the prompt cost
  cpu     CPU time of all the router's threads per streamed token, one token per event, several streams;
          with one token in a message of the worker's, and with 64
  start   from exec to READY=1 on the service manager's socket, each role, bundled model

usage: bench_router.py BUILD [--runs N]

Figures, no verdict: medians of N runs, and their range."""
import argparse
import http.client
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

TREE = pathlib.Path(__file__).resolve().parents[2]
MODEL = TREE / "deploy" / "models" / "needle"
PACE_MS, STREAMS, WORDS = 20, 8, 3000


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def show(what, values, unit):
    print(f"{what:72} {statistics.median(values):8.2f} {unit}  ({min(values):.2f} to {max(values):.2f})")


class Router:
    def __init__(self, build, model=MODEL):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="td-bench-", dir="/tmp"))
        self.port = free_port()
        values = {"model.dir": model, "model.name": "needle", "run_dir": self.dir,
                  "router.listen": f"127.0.0.1:{self.port}", "router.thinking": "chat",
                  "log_level": "warn"}
        args = [a for k, v in values.items() for a in ("--set", f"{k}={v}")]
        self.router = subprocess.Popen([build / "router" / "tandem-router", *args])
        self.fake = subprocess.Popen([build / "tests" / "router" / "fake_worker", self.dir / "router.sock",
                                      "needle", model, "200000"], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 30
        while not self.ready():
            assert time.monotonic() < until, "the router is not ready"
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in (self.fake, self.router):
            p.terminate()
            p.wait(20)

    def ready(self):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).status == 200
        except OSError:
            return False

    def post(self, content, **more):
        body = json.dumps({"model": "needle", "messages": [{"role": "user", "content": content}], **more})
        return self.post_body(body.encode())

    def post_body(self, body):
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        conn.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return conn, conn.getresponse()

    def stream(self, content, on_event):
        """Calls on_event per event with text; returns when the stream has ended."""
        conn, r = self.post(content, stream=True, max_tokens=20000)
        assert r.status == 200, r.read()
        end = None
        for line in r:
            if line.startswith(b"data: "):
                end = line
                on_event(line)
        assert end == b"data: [DONE]\n", end
        conn.close()

    def cpu_ns(self):
        return sum(int((t / "schedstat").read_text().split()[0])
                   for t in pathlib.Path(f"/proc/{self.router.pid}/task").iterdir())


def longest_gap(router, meanwhile):
    times = []
    done = threading.Event()
    t = threading.Thread(target=meanwhile, args=(done,))
    t.start()
    router.stream("@slow " + "word " * 150, lambda _: times.append(time.monotonic()))
    done.set()
    t.join()
    # The first gaps are the prompt's own; the last event is the end.
    return max((b - a) * 1e3 for a, b in zip(times[2:], times[3:]))


def bench_stall(build, runs):
    text = "The tide turned at noon and the crew wrote down the depth below the keel. "
    body = json.dumps({"model": "needle", "max_tokens": 1,
                       "messages": [{"role": "user", "content": text * (4_000_000 // len(text))}]}).encode()
    answers = []

    def posting(router):
        def run(done):
            while not done.is_set():
                begun = time.monotonic()
                conn, r = router.post_body(body)
                answers.append((r.status, time.monotonic() - begun))
                r.read()
                conn.close()
        return run

    with Router(build) as router:
        alone = [longest_gap(router, lambda done: None) for _ in range(runs)]
        beside = [longest_gap(router, posting(router)) for _ in range(runs)]
    show(f"longest gap of a stream of one token per {PACE_MS} ms, alone", alone, "ms")
    show(f"the same while prompts of {len(body) / 1e6:.1f} MB are posted", beside, "ms")
    show("what such a prompt adds", [b - a for a, b in zip(sorted(alone), sorted(beside))], "ms")
    show(f"a prompt of that size, to its answer (status {answers[0][0]})", [1e3 * s for _, s in answers], "ms")


def bench_cpu(build, runs, word, what):
    def count(counts, i):
        def event(_):
            counts[i] += 1
        return event

    with Router(build) as router:
        costs, rates = [], []
        for _ in range(runs):
            counts = [0] * STREAMS
            threads = [threading.Thread(target=router.stream, args=(word + "word " * WORDS, count(counts, i)))
                       for i in range(STREAMS)]
            begun, cpu = time.monotonic(), router.cpu_ns()
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            costs.append((router.cpu_ns() - cpu) / 1e3 / sum(counts))
            rates.append(sum(counts) / (time.monotonic() - begun))
    show(f"router CPU per streamed token, {STREAMS} streams of {counts[0]} events, {what}", costs, "us")
    show("  events per second with this client", rates, "1/s")


def start_to_ready(build, role):
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="td-bench-", dir="/tmp"))
    values = {"model.dir": MODEL, "run_dir": run_dir, "numerics": "plain",
              "router.listen": f"127.0.0.1:{free_port()}", "log_level": "warn"}
    args = [a for k, v in values.items() for a in ("--set", f"{k}={v}")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(run_dir / "notify"))
        manager.settimeout(60)
        begun = time.monotonic()
        p = subprocess.Popen([build / role / f"tandem-{role}", *args], stderr=subprocess.DEVNULL,
                             env=os.environ | {"NOTIFY_SOCKET": str(run_dir / "notify")})
        while b"READY=1" not in manager.recv(4096):
            pass
        took = time.monotonic() - begun
        p.send_signal(signal.SIGTERM)
        p.wait(30)
    return took * 1e3


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("build", type=pathlib.Path)
    p.add_argument("--runs", type=int, default=5)
    args = p.parse_args()
    build = args.build.resolve()
    for role in ("router", "prefill", "decode"):
        show(f"start to ready: {role}", [start_to_ready(build, role) for _ in range(args.runs)], "ms")
    bench_cpu(build, args.runs, "", "one a ms")
    bench_cpu(build, args.runs, "@fast ", "64 a ms")
    bench_stall(build, args.runs)


if __name__ == "__main__":
    main()
