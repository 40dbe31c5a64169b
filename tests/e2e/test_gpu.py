#!/usr/bin/env python3
"""A cluster whose workers compute on a GPU: recall over lengths and at the window's edges, memory that
does not grow, slabs the GPU copies from and to itself, and a worker that comes back.

usage: test_gpu.py BUILD [unittest arguments]      TANDEM_TEST_DEVICE=cuda:0"""
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

LENGTHS = "338,943,1850,4509,10498,22016"


def used_mib():
    """Of the first GPU by the driver's count; None: nvidia-smi is not here."""
    try:
        r = subprocess.run(["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return int(r.stdout)
    except (OSError, ValueError):
        return None


class TestGpu(unittest.TestCase):
    def needle(self, c, *args):
        r = c.tool("needle", "--url", c.url, *args)
        print(r.stdout)
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)

    def recall(self, **settings):
        with e2e.Cluster(max_context=24576, pool_pages=192, max_running=4, **settings) as c:
            for role in ("prefill@0", "decode@0"):
                log = (c.dir / f"{role}.log").read_text(errors="replace")
                self.assertIn("memory slabs, pinned", log)
                self.assertNotIn("the host copies each block once more", log)
            self.needle(c, "--lengths", "338")
            before = used_mib()
            self.needle(c, "--lengths", LENGTHS)
            self.needle(c, "--window")
            self.assertEqual(used_mib(), before)
            r = c.tool("restart", "decode@0", "--config", c.config)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.needle(c, "--lengths", "943")
            c.wait_baseline()

    def test_recall(self):
        self.recall()

    def test_recall_of_the_official_rules(self):
        self.recall(numerics="ref")


if __name__ == "__main__":
    e2e.main(__name__)
