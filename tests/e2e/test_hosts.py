"""A whole cluster as it runs over several hosts, here on one: control links and KV state over TCP,
both only with the cluster key. The text is that of shared memory; who has no key gets nowhere."""
import os
import random
import re
import socket
import struct
import subprocess
import time
import unittest

from cluster import BUILD, MODEL, Cluster, free_port, main

rng = random.Random(7)
PROMPT = [0] + [rng.randrange(7, 1700) for _ in range(800)]
BODY = {"model": "needle", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 1,
        "ignore_eos": True}


def key_file(folder, text="of four words, this is a secret of tests\n", mode=0o600):
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def over_tcp(**more):
    c = Cluster(router__control=f"127.0.0.1:{free_port()}", lane_device="lo", **more)
    c.settings["cluster_key_file"] = key_file(c.dir)
    c.config.write_text("".join(f"{k} = {v}\n" for k, v in c.settings.items()))
    return c


def answer(c):
    status, j = c.post("/v1/completions", BODY)
    assert status == 200, j
    assert j["usage"]["completion_tokens"] == BODY["max_tokens"], j["usage"]
    assert len(set(j["choices"][0]["logprobs"]["token_logprobs"])) > 1, j
    assert len(j["choices"][0]["text"]) > 10, j
    return j["choices"][0]["text"], j["choices"][0]["logprobs"]


def start(role, *settings):
    """Ends by itself, or is none of ours to wait for: (exit code, what it said)."""
    args = [BUILD / role / f"tandem-{role}"]
    for s in (f"model.dir={MODEL}", "numerics=plain", "threads=1", *settings):
        args += ["--set", s]
    r = subprocess.run([str(a) for a in args], capture_output=True, text=True, timeout=60)
    return r.returncode, r.stdout + r.stderr


class Hosts(unittest.TestCase):
    def test_same_text(self):
        with Cluster() as c:
            want = answer(c)
        with over_tcp() as c:
            self.assertEqual(answer(c), want)
            _, j = c.get("/v1/cluster")
            for w in j["workers"]:
                self.assertEqual(w["settings"]["lane"], "tcp")
                self.assertRegex(w["settings"]["lane_transport"], r"^tcp/lo\b")
                self.assertNotIn("posix", w["settings"]["lane_transport"])
            moved = [w["ledger"]["bytes_moved"] for w in j["workers"] if w["role"] == "decode"]
            self.assertGreater(moved[0], 0)
            began = time.monotonic()
            self.strangers(c)
            self.assertEqual(answer(c), want)
            log = (c.dir / "router.log").read_text()
            said = re.findall(r"W router router\.control: .*", log)
            seconds = time.monotonic() - began
            self.assertTrue(1 <= len(said) <= 1 + seconds / 10, said)  # of many
            self.assertNotIn("was lost", log)
            c.wait_baseline()

    def strangers(self, c):
        """At the control port: nothing, garbage, a part of the truth, the router's own words, a frame
        that promises 16 MB, a hello without proof. Each is hung up on; none learns anything."""
        host, port = str(c.settings["router.control"]).split(":")
        opening = struct.pack("<IBBBBIIQ", 0x43584454, 1, 1, 1, 1, 2, 0, 77) + os.urandom(32)
        frame = lambda b: struct.pack("<I", len(b)) + b
        sends = [b"", os.urandom(400), frame(opening)[:20], struct.pack("<I", 16 << 20),
                 frame(b"\x0a\x02\x08\x01"), frame(os.urandom(56)), frame(opening[:-1])]
        for bytes_ in sends + sends:
            with socket.create_connection((host, int(port)), timeout=10) as s:
                s.sendall(bytes_)
                if bytes_ in (sends[0], sends[2]):
                    continue  # leaves by itself
                s.settimeout(10)
                try:
                    self.assertEqual(s.recv(4096), b"")
                except ConnectionResetError:
                    pass
        with socket.create_connection((host, int(port)), timeout=10) as s:
            s.sendall(frame(opening))
            challenge = s.recv(4096)
            self.assertEqual(len(challenge), 4 + 56)
            s.sendall(challenge)  # reflected
            try:
                self.assertEqual(s.recv(4096), b"")
            except ConnectionResetError:
                pass
        many = [socket.create_connection((host, int(port)), timeout=10) for _ in range(40)]
        time.sleep(0.2)
        self.assertEqual(c.get("/ready")[0], 200)
        for s in many:
            s.close()

    def test_refused_at_start(self):
        c = Cluster()
        key = key_file(c.dir)
        control = f"router.control=127.0.0.1:{free_port()}"
        device, run = "lane_device=lo", f"run_dir={c.dir}"
        listen = f"router.listen=127.0.0.1:{free_port()}"
        for role in ("router", "prefill", "decode"):
            code, text = start(role, control, device, run, listen)
            self.assertNotIn(code, (0, -9))
            self.assertIn("cluster_key_file", text)
            key.chmod(0o644)
            code, text = start(role, control, device, run, listen, f"cluster_key_file={key}")
            self.assertNotEqual(code, 0)
            self.assertIn("expected mode 0600", text)
            key.chmod(0o600)
        code, text = start("decode", control, run, f"cluster_key_file={key}", "lane_device=nosuch0")
        self.assertNotEqual(code, 0)
        self.assertIn("there are:", text)
        code, text = start("prefill", "lane=tcp", device, run)
        self.assertNotEqual(code, 0)
        self.assertIn("cluster_key_file", text)
        code, text = start("router", f"router.control={c.dir}/sock", run, listen)
        self.assertNotEqual(code, 0)
        self.assertIn("expected address:port", text)
        wrong = Cluster(model__dir=c.dir)
        r = wrong.tool("up", "--config", wrong.config)
        self.assertEqual(r.returncode, 1)
        self.assertRegex(r.stderr, r"(tokenizer|config)\.json: cannot be opened: No such file")  # why, not that it stopped


if __name__ == "__main__":
    main("__main__")
