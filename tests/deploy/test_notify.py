#!/usr/bin/env python3
"""The three roles under a service manager's eyes: a socket in NOTIFY_SOCKET hears when they are
ready, what they wait for, that they are alive, and that they stop. A worker is ready without a
router, since any role may start first.

usage: test_notify.py BUILD MODEL [unittest arguments]"""
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

BUILD, MODEL = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]


class Manager:
    def __init__(self, role, settings, watchdog_ms=300):
        self.dir = tempfile.mkdtemp(prefix="tandem-notify-")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.dir + "/notify")
        self.heard = []
        env = os.environ | {"NOTIFY_SOCKET": self.dir + "/notify", "WATCHDOG_USEC": str(watchdog_ms * 1000)}
        args = [a for k, v in settings.items() for a in ("--set", f"{k}={v}")]
        self.log = open(self.dir + "/log", "w+")
        self.process = subprocess.Popen([BUILD / role / f"tandem-{role}", *args], env=env,
                                        stdout=self.log, stderr=self.log)

    def wait(self, text, seconds=60):
        """The time until a message that begins with `text`; earlier ones count."""
        begin = time.monotonic()
        while not any(m.startswith(text) for m in self.heard):
            self.socket.settimeout(max(0.01, begin + seconds - time.monotonic()))
            try:
                self.heard.append(self.socket.recv(4096).decode())
            except TimeoutError:
                self.log.seek(0)
                raise AssertionError(f"no '{text}' in {seconds} s; heard {self.heard}\n{self.log.read()[-3000:]}")
        return time.monotonic() - begin

    def again(self, text, seconds=60):
        self.heard.clear()
        return self.wait(text, seconds)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        self.wait("STOPPING=1", 1)
        self.log.seek(0)
        text = self.log.read()
        self.log.close()
        self.socket.close()
        shutil.rmtree(self.dir)
        return code, text


class TestNotify(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="tandem-nd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, self.dir)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.settings = {"model.dir": MODEL, "model.name": "needle", "run_dir": self.dir, "threads": 1,
                         "numerics": "plain", "max_context": 2048, "max_running": 2,
                         "router.listen": f"127.0.0.1:{port}"}

    def test_cluster(self):
        decode = Manager("decode", self.settings)
        prefill = Manager("prefill", self.settings)
        for m in (decode, prefill):
            m.wait("READY=1")
            m.wait("STATUS=waiting for the router")
            self.assertNotIn("WATCHDOG=1", m.heard[:m.heard.index("READY=1")])
            for _ in range(3):  # alive also without a router
                m.again("WATCHDOG=1")
        router = Manager("router", self.settings)
        router.wait("READY=1")
        self.assertTrue(os.path.exists(self.dir + "/router.sock"))  # ready: workers can dial
        router.wait("STATUS=serving on 127.0.0.1:")
        for m in (decode, prefill):
            m.wait("STATUS=serving; linked with router")
        router.again("WATCHDOG=1")
        code, log = decode.stop()
        self.assertEqual(code, 0, log)
        router.again("STATUS=not ready: no decode worker is connected")
        for m in (router, prefill):
            code, log = m.stop()
            self.assertEqual(code, 0, log)

    def test_not_ready_when_it_cannot_start(self):
        for role in ("decode", "router"):
            m = Manager(role, self.settings | {"model.dir": "/nonexistent"})
            self.assertEqual(m.process.wait(120), 1)
            with self.assertRaises(AssertionError):
                m.wait("READY=1", 0.1)
            self.assertLessEqual(set(m.heard), {"STOPPING=1"})
            m.log.seek(0)
            self.assertNotIn("listening on", m.log.read())
            m.log.close()
            m.socket.close()
            shutil.rmtree(m.dir)

    def test_unreachable_manager(self):
        env = os.environ | {"NOTIFY_SOCKET": "/nonexistent/notify"}
        args = [a for k, v in self.settings.items() for a in ("--set", f"{k}={v}")]
        p = subprocess.Popen([BUILD / "router" / "tandem-router", *args], env=env, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        lines = []
        for line in p.stderr:
            lines.append(line)
            if "listening on" in line:  # it serves nevertheless
                break
        self.assertIn("/nonexistent/notify", "".join(lines))
        p.terminate()
        p.stderr.close()
        self.assertEqual(p.wait(120), 0)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
