"""What the tests of the router by clients share: a real tandem-router whose workers
(tests/router/fake_worker) answer with the last user message, requests to it, answers that the workers
shall give, and the runner of a test program.

usage of each: PROGRAM ROUTER FAKE_WORKER MODEL_DIR [NAME...]     NAME: only these tests"""
import json
import pathlib
import random
import resource
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request

try:
    import openai
except ImportError:
    print("the PyPI package openai is not installed")
    sys.exit(77)

import machine
from machine import PATIENCE, free_port

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "common" / "text"))
import reply_compare  # noqa: E402

ROUTER, FAKE, MODEL_DIR = sys.argv[1:4]
CONTEXT = 8192
MAX_BODY = 1 << 20
SEED = random.randrange(1 << 32)
MIXED = "Hello wörld, 你好 🙂🙂 — line\nnext\ttab \"quoted\" \\ \u0001 end"


D, T = reply_compare.D, reply_compare.T
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                   "required": ["city"]}}}
RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
CALL = (f'<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true">Zürich "old" <b>\n2>&1</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">3</{D}parameter>\n</{D}invoke>\n')
OTHER = f'<{D}invoke name="run">\n\n</{D}invoke>\n'
ARGUMENTS = {"city": 'Zürich "old" <b>\n2>&1', "days": 3}


class Setup:
    """One router with its workers."""

    def __init__(self, workers=True, files=None, folder=MODEL_DIR, context=CONTEXT, **settings):
        self.folder, self.context = folder, context
        self.dir = machine.folder("td-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        values = {
            "model.dir": folder, "model.name": "needle", "run_dir": self.dir,
            "router.listen": f"127.0.0.1:{self.port}", "router.thinking": "chat",
            "router.max_body": MAX_BODY, "router.default_max_tokens": 8000,
        }
        values.update({k.replace("__", "."): v for k, v in settings.items()})
        self.log = open(self.dir / "router.log", "wb")
        args = [a for k, v in values.items() for a in ("--set", f"{k}={v}")]
        limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
        self.router = subprocess.Popen([ROUTER, *args], stdout=self.log, stderr=self.log,
                                       preexec_fn=limit)
        self.fake = None
        self.api = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        if workers:
            self.start_workers()
            self.wait_ready()

    def start_workers(self):
        self.fake_log = open(self.dir / "fake.log", "wb")
        self.fake = subprocess.Popen(
            [FAKE, str(self.dir / "router.sock"), "needle", self.folder, str(self.context)],
            stdout=self.fake_log, stderr=self.fake_log)

    def stop_workers(self):
        self.fake.terminate()
        self.fake.wait(PATIENCE)
        self.fake = None

    def wait(self, what, condition, seconds=PATIENCE):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.02)
        raise AssertionError(f"{what}: not within {seconds} s\n{self.logs()}")

    def wait_ready(self):
        self.wait("ready", lambda: self.get("/ready")[0] == 200)

    def logs(self):
        return "".join(f"--- {p.name}\n{p.read_text()[-4000:]}\n" for p in self.dir.glob("*.log"))

    def seen(self):
        return (self.dir / "fake.log").read_text()

    def get(self, path, method="GET", body=None, headers=None):
        """(status, headers, body text)"""
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as r:
                return r.status, r.headers, r.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.headers, e.read().decode()
        except (urllib.error.URLError, ConnectionError) as e:
            return 0, {}, str(e)

    def refused(self, status, body, path="/v1/chat/completions"):
        got, headers, text = self.get(path, "POST", body)
        assert got == status, f"expected {status}, found {got}: {text}"
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error, headers

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def stop(self):
        if self.fake:
            self.stop_workers()
        self.router.terminate()
        code = self.router.wait(PATIENCE)
        text = (self.dir / "router.log").read_text()
        assert code == 0, f"router ended with {code}\n{text}"
        for bad in ("runtime error", "AddressSanitizer", "LeakSanitizer"):
            assert bad not in text, text


def user(text):
    return [{"role": "user", "content": text}]


def chat(s, text, **more):
    return s.api.chat.completions.create(model="needle", messages=user(text), **more)


def joined(stream):
    """Text, finish reason and chunks of a chat stream."""
    text, finish, chunks = "", None, []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, chunks


def read_all(c):
    data = b""
    try:
        while chunk := c.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def raw_post(path, body, extra=b""):
    return (b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n" % (path, len(body), extra)) + body


def body_of(text, **more):
    return json.dumps({"model": "needle", "messages": user(text), **more}).encode()


def in_flight(s):
    return json.loads(s.get("/v1/cluster")[2])["requests"]


def calls(*made):
    return f"\n\n<{D}tool_calls>\n" + "".join(made) + f"</{D}tool_calls>"


class Script:
    """A router, and answers that its workers shall give."""

    def __init__(self, folder):
        self.v = reply_compare.Vocabulary(folder)
        self.r = random.Random(SEED)
        self.setup = Setup(folder=folder, context=65536)
        self.api = self.setup.api

    def stop(self):
        self.setup.stop()

    def logs(self):
        return self.setup.logs()

    def say(self, text):
        """What a user must write to get `text` as the answer, cut into tokens at random."""
        return "@ids " + " ".join(map(str, self.v.tokens(text, self.r)))

    def chat(self, text, tools=(WEATHER, RUN), **more):
        if tools:
            more["tools"] = list(tools)
        return self.api.chat.completions.create(model="needle", messages=user(self.say(text)), **more)

    def streamed(self, text, **more):
        """A stream put together as the SDK's own helpers do."""
        out = {"content": "", "reasoning": "", "calls": [], "finish": None}
        for chunk in self.chat(text, stream=True, **more):
            for choice in chunk.choices:
                d = choice.delta
                out["content"] += d.content or ""
                out["reasoning"] += getattr(d, "reasoning_content", None) or ""
                out["finish"] = choice.finish_reason or out["finish"]
                for c in d.tool_calls or []:
                    if c.index == len(out["calls"]):
                        assert c.id and c.type == "function" and c.function.name and c.function.arguments == ""
                        out["calls"].append([c.id, c.function.name, ""])
                    else:
                        assert c.index == len(out["calls"]) - 1 and c.id is None and c.function.name is None
                    out["calls"][c.index][2] += c.function.arguments
        return out


def main(tests, make=Setup):
    """Runs the program's test_* with what `make` gives, and its own_*, which make their own."""
    failed, shared = 0, None

    def one(name, call):
        nonlocal failed
        begin = time.monotonic()
        try:
            call()
            print(f"ok      {name} ({time.monotonic() - begin:.2f} s)", flush=True)
        except Exception:  # every test is told about
            failed += 1
            print(f"FAILED  {name}", flush=True)
            traceback.print_exc()

    print("seed", SEED)
    for name, f in list(tests.items()):
        if not callable(f) or (sys.argv[4:] and name not in sys.argv[4:]):
            continue
        if name.startswith("own_"):
            one(name, f)
        elif name.startswith("test_"):
            shared = shared or make()
            one(name, lambda f=f: f(shared))
    if shared:
        logs = shared.logs()
        one("shutdown", shared.stop)
        if failed:
            print(logs)
    if failed:
        machine.failed()
    return failed != 0
