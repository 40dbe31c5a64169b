#!/usr/bin/env python3
"""A soak: a real cluster of two prefill and two decode workers under mixed requests for as long as
asked, with one role restarted now and then. At its end nothing has leaked and nothing was lost:

  streams   every answer is complete and equal to what its prompt gave before; an error is honest, and
            allowed only to requests that were under way while a role restarted
  memory    memory of its own (RssAnon) of each process is flat after its warm-up: the mean of the last
            third of its samples is at most --growth percent (or 1 MB) above the mean of the first third.
            Of UCX's shared memory the mappings are counted, not what is resident: a ring's elements are
            touched one by one, and the first turn of 2,048 takes longer than a soak. They come and go
            with links, so they may differ by one link's
  ledgers   pages, slots, slabs and requests in /v1/cluster return to zero
  files     every process has as many descriptors open as after warm-up

usage: soak.py BUILD [--minutes N] [--restart-every SECONDS] [--growth PERCENT] [--seed N]

Thirty minutes (the default) is the proof; five show whether anything is wrong at once. Not part of
tests/run: `ninja -C build nightly` runs it."""
import argparse
import http.client
import json
import os
import pathlib
import random
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

CLIENTS = 8
LINK_SHARED_MB = 100  # a peer's rings (21 MB) and its landing slabs (67 MB)
WARM_S = 40  # of a process: until every page of its pool and every buffer was touched once
AFTER_RESTART_S = 20  # a request begun before the restart may end in an error until then
ROLES = ("router", "prefill@0", "prefill@1", "decode@0", "decode@1")


class Soak:
    def __init__(self, cluster, args):
        self.c, self.args = cluster, args
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.known = {}  # body without "stream": the text it gave
        self.count = dict.fromkeys(
            ("whole", "streams", "cancelled", "too_long", "bad", "excused", "overloaded"), 0)
        self.faults = []
        self.restarts = []  # [begin, end or None]
        self.samples = {}  # pid: [name, [(time, own MB, fds, shared MB)]]

    def fault(self, what):
        with self.lock:
            self.faults.append(f"{time.monotonic() - self.begun:.1f} s: {what}")

    def did(self, what):
        with self.lock:
            self.count[what] += 1

    def excused(self, begun):
        """Whether a restart touched the time from `begun` to now."""
        with self.lock:
            return any(end is None or end + AFTER_RESTART_S > begun for _, end in self.restarts)

    # ---- requests ----

    def ask(self, body, path="/v1/completions"):
        conn = http.client.HTTPConnection(self.c.url.removeprefix("http://"), timeout=180)
        conn.request("POST", path, body if isinstance(body, bytes) else json.dumps(body),
                     {"Content-Type": "application/json"})
        return conn, conn.getresponse()

    def answered(self, key, text, begun):
        with self.lock:
            want = self.known.setdefault(key, text)
        if text != want:
            self.fault(f"another text for the same request: {text[:60]!r}, before {want[:60]!r}")

    def refused(self, status, text, begun):
        """An answer that is an error: one that overload or a restart explains."""
        if status == 429:
            self.did("overloaded")
            time.sleep(0.2)
        elif self.excused(begun):
            self.did("excused")
            time.sleep(0.2)
        else:
            self.fault(f"status {status} without a restart: {text[:200]}")

    def whole(self, body, key, begun, rng):
        conn, r = self.ask(body)
        text = r.read().decode()
        conn.close()
        if r.status != 200:
            self.refused(r.status, text, begun)
            return
        j = json.loads(text)
        self.answered(key, j["choices"][0]["text"], begun)
        self.did("whole")

    def stream(self, body, key, begun, rng):
        conn, r = self.ask(body | {"stream": True})
        text, error, finish, done = "", None, None, False
        if r.status != 200:
            self.refused(r.status, r.read().decode(), begun)
            conn.close()
            return
        for line in r:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                done = True
                continue
            event = json.loads(line[6:])
            error = event.get("error", error)
            for choice in event.get("choices", ()):
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        conn.close()
        if error or not done:
            if not error and not self.excused(begun):
                self.fault(f"a stream was cut after {text[-40:]!r}")
            else:
                self.refused(200, str(error), begun)
            return
        if finish is None:
            self.fault("a stream ended without a reason")
        self.answered(key, text, begun)
        self.did("streams")

    def cancelled(self, body, key, begun, rng):
        conn, r = self.ask(body | {"stream": True, "max_tokens": 400, "ignore_eos": True})
        if r.status == 200:
            for _ in range(rng.randrange(1, 30)):
                if not r.readline():
                    break
        conn.close()
        self.did("cancelled")

    def too_long(self, body, key, begun, rng):
        conn, r = self.ask(body | {"max_tokens": 100000})
        text = r.read().decode()
        conn.close()
        if r.status != 400:
            self.refused(r.status, text, begun)
        self.did("too_long")

    def bad(self, body, key, begun, rng):
        bodies = (b"{", b'{"prompt": 7}', b'{"model": "needle", "prompt": "x", "top_p": 5}',
                  b'{"model": "other", "prompt": "x"}')
        conn, r = self.ask(rng.choice(bodies))
        text = r.read().decode()
        conn.close()
        if r.status not in (400, 404):
            self.refused(r.status, text, begun)
        self.did("bad")

    def client(self, number):
        rng = random.Random(self.args.seed * 1000 + number)
        kinds = (self.stream, self.stream, self.stream, self.whole, self.whole, self.cancelled,
                 self.too_long, self.bad)
        while not self.stop.is_set():
            begun = time.monotonic()
            n = rng.choice((1, 5, 20, 60, 150))
            which = rng.randrange(6)
            prompt = f"Note {which}. " + "The pilot packed the red wagon near the mill. " * n
            body = {"model": "needle", "prompt": prompt, "temperature": 0.8, "seed": which,
                    "max_tokens": (8, 40, 160)[which % 3], "ignore_eos": which % 2 == 0}
            key = (prompt, which)
            kind = rng.choice(kinds)
            try:
                kind(body, key, begun, rng)
            except (OSError, http.client.HTTPException) as e:
                if self.excused(begun):
                    self.did("excused")
                    time.sleep(0.2)
                else:
                    self.fault(f"{kind.__name__}: {type(e).__name__} {e}")

    # ---- restarts ----

    def restarter(self):
        rng = random.Random(self.args.seed)
        while not self.stop.wait(self.args.restart_every):
            name = rng.choice(ROLES)
            with self.lock:
                self.restarts.append([time.monotonic(), None])
            r = self.c.tool("restart", name, "--config", self.c.config)
            with self.lock:
                self.restarts[-1][1] = time.monotonic()
            if r.returncode != 0:
                self.fault(f"restart of {name}: {r.stderr}")

    # ---- memory and files ----

    def sample(self):
        now = time.monotonic()
        for name in ROLES:
            try:
                pid = self.c.pid(name)
                rss = next(int(line.split()[1]) for line in open(f"/proc/{pid}/status")
                           if line.startswith("RssAnon"))
                shared = sum(int(line.split()[0].split("-")[1], 16) - int(line.split("-")[0], 16)
                             for line in open(f"/proc/{pid}/maps") if "ucx_shm" in line)
                fds = len(os.listdir(f"/proc/{pid}/fd"))
            except (OSError, ValueError, IndexError, StopIteration):
                continue  # being restarted
            self.samples.setdefault(pid, [name, []])[1].append((now, rss / 1024, fds, shared / 1e6))

    def check_memory(self):
        for pid, (name, all_samples) in self.samples.items():
            warm = [s for s in all_samples if s[0] > all_samples[0][0] + WARM_S]
            if len(warm) < 30:
                continue  # lived too short to say anything
            third = len(warm) // 3
            first = statistics.mean(s[1] for s in warm[:third])
            last = statistics.mean(s[1] for s in warm[-third:])
            shared = max(s[3] for s in warm[:third]), max(s[3] for s in warm[-third:])
            print(f"{name:10} pid {pid:7} {len(all_samples):5} s  own memory {first:7.1f} MB after warm-up, "
                  f"{last:7.1f} MB at the end ({last - first:+.2f})  shared mapped {shared[0]:.0f} to {shared[1]:.0f} MB"
                  f"  descriptors {warm[0][2]} to {warm[-1][2]}")
            if last - first > max(1.0, first * self.args.growth / 100):
                self.fault(f"{name} grew from {first:.1f} to {last:.1f} MB")
            if shared[1] > shared[0] + LINK_SHARED_MB:
                self.fault(f"{name} maps {shared[1]:.0f} MB of shared memory, {shared[0]:.0f} before")

    def idle_files(self):
        self.c.wait_baseline(30)
        return {self.c.pid(n): len(os.listdir(f"/proc/{self.c.pid(n)}/fd")) for n in ROLES}

    def run_clients(self, seconds, restarts):
        self.stop.clear()
        threads = [threading.Thread(target=self.client, args=(i,)) for i in range(CLIENTS)]
        if restarts:
            threads.append(threading.Thread(target=self.restarter))
        for t in threads:
            t.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(1)
            self.sample()
        self.stop.set()
        for t in threads:
            t.join(300)
            if t.is_alive():
                self.fault("a request never ended")

    def run(self):
        self.begun = time.monotonic()
        self.run_clients(WARM_S, restarts=False)
        before = self.idle_files()
        self.run_clients(self.args.minutes * 60 - WARM_S, restarts=True)
        after = self.idle_files()
        for pid in before.keys() & after.keys():
            if after[pid] > before[pid] + 2:  # a kept connection of this program's own
                self.fault(f"{self.samples[pid][0]}: {before[pid]} descriptors before, {after[pid]} after")
        status, page = self.c.get("/v1/cluster")
        busy = {k: v for k, v in page["counts"].items() if k in ("live", "queued", "tombstones") and v}
        if status != 200 or busy or page["requests"]:
            self.fault(f"the router still holds {busy} and {page['requests']}")
        self.check_memory()


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("build")
    p.add_argument("--minutes", type=float, default=30)
    p.add_argument("--restart-every", type=float, default=60)
    p.add_argument("--growth", type=float, default=2)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    with e2e.Cluster(max_context=8192, max_running=6, pool_pages=96, cluster__prefill=2, cluster__decode=2,
                     heartbeat_ms=200, router__max_requests=64) as c:
        s = Soak(c, args)
        s.run()
    print(f"{args.minutes:g} minutes, {len(s.restarts)} restarts: " +
          ", ".join(f"{v} {k}" for k, v in s.count.items()))
    for f in s.faults[:20]:
        print("FAULT", f)
    print(f"soak: {len(s.faults)} faults")
    return 1 if s.faults else 0


if __name__ == "__main__":
    sys.exit(main())
