#!/usr/bin/env python3
"""A rank of a decode worker hangs: its thread alone is stopped, as a debugger stops one (ptrace). The process
ends by itself with a sentence that names the rank and what it did, its streams end in an honest error, what
had shown nothing yet is retried, and a new process in its place serves.

usage: test_lost_rank.py BUILD [unittest arguments]"""
import concurrent.futures
import os
import pathlib
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402
from test_hung_engine import Stream, body, whole  # noqa: E402
from traced import WALL, libc, stop_thread  # noqa: E402

SILENCE_MS = 2000  # collective_timeout_ms: a step takes milliseconds, but a busy machine may take it from us
SUBREAPER, EXIT_FAILED = 36, 1


def ticks(pid):
    """{thread: processor time}"""
    times = {}
    for t in pathlib.Path(f"/proc/{pid}/task").iterdir():
        fields = (t / "stat").read_text().rsplit(")", 1)[1].split()
        times[int(t.name)] = int(fields[11]) + int(fields[12])
    return times


class TestLostRank(unittest.TestCase):
    def until(self, what, holds):
        end = time.monotonic() + e2e.PATIENCE
        while not holds():
            self.assertLess(time.monotonic(), end, f"never: {what}")
            time.sleep(0.02)

    def busiest(self, pid):
        """Of a worker that decodes the ranks compute; the loop is its first thread."""
        before = ticks(pid)

        def most():
            now = ticks(pid)
            return max(((now[t] - before.get(t, 0), t) for t in now if t != pid))

        self.until("a rank computes", lambda: most()[0] > 10)
        return most()[1]

    def test_decode(self):
        # Who orphans are given to: the workers' exit codes come here.
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        with e2e.Cluster(max_context=8192, heartbeat_ms=100, decode={
                "tp": 2, "threads": 2, "collective_timeout_ms": SILENCE_MS}) as c:
            asked = body(1, 40)
            alone = whole(c, asked)
            pid = c.pid("decode@0")
            streams = [Stream(c, body(100 + i, 6000)) for i in range(2)]
            self.until("every stream has begun", lambda: all(s.events > 3 for s in streams))
            rank = self.busiest(pid)
            stop_thread(pid, rank)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                late = pool.submit(whole, c, asked)  # waits for a worker that will never answer it
                log = c.dir / "decode@0.log"
                self.until("the sentence", lambda: "nothing came from" in log.read_text())
                os.waitpid(rank, WALL)  # the thread is gone; only now can its process be
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), EXIT_FAILED)
                said = log.read_text()
                self.assertRegex(said, r"new process is needed: ranks: for \d+ ms nothing came from rank [01] \(cpu.*?\) at \w+")
                for s in streams:
                    s.join(e2e.PATIENCE)
                    self.assertFalse(s.is_alive())
                    self.assertFalse(s.done)
                    self.assertIsNotNone(s.error)
                r = c.tool("restart", "decode@0", "--config", c.config)
                self.assertEqual(r.returncode, 0, r.stderr)
                self.assertEqual(late.result(e2e.PATIENCE), alone)
            self.assertNotEqual(c.pid("decode@0"), pid)
            self.assertEqual(whole(c, asked), alone)
            c.wait_baseline()


if __name__ == "__main__":
    e2e.main(__name__)
