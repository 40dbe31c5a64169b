#!/usr/bin/env python3
"""What `meson install` puts in place, installed into a folder: programs, units, configuration, model,
manual pages; that an existing configuration is kept; that systemd accepts the units, and that they
keep what the roles share and order nothing.

usage: test_install.py BUILD [unittest arguments]"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]).resolve()
UNITS = ("tandem-router.service", "tandem-prefill@.service", "tandem-decode@.service", "tandem.target")
ROLES = ("router", "prefill", "decode")


def run(*args, **kw):
    return subprocess.run([str(a) for a in args], text=True, capture_output=True, **kw)


def install(dest):
    r = run("meson", "install", "-C", BUILD, "--no-rebuild", env=os.environ | {"DESTDIR": str(dest)})
    assert r.returncode == 0, r.stdout + r.stderr


class TestInstall(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dest = pathlib.Path(tempfile.mkdtemp(prefix="tandem-install-"))
        install(cls.dest)
        cls.files = {p.name: p for p in sorted(cls.dest.rglob("*")) if p.is_file()}
        cls.units = cls.files["tandem.target"].parent
        cls.prefix = cls.units.parents[2]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.dest)

    def unit(self, name):
        """{(section, key): [values]}"""
        found, section = {}, None
        for line in (self.units / name).read_text().splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and not line.startswith("#"):
                key, value = line.split("=", 1)
                found.setdefault((section, key), []).append(value)
        return found

    def value(self, unit, key):
        values = self.unit(unit).get(("Service", key))
        return values[-1] if values else None

    # ---- bad configuration ----

    def test_bad_configuration_is_not_tried_again(self):
        for role in ROLES:
            program = BUILD / role / f"tandem-{role}"
            for args in (["--set", "no.such=1"], ["--config", "/nonexistent"], ["--bogus"],
                         ["--set", "run_dir=/tmp"]):  # the last one: model.dir is not set
                r = run(program, *args, timeout=60)
                self.assertEqual(r.returncode, 2, f"{role} {args}: {r.stderr}")
            unit = "tandem-router.service" if role == "router" else f"tandem-{role}@.service"
            self.assertEqual(self.value(unit, "RestartPreventExitStatus"), "2", unit)

    # ---- files ----

    def test_everything_is_there(self):
        for name in ("tandem", *(f"tandem-{r}" for r in ROLES)):
            path = self.prefix / "bin" / name
            self.assertTrue(os.access(path, os.X_OK), path)
            self.assertEqual(path.stat().st_mode & 0o777, 0o755)  # unreadable programs are not dumpable
            r = run(path, "--help")
            self.assertEqual(r.returncode, 0, r.stderr)
        for name in UNITS:
            self.assertTrue((self.units / name).is_file(), name)
        for page in ("tandem.1", "tandem.conf.5", *(f"tandem-{r}.8" for r in ROLES)):
            self.assertEqual(self.files[page].parent.name, "man" + page[-1])
        self.assertTrue((self.prefix / "lib/sysusers.d/tandem.conf").is_file())
        for script in (TREE / "deploy" / "ops").iterdir():
            path = self.prefix / "share/tandem/ops" / script.name
            self.assertEqual(os.access(path, os.X_OK), script.name != "find-tool", path)
        r = run(self.prefix / "share/tandem/ops/restart", "--help")  # the tool installed with it
        self.assertEqual((r.returncode, r.stdout), (0, run(self.prefix / "bin/tandem", "restart", "--help").stdout))
        model = self.prefix / "share/tandem/models/needle"
        self.assertLessEqual({"config.json", "model.safetensors", "tokenizer.json"},
                             {p.name for p in model.iterdir()})

    def conf(self):
        found = [p for p in self.dest.rglob("tandem.conf") if p.parent.parent.name == "etc"]
        self.assertEqual(len(found), 1, found)
        return found[0]

    def test_configuration(self):
        text = self.conf().read_text()
        self.assertNotIn("@", re.sub(r"\[?(router|prefill|decode)@\d\]?", "", text))
        settings = dict(re.findall(r"^([\w.]+) = (\S+)", text, re.M))
        model = self.dest / settings["model.dir"].lstrip("/")
        self.assertTrue((model / "model.safetensors").is_file())
        self.assertEqual(settings["run_dir"], "/run/" + self.value("tandem-router.service", "RuntimeDirectory"))
        for role in ROLES:  # every role takes it; an unknown option keeps it from starting
            r = run(self.prefix / "bin" / f"tandem-{role}", "--config", self.conf(), "--set", "nonsense=1")
            self.assertNotEqual(r.returncode, 0)
            self.assertIn("nonsense", r.stderr)

    def test_existing_configuration_is_kept(self):
        conf = self.conf()
        before = conf.read_text()
        conf.write_text("# mine\n")
        install(self.dest)
        self.assertEqual(conf.read_text(), "# mine\n")
        conf.write_text(before)

    # ---- manual pages ----

    def test_settings_page_is_whole(self):
        page = self.files["tandem.conf.5"].read_text().replace("\\-", "-")
        text = run(self.prefix / "bin/tandem-router", "--help").stdout
        keys = re.findall(r"^  ([a-z0-9_]+(?:\.[a-z0-9_]+)*) {2,}", text.split("defaults:")[1], re.M)
        self.assertGreater(len(keys), 20)
        self.assertEqual(keys, re.findall(r"^\.TP\n\.B (\S+)$", page.split(".SH SETTINGS")[1], re.M))

    def test_command_page_is_whole(self):
        text = run(self.prefix / "bin/tandem", "--help").stdout
        commands = re.findall(r"^  (\S+) +\S", text, re.M)
        page = self.files["tandem.1"].read_text().split(".SH COMMANDS")[1].split(".SH EXIT")[0].replace("\\-", "-")
        self.assertGreater(len(commands), 8)
        self.assertEqual(set(commands), set(re.findall(r"^\.TP\n\.B (\S+)$", page, re.M)))

    def test_pages_are_sound(self):
        if not shutil.which("groff"):
            self.skipTest("groff is not installed")
        for name, path in self.files.items():
            if path.parent.name.startswith("man"):
                r = run("groff", "-man", "-ww", "-Tutf8", "-z", path)
                self.assertEqual((r.returncode, r.stderr), (0, ""), name)

    # ---- units ----

    def test_systemd_accepts_them(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("systemd-analyze is not installed")
        with tempfile.TemporaryDirectory() as d:
            for name in UNITS:  # the programs stand in DESTDIR
                text = (self.units / name).read_text()
                text = re.sub(r"^ExecStart=/", f"ExecStart={self.dest}/", text, flags=re.M)
                (pathlib.Path(d) / name).write_text(text)
            r = run("systemd-analyze", "--man=no", "verify", *(n.replace("@.", "@1.") for n in UNITS),
                    cwd=d, env=os.environ | {"SYSTEMD_UNIT_PATH": d + ":"})
            if "Failed to initialize manager" in r.stderr or "Failed to setup" in r.stderr:
                self.skipTest("systemd-analyze does not work here: " + r.stderr.strip())
            # also warnings (unknown settings and the like), which do not change the exit code;
            # what it says about units of the system is not ours
            ours = [line for line in r.stderr.splitlines() if "tandem" in line]
            self.assertEqual((r.returncode, ours), (0, []), r.stderr)

    def test_roles_are_not_ordered(self):
        for name in UNITS[:3]:
            for (section, key), values in self.unit(name).items():
                if section != "Unit":
                    continue
                if key in ("After", "Before", "Requires", "BindsTo", "Requisite", "Wants", "Upholds"):
                    self.assertNotIn("tandem", " ".join(values), (name, key))

    def test_life(self):
        for name in UNITS[:3]:
            for key, want in {"Type": "notify", "Restart": "on-failure", "User": "tandem"}.items():
                self.assertEqual(self.value(name, key), want, (name, key))
            self.assertIn(f"--config {'/' + str(self.conf().relative_to(self.dest))}", self.value(name, "ExecStart"))
            self.assertEqual(self.unit(name)["Unit", "PartOf"], ["tandem.target"])
            self.assertEqual(self.unit(name)["Install", "WantedBy"], ["tandem.target"])
        folders = [self.value(n, "RuntimeDirectory") for n in UNITS[:3]]
        self.assertEqual(folders, ["tandem-router", "tandem-prefill-%i", "tandem-decode-%i"])
        help_text = run(self.prefix / "bin/tandem-decode", "--help").stdout
        transfer_ms = int(re.search(r"transfer_timeout_ms +(\d+)", help_text)[1])
        for name in UNITS[1:3]:
            self.assertGreater(int(self.value(name, "WatchdogSec")) * 1000, 2 * transfer_ms)

    def test_what_workers_share_stays_shared(self):
        for name in UNITS[1:3]:
            for key in ("PrivateIPC", "PrivateUsers", "PrivateDevices", "RemoveIPC"):
                self.assertEqual(self.value(name, key), "no", (name, key))
            for key in ("PrivatePIDs", "ProcSubset", "TemporaryFileSystem", "InaccessiblePaths",
                        "DynamicUser", "RootDirectory"):
                self.assertIsNone(self.value(name, key), (name, key))
        one, two = (self.unit(n) for n in UNITS[1:3])
        for key in ("User", "CapabilityBoundingSet", "AmbientCapabilities", "UMask"):
            self.assertEqual(one["Service", key], two["Service", key], key)
        for name in UNITS[:3]:  # a bind mount would keep a restarted router's old folder
            for key in ("ReadWritePaths", "ReadOnlyPaths", "BindPaths", "BindReadOnlyPaths"):
                self.assertIsNone(self.value(name, key), (name, key))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:], verbosity=2)
