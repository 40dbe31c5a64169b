#!/usr/bin/env python3
"""deploy/quickstart refuses what it must not touch, before it installs, builds or stops anything.

usage: test_quickstart.py"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
UID = 987654321  # nobody's: the script works with a folder named after it


class TestQuickstart(unittest.TestCase):
    def setUp(self):
        self.run_dir = pathlib.Path(f"/tmp/tandem-quickstart-{UID}")
        self.tools = tempfile.TemporaryDirectory()
        fake = pathlib.Path(self.tools.name) / "id"
        fake.write_text(f"#!/bin/sh\necho {UID}\n")
        fake.chmod(0o755)

    def tearDown(self):
        self.tools.cleanup()

    def quickstart(self, *args):
        env = {**os.environ, "PATH": f"{self.tools.name}:{os.environ['PATH']}"}
        return subprocess.run([TREE / "deploy" / "quickstart", *args], text=True, capture_output=True,
                              env=env, timeout=60)

    def test_wrong_use(self):
        for args in (["--no-such"], ["--port"], ["--port", "0"], ["--port", "65536"], ["--port", "x"]):
            r = self.quickstart(*args)
            self.assertEqual(r.returncode, 2, r)
            self.assertIn(args[0], r.stderr)

    def test_nothing_to_stop(self):
        r = self.quickstart("--stop")
        self.assertEqual(r.returncode, 0, r)
        self.assertIn("nothing to stop", r.stdout)

    def test_a_planted_folder(self):
        with tempfile.TemporaryDirectory() as elsewhere:
            self.run_dir.symlink_to(elsewhere)
            try:
                r = self.quickstart("--stop")
            finally:
                self.run_dir.unlink()
        self.assertEqual(r.returncode, 1, r)
        self.assertIn(str(self.run_dir), r.stderr)

    @unittest.skipIf(os.geteuid() != 0, "only root can give a folder away")
    def test_a_folder_of_another(self):
        self.run_dir.mkdir()
        try:
            os.chown(self.run_dir, 1, 1)
            r = self.quickstart("--stop")
        finally:
            self.run_dir.rmdir()
        self.assertEqual(r.returncode, 1, r)
        self.assertIn(str(self.run_dir), r.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[1:], verbosity=2)
