"""A real cluster for end-to-end tests: the built programs, a configuration file of its own, a free
port, a short run_dir; started and stopped by `tandem up` and `tandem down` as a user would.

BUILD is the build folder (first argument of every test program)."""
import http.client
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import machine
from machine import PATIENCE, free_port

TREE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else TREE / "build").resolve()
TANDEM = BUILD / "deploy" / "tandem"
MODEL = TREE / "deploy" / "models" / "needle"
WHOLE = bool(os.environ.get("TANDEM_TEST_WHOLE"))  # also what tests/nightly alone has time for
DEVICE = os.environ.get("TANDEM_TEST_DEVICE")  # of all workers, instead of the CPU
if DEVICE:
    sys.path.append(str(TREE / "tests"))
    import gpu
    if gpu.missing():
        print(f"skipped: {gpu.missing()}")
        sys.exit(77)


def sanitized():
    """Whether BUILD runs under sanitizers, where a token costs twenty times as much."""
    options = json.loads((BUILD / "meson-info" / "intro-buildoptions.json").read_text())
    return any(o["name"] == "b_sanitize" and o["value"] != "none" for o in options)


def need(package):
    """Imports a PyPI package or skips the whole program."""
    try:
        return __import__(package)
    except ImportError:
        print(f"the PyPI package {package} is not installed")
        sys.exit(77)


class Cluster:
    def __init__(self, **settings):
        self.dir = machine.folder("tandem-e2e-")
        self.url = f"http://127.0.0.1:{free_port()}"
        self.settings = {
            "model.dir": MODEL,
            "model.name": "needle",
            "numerics": "plain",
            "run_dir": self.dir,
            "router.listen": self.url.removeprefix("http://"),
            "router.thinking": "chat",
            "threads": 1,
        }
        if DEVICE:  # several workers share it
            self.settings |= {"device": DEVICE, "pool_pages": 256}
        # A dictionary is a section: what holds for one role alone.
        self.settings.update({k.replace("__", "."): v for k, v in settings.items() if not isinstance(v, dict)})
        self.config = self.dir / "tandem.conf"
        lines = [f"{k} = {v}\n" for k, v in self.settings.items()]
        for role, own in settings.items():
            if isinstance(own, dict):
                lines += [f"[{role}]\n"] + [f"{k} = {v}\n" for k, v in own.items()]
        self.config.write_text("".join(lines))

    def __enter__(self):
        r = self.tool("up", "--config", self.config, "--timeout", str(PATIENCE))
        if r.returncode != 0:
            self.print_logs()
            raise RuntimeError(f"tandem up: {r.stderr}")
        self.wait_workers()
        return self

    def wait_workers(self, seconds=PATIENCE):
        """Every worker that was started is linked; `tandem up` is content with a pair that answers."""
        started = {p.stem for p in self.dir.glob("*@*.pid")}
        until = time.monotonic() + seconds
        while missing := started - set(self.ledgers()):
            assert time.monotonic() < until, f"not linked after {seconds} s: {missing}"
            time.sleep(0.02)

    def __exit__(self, kind, *_):
        if kind:
            self.print_logs()
        r = self.tool("down", "--config", self.config)
        leftovers = sorted(p.name for p in self.dir.iterdir() if p.suffix in (".pid", ".sock"))
        logs = "".join(p.read_text(errors="replace") for p in self.dir.glob("*.log"))
        if not kind:
            assert r.returncode == 0 and "killed" not in r.stderr, f"tandem down: {r.stderr}"
            assert not leftovers, f"left behind after down: {leftovers}"
            for word in ("AddressSanitizer", "runtime error:", "LeakSanitizer"):
                assert word not in logs, f"{word} in the logs:\n{logs[-4000:]}"

    def print_logs(self):
        for log in sorted(self.dir.glob("*.log")):
            print(f"---- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]))
        sys.stdout.flush()

    def tool(self, *args, **kw):
        return subprocess.run([TANDEM, *map(str, args)], text=True, capture_output=True, **kw)

    def ops_path(self, script):
        """A script of deploy/ops as it is installed: beside the programs of BUILD."""
        prefix = self.dir / "usr"
        if not prefix.exists():
            shutil.copytree(TREE / "deploy" / "ops", prefix / "share/tandem/ops")
            (prefix / "bin").mkdir()
            (prefix / "bin/tandem").symlink_to(TANDEM)
        return prefix / "share/tandem/ops" / script

    def ops(self, script, *args, **kw):
        return subprocess.run([self.ops_path(script), *map(str, args), "--config", self.config],
                              text=True, capture_output=True, **kw)

    def pid(self, name):
        return int((self.dir / f"{name}.pid").read_text().split()[0])

    def get(self, path):
        """(status, parsed JSON or text)"""
        return self._ask(urllib.request.Request(self.url + path))[:2]

    def post(self, path, body, headers=()):
        return self.post_whole(path, body, headers)[:2]

    def post_whole(self, path, body, headers=()):
        """(status, parsed JSON or text, headers of the answer)"""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method="POST")
        request.add_header("Content-Type", "application/json")
        for k, v in headers:
            request.add_header(k, v)
        return self._ask(request)

    @staticmethod
    def _ask(request):
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as r:
                status, text, headers = r.status, r.read().decode(), r.headers
        except urllib.error.HTTPError as e:
            status, text, headers = e.code, e.read().decode(), e.headers
        try:
            return status, json.loads(text), headers
        except ValueError:
            return status, text, headers

    def stream(self, path, body):
        """What the events of a streamed answer say, as they come."""
        conn = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=PATIENCE)
        conn.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
        answer = conn.getresponse()
        assert answer.status == 200, answer.read()
        last = None
        for line in answer:
            if line.startswith(b"data: "):
                last = line[6:].strip()
                if last != b"[DONE]":
                    yield json.loads(last)
        conn.close()
        assert last == b"[DONE]", last

    def client(self):
        openai = need("openai")
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def ledgers(self):
        """{worker name: its ledger} as /v1/cluster shows it."""
        status, j = self.get("/v1/cluster")
        assert status == 200, j
        return {w["name"]: w["ledger"] for w in j["workers"]}

    def fresh_ledgers(self, seconds=PATIENCE):
        """The same, as every worker says it after this call: a beat that is heard may have been under
        way, the next one was not."""
        until = time.monotonic() + seconds
        for _ in range(2):
            since = asked = time.monotonic()
            beats = [0]
            while not all(asked - b > since for b in beats):
                assert asked < until, f"no heartbeats in {seconds} s"
                time.sleep(0.05)
                asked = time.monotonic()
                status, j = self.get("/v1/cluster")
                assert status == 200, j
                beats = [w["last_beat_s"] for w in j["workers"]]
        return {w["name"]: w["ledger"] for w in j["workers"]}

    def wait_baseline(self, seconds=PATIENCE):
        """Everything a worker ever owned is free again: pages, slots, slabs."""
        until = time.monotonic() + seconds
        while True:
            ledgers = self.ledgers()
            busy = {
                f"{name}.{key}": value
                for name, ledger in ledgers.items()
                for key, value in ledger.items()
                if key in ("pages_owned", "slots_owned", "landing_quarantined", "send_busy") and value
            }
            unheard = [name for name, ledger in ledgers.items() if ledger["pages_free"] == 0]  # before its first heartbeat
            if not busy and not unheard:
                return ledgers
            assert time.monotonic() < until, f"not at baseline after {seconds} s: {busy} {unheard}"
            time.sleep(0.05)


def main(module):
    """unittest without the build folder in argv."""
    import unittest
    ran = unittest.main(module=module, argv=[sys.argv[0]] + sys.argv[2:], verbosity=2, exit=False)
    if not ran.result.wasSuccessful():
        machine.failed()
        sys.exit(1)
