#!/usr/bin/env python3
"""`tandem doctor` as a process, against the quickstart's configuration (no errors) and against ones that
are broken on purpose, each of which must be found, named, cured and be exit code 1.

usage: test_doctor.py BUILD [unittest arguments]"""
import json
import os
import pathlib
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]).resolve()
TANDEM = BUILD / "deploy" / "tandem"
MODEL = TREE / "deploy" / "models" / "needle"
WORKERS = (BUILD / "deploy" / "tandem-lane").exists()


class TestDoctor(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="tandem-doctor-", dir="/tmp"))
        self.addCleanup(shutil.rmtree, self.dir)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]

    def config(self, **settings):
        values = {"model.dir": MODEL, "model.name": "needle", "numerics": "plain", "run_dir": self.dir,
                  "router.listen": f"127.0.0.1:{self.port}", "router.thinking": "chat"}
        values |= {k.replace("__", "."): v for k, v in settings.items()}
        path = self.dir / "tandem.conf"
        path.write_text("".join(f"{k} = {v}\n" for k, v in values.items()))
        return path

    def run_doctor(self, *args, **kw):
        return subprocess.run([TANDEM, "doctor", *map(str, args)], text=True, capture_output=True, timeout=100, **kw)

    def findings(self, config, *args, **kw):
        """(exit code, findings)"""
        r = self.run_doctor("--config", config, "--json", *args, **kw)
        self.assertIn(r.returncode, (0, 1), r.stderr)
        report = json.loads(r.stdout)
        for f in report["findings"]:
            self.assertIn(f["verdict"], ("ok", "skipped", "warning", "error"))
            self.assertTrue(f["text"] and f["area"])
            self.assertTrue(f["cure"] or f["verdict"] in ("ok", "skipped"), f)
        self.assertEqual(report["errors"], sum(f["verdict"] == "error" for f in report["findings"]))
        self.assertEqual(r.returncode, 1 if report["errors"] else 0)
        return r.returncode, report["findings"]

    def finds(self, config, area, *words, verdict="error", args=(), **kw):
        code, findings = self.findings(config, *args, **kw)
        text = "\n".join(f"{f['verdict']} {f['area']}: {f['text']}" for f in findings)
        self.assertEqual(code, 1 if "error" in verdict else 0, text)
        bad = [f for f in findings if f["verdict"] == verdict]
        self.assertEqual({f["area"] for f in bad}, {area}, text)
        for word in words:
            self.assertTrue(any(word in f["text"] for f in bad), f"{word}\n{text}")
        return bad

    # ---- sound ----

    def test_quickstart(self):
        code, findings = self.findings(self.config())
        self.assertEqual(code, 0, findings)
        fine = {f["area"] for f in findings if f["verdict"] == "ok"}
        self.assertLessEqual({"config", "model", "plan", "host", "ports"} | ({"lane"} if WORKERS else set()), fine)
        self.assertEqual([f["text"].split(":")[0] for f in findings if f["area"] == "gpu"], ["GPUs"])
        lines = self.run_doctor("--config", self.dir / "tandem.conf").stdout.splitlines()
        self.assertEqual(len(lines), len(findings) + 1)
        self.assertRegex(lines[-1], r"^doctor: \d+ ok, \d+ skipped, \d+ warnings, 0 errors$")
        quiet = self.run_doctor("--config", self.dir / "tandem.conf", "--quiet").stdout
        self.assertNotRegex(quiet, r"(?m)^ok ")
        self.assertFalse([p for p in pathlib.Path("/dev/shm").glob("tandem-doctor-*")])

    # ---- configuration ----

    def test_settings(self):
        self.finds(self.config(no_such=1), "config", "unknown setting 'no_such'", ":7:")
        self.finds(self.dir / "none", "config", "No such file")
        self.finds(self.config(), "config", "max_context", args=("--set", "max_context=1"))
        self.finds(self.config(nvfp4_activations="on"), "config", "prefill@0: nvfp4_activations", "decode@0: ")
        self.finds(self.config(run_dir="/tmp/" + "x" * 100), "host", "expected at most 95 bytes")
        self.finds(self.config(run_dir=self.dir / "tandem.conf"), "host", "another kind of file")

    def test_processes_that_do_not_fit_together(self):
        c = self.config()
        c.write_text(c.read_text() + "[decode@3]\nmax_running = 2\n[prefill]\nkv_dtype = fp32\n")
        bad = self.finds(c, "config", "section [decode@3]", "kv_dtype is")
        self.assertEqual(len(bad), 2)
        self.assertTrue(all(len(f["cure"]) > 10 for f in bad), bad)

    # ---- model ----

    def copy(self):
        to = self.dir / "model"
        shutil.copytree(MODEL, to)
        return to

    def test_files_that_are_missing(self):
        m = self.copy()
        (m / "tokenizer.json").unlink()
        self.finds(self.config(model__dir=m), "model", "tokenizer.json")
        shutil.copy(MODEL / "tokenizer.json", m)
        (m / "model.safetensors").rename(m / "away")
        self.finds(self.config(model__dir=m), "model", "found none of them")
        (m / "config.json").unlink()
        self.finds(self.config(model__dir=m), "model", "config.json", "found none of them")
        code, _ = self.findings(self.config(model__dir=MODEL, load_format="random"))
        self.assertEqual(code, 0)

    def test_truncated_file(self):
        m = self.copy()
        f = m / "model.safetensors"
        size = f.stat().st_size
        os.truncate(f, size - 1)
        self.finds(self.config(model__dir=m), "model", f"expected {size} bytes by its own header, found {size - 1}")
        os.truncate(f, 100)
        self.finds(self.config(model__dir=m), "model", "ends inside its header")
        f.write_text("version https://git-lfs.github.com/spec/v1\n")
        bad = self.finds(self.config(model__dir=m), "model", "no header")
        self.assertIn("git lfs", bad[0]["cure"])

    def split(self, m):
        """The one file as two shards with an index."""
        whole = (m / "model.safetensors").read_bytes()
        n = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8:8 + n])
        header.pop("__metadata__", None)
        names, data, where = sorted(header), whole[8 + n:], {}
        for k, part in enumerate((names[::2], names[1::2])):
            out, body = {}, b""
            for name in part:
                a, b = header[name]["data_offsets"]
                out[name] = header[name] | {"data_offsets": [len(body), len(body) + b - a]}
                body += data[a:b]
                where[name] = f"model-{k}.safetensors"
            text = json.dumps(out).encode()
            text += b" " * (-len(text) % 8)
            (m / f"model-{k}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
        (m / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        (m / "model.safetensors").unlink()
        return where

    def test_shards(self):
        m = self.copy()
        where = self.split(m)
        code, findings = self.findings(self.config(model__dir=m))
        self.assertEqual(code, 0, findings)
        self.assertTrue(any("2 files" in f["text"] for f in findings))
        with open(m / "model-1.safetensors", "ab") as f:
            f.write(b"x")
        self.finds(self.config(model__dir=m), "model", "model-1.safetensors", verdict="warning")
        name = next(iter(where))
        (m / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where | {name: "model-1.safetensors"}}))
        self.finds(self.config(model__dir=m), "model", name)
        (m / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        (m / "model-0.safetensors").unlink()
        os.truncate(m / "model-1.safetensors", 5000)
        self.finds(self.config(model__dir=m), "model", "model-0.safetensors: No such file", "model-1.safetensors")

    # ---- limits, keys, ports ----

    def test_open_files(self):
        def few():
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        self.finds(self.config(), "host", "RLIMIT_NOFILE", "found 200", preexec_fn=few)
        self.finds(self.config(router__max_requests=60000), "host", "fewer connections", verdict="warning")

    def test_keys(self):
        key = self.dir / "key"
        key.write_text("alice sk-0123456789abcdef\n")
        for mode, words in ((0o644, "found 0644"), (0o620, "found 0620"), (0o600, None)):
            key.chmod(mode)
            c = self.config(router__api_keys_file=key)
            if words:
                self.finds(c, "keys", "router.api_keys_file", words)
            else:
                self.assertEqual(self.findings(c)[0], 0)
        code, findings = self.findings(self.config(cluster_key_file=key)) # the lane says it as well
        self.assertEqual(code, 1)
        self.assertTrue(any("expected at least 32 bytes, found 26" in f["text"] for f in findings), findings)
        self.finds(self.config(router__api_keys_file=self.dir / "none"), "keys", "No such file")

    def test_ports(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            self.finds(self.config(router__listen="127.0.0.1:%d" % s.getsockname()[1]), "ports", "held by another")
        self.finds(self.config(router__listen="192.0.2.1:8000"), "ports", "Cannot assign")
        self.finds(self.config(router__listen="localhost"), "ports", "numeric address")

    # ---- lanes ----

    @unittest.skipUnless(WORKERS, "a build without UCX")
    def test_tcp_lane(self):
        key = self.dir / "key"
        key.write_text("k" * 44)
        key.chmod(0o600)
        tcp = dict(router__control=f"127.0.0.1:{self.port}", router__listen="127.0.0.1:0")
        self.finds(self.config(**tcp, lane_device="lo"), "lane", "expected cluster_key_file")
        tcp["cluster_key_file"] = key
        self.finds(self.config(**tcp, lane_device="nosuch0"), "lane", "nosuch0")
        bad = self.finds(self.config(**tcp, lane_device="lo"), "lane", "loopback", verdict="warning")
        self.assertEqual(len(bad), 1)
        self.assertTrue(any(f["area"] == "lane" and "tcp/lo" in f["text"]
                            for f in self.findings(self.dir / "tandem.conf")[1]))

    # ---- a cluster that runs ----

    @unittest.skipUnless(WORKERS, "a build without UCX")
    def test_beside_our_own_cluster(self):
        c = self.config(threads=1)
        up = subprocess.run([TANDEM, "up", "--config", c, "--timeout", "90"], text=True, capture_output=True)
        try:
            self.assertEqual(up.returncode, 0, up.stderr)
            code, findings = self.findings(c)
            self.assertEqual(code, 0, findings)
            self.assertTrue(any("held by this configuration's router" in f["text"] for f in findings))
        finally:
            subprocess.run([TANDEM, "down", "--config", c], capture_output=True)

    # ---- use ----

    def test_wrong_use(self):
        for args, word in ((("--limit", "0"), "--limit"), (("here",), "here"), (("--nonsense",), "unknown")):
            r = self.run_doctor(*args)
            self.assertEqual(r.returncode, 2, args)
            self.assertIn(word, r.stderr)
        self.assertIn("Exit codes", self.run_doctor("--help").stdout)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:], verbosity=2)
