#!/usr/bin/env python3
"""tests/gpu.py over an invented build folder: which tests it runs, from where, what it says of them,
and the one skip where there is no GPU."""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gpu  # noqa: E402

LAST = "tests: {} passed, {} failed, {} skipped"


class TestGpuRunner(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.build = pathlib.Path(self.folder.name) / "carried"
        (self.build / "meson-info").mkdir(parents=True)
        self.tests = []
        missing = gpu.missing
        self.addCleanup(setattr, gpu, "missing", missing)
        gpu.missing = lambda: None

    def add(self, name, script, suite="gpu", args=(), env=None, limit=60):
        """As meson wrote it down on another machine: a program of the build folder, a file of the tree."""
        path = self.build / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        self.tests.append({"name": name, "cmd": [f"/was/build/../build/{name}", *args], "env": env or {},
                           "suite": ["tandem:unit", f"tandem:{suite}"], "timeout": limit})

    def run_all(self, *names):
        info = self.build / "meson-info"
        info.joinpath("meson-info.json").write_text(
            json.dumps({"directories": {"source": "/was", "build": "/was/build"}}))
        info.joinpath("intro-tests.json").write_text(json.dumps(self.tests))
        said = io.StringIO()
        argv, sys.argv = sys.argv, ["gpu.py", str(self.build), *names]
        try:
            with contextlib.redirect_stdout(said):
                code = gpu.main()
        finally:
            sys.argv = argv
        return code, said.getvalue()

    def test_counts(self):
        self.add("kernels_cuda", 'test -d "$TANDEM_TEST_MODEL" && test "$MARK" = here && test -f "$1"',
                 args=["/was/build/../tests/gpu.py"], env={"MARK": "here"})
        self.add("skips", "echo skipped: no moon; exit 77")
        self.add("fails", "echo what went wrong; exit 3")
        self.add("is_missing", "exit 0")
        (self.build / "is_missing").unlink()
        self.add("hangs", "echo so far; sleep 1000", limit=0.2)
        self.add("elsewhere", "exit 1", suite="e2e")
        code, said = self.run_all()
        self.assertEqual(code, 1)
        self.assertEqual(said.splitlines()[-1], LAST.format(1, 3, 1), said)
        for word in ("no moon", "what went wrong", "FAIL (3)", "cannot be started", "no end after", "so far"):
            self.assertIn(word, said)
        code, said = self.run_all("kernels")
        self.assertEqual((code, said.splitlines()[-1]), (0, LAST.format(1, 0, 0)), said)

    def test_one_skip(self):
        self.add("other", "exit 1")
        code, said = self.run_all()  # a build without CUDA
        self.assertEqual((code, said.splitlines()[-1]), (0, LAST.format(0, 0, 1)), said)
        self.assertIn("without CUDA", said)
        gpu.missing = lambda: "no driver"
        code, said = self.run_all()
        self.assertEqual((code, said), (0, "skipped gpu: no driver\n" + LAST.format(0, 0, 1) + "\n"))


unittest.main(argv=sys.argv[:1])
