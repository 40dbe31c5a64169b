#!/usr/bin/env python3
"""deploy/ops hands everything to the right tool and for the right cluster, against a tool that only
says what it was given: every command it has for a running cluster has its script, no argument is
changed, a tree's scripts take the tree's build and the quickstart's cluster, installed ones neither.

usage: test_ops.py"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
OPS = TREE / "deploy" / "ops"
SCRIPTS = sorted(p.name for p in OPS.iterdir() if p.name != "find-tool")
UID = 987654322  # nobody's: the scripts look for a folder named after it


class TestOps(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name) / "a folder"
        self.path = self.dir / "path"
        self.program(self.path / "id", f"echo {UID}")
        # who owns a folder is asked with the same user id as its name
        self.program(self.path / "find", f'for a; do shift; [ "$a" = {UID} ] && a={os.geteuid()}; '
                                         'set -- "$@" "$a"; done; exec /usr/bin/find "$@"')
        self.run_dir = pathlib.Path(f"/tmp/tandem-quickstart-{UID}")
        self.addCleanup(shutil.rmtree, self.run_dir, True)

    @staticmethod
    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def tool(self, path):
        self.program(path, r'printf "%s\n" "$0"; for a; do printf "<%s>\n" "$a"; done; exit 7')

    def tree(self):
        shutil.copytree(OPS, self.dir / "tree/deploy/ops")
        (self.dir / "tree/meson.build").touch()
        self.tool(self.dir / "tree/build/deploy/tandem")
        return self.dir / "tree/deploy/ops"

    def installed(self):
        shutil.copytree(OPS, self.dir / "usr/share/tandem/ops")
        self.tool(self.dir / "usr/bin/tandem")
        return self.dir / "usr/share/tandem/ops"

    def quickstart(self):
        self.run_dir.mkdir()
        (self.run_dir / "tandem.conf").touch()
        return str(self.run_dir / "tandem.conf")

    def ask(self, script, *args):
        """(the tool that ran, what it was given)"""
        r = subprocess.run([script, *args], text=True, capture_output=True, timeout=20,
                           env=os.environ | {"PATH": f"{self.path}:{os.environ['PATH']}"})
        self.assertEqual((r.returncode, r.stderr), (7, ""))
        tool, *given = r.stdout.splitlines()
        return pathlib.Path(tool).resolve(), [g[1:-1] for g in given]

    def test_every_command_on_a_cluster_has_its_script(self):
        source = "".join(p.read_text() for p in (TREE / "deploy/tool").glob("cmd_*.c"))
        usages = re.findall(r'"usage: tandem (\S+) [^"]*ROLE\[@N\]|"usage: tandem (rolling-\S+)', source)
        self.assertEqual(sorted({a or b for a, b in usages}), SCRIPTS)
        self.assertEqual(len(SCRIPTS), 6)

    def test_arguments_are_handed_over(self):
        ops = self.installed()
        for name in SCRIPTS:
            for args in ([], ["decode@1", "--drain"], ["", "a b", "*", "--", "-x", "$(id)", 'q"\'']):
                self.assertEqual(self.ask(ops / name, *args), ((self.dir / "usr/bin/tandem").resolve(), [name] + args))

    def test_a_tree_takes_its_own_build(self):
        ops = self.tree()
        self.tool(self.path / "tandem")
        want = (self.dir / "tree/build/deploy/tandem").resolve()
        self.assertEqual(self.ask(ops / "status"), (want, ["status"]))
        link = self.dir / "any name"
        link.symlink_to(ops / "status")
        self.assertEqual(self.ask(link), (want, ["status"]))
        want.unlink()  # another version of it would not do
        r = subprocess.run([ops / "status"], text=True, capture_output=True, timeout=20)
        self.assertEqual(r.returncode, 1)
        self.assertIn("status: expected this tree's tool", r.stderr)
        self.assertIn(str(want), r.stderr)

    def test_the_path_is_the_last_resort(self):
        ops = self.installed()
        (self.dir / "usr/bin/tandem").unlink()
        self.tool(self.path / "tandem")
        self.assertEqual(self.ask(ops / "logs", "router"), ((self.path / "tandem").resolve(), ["logs", "router"]))
        (self.path / "tandem").unlink()
        r = subprocess.run([ops / "logs"], text=True, capture_output=True, timeout=20, env={"PATH": "/usr/bin:/bin"})
        self.assertEqual(r.returncode, 1)
        self.assertIn("logs: expected the tool", r.stderr)

    def test_a_tree_means_the_quickstart_cluster(self):
        conf, ops = self.quickstart(), self.tree()
        self.assertEqual(self.ask(ops / "restart", "decode")[1], ["restart", "--config", conf, "decode"])
        for args in (["--config", "/x"], ["--config=/x"], ["--url", "http://h"], ["--help"]):
            self.assertEqual(self.ask(ops / "status", *args)[1], ["status"] + args)
        self.assertEqual(self.ask(self.installed() / "restart", "decode")[1], ["restart", "decode"])

    def test_a_planted_folder_is_not_believed(self):
        ops = self.tree()
        with tempfile.TemporaryDirectory() as elsewhere:
            pathlib.Path(elsewhere, "tandem.conf").touch()
            self.run_dir.symlink_to(elsewhere)
            try:
                self.assertEqual(self.ask(ops / "drain", "decode")[1], ["drain", "decode"])
            finally:
                self.run_dir.unlink()

    @unittest.skipIf(os.geteuid() != 0, "only root can give a folder away")
    def test_a_folder_of_another_is_not_believed(self):
        self.quickstart()
        os.chown(self.run_dir, 1, 1)
        self.assertEqual(self.ask(self.tree() / "drain", "decode")[1], ["drain", "decode"])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[1:], verbosity=2)
