#!/usr/bin/env python3
"""`tandem needle` against servers of this test's own: what it says when a stream does not end as it
should (the server's own sentence, which counts more than what becomes of the connection behind it),
and its table and heat map when facts of one depth are lost.

usage: test_client.py TANDEM TOKENIZER_DIR"""
import http.server
import json
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import xml.dom.minidom

TANDEM, TOKENIZER = sys.argv[1:3]
FIRST = b'data: {"choices": [{"index": 0, "delta": {"content": "OME"}, "finish_reason": null}]}\n\n'
ERROR = b'data: {"error": {"message": "decode@0 was lost", "type": "server_error", "code": "lost"}}\n\n'


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    events = ()

    def answer(self):
        return self.events

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = b'{"data": [{"id": "needle"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.answer():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.close_connection = True  # without a last chunk, as the router ends a stream that failed


class Forgetful(Server):
    """Finds what the second half of a prompt says, and nothing of the first."""

    def answer(self):
        name = re.search(r"What is the ([\w ]+ of \w+)\?", self.asked)[1]
        fact = re.search(rf"The {name} is ([\w-]+)\.", self.asked)
        text = fact[1] if fact.start() > len(self.asked) / 2 else "nothing"
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 300, "completion_tokens": 3}}
        for event in (chunk, end, usage):
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
        yield b""  # the last chunk


class TestClient(unittest.TestCase):
    def ask(self, *events):
        return self.needle(type("S", (Server,), {"events": events}), "--lengths", "338", "--depths", "50")

    def needle(self, kind, *args):
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                return subprocess.run([TANDEM, "needle", "--url", f"http://127.0.0.1:{server.server_port}",
                                       "--tokenizer", TOKENIZER, *args],
                                      text=True, capture_output=True, timeout=30)
            finally:
                server.shutdown()

    def test_an_error_frame_is_told(self):
        r = self.ask(FIRST, ERROR)
        self.assertEqual(r.returncode, 1)
        self.assertIn("the stream ended in an error: decode@0 was lost", r.stderr)

    def test_a_cut_is_told(self):
        r = self.ask(FIRST)
        self.assertEqual(r.returncode, 1)
        self.assertIn("partial file", r.stderr)

    def test_heat_map(self):
        with tempfile.NamedTemporaryFile(suffix=".svg") as f:
            r = self.needle(Forgetful, "--lengths", "338,600", "--depths", "0,100", "--trials", "2", "--svg", f.name)
            self.assertEqual(r.returncode, 1, r.stderr)
            self.assertIn("4 of 8 found", r.stdout)
            svg = xml.dom.minidom.parse(f.name)
        at = {(int(t.getAttribute("x")), int(t.getAttribute("y"))): t.firstChild.data
              for t in svg.getElementsByTagName("text")}
        cells = [r for r in svg.getElementsByTagName("rect") if r.getAttribute("fill").startswith("rgb")]
        self.assertEqual(len(cells), 4)
        seen = {}
        for c in cells:
            x, y, w, h = (int(c.getAttribute(k)) for k in ("x", "y", "width", "height"))
            inside = {k: t for k, t in at.items() if x < k[0] < x + w and y < k[1] < y + h}
            (place, count), = inside.items()
            length, = (t for k, t in at.items() if k[0] == place[0] and t.isdigit())
            depth, = (t for k, t in at.items() if k[1] == place[1] and t.endswith("%"))
            red, green, _ = map(int, re.findall(r"\d+", c.getAttribute("fill")))
            seen[length, depth] = count, green > red
        self.assertEqual(seen, {(n, d): (("2 / 2", True) if d == "100 %" else ("0 / 2", False))
                                for n in ("338", "600") for d in ("0 %", "100 %")})

    def test_a_heat_map_that_cannot_be_written(self):
        r = self.needle(Forgetful, "--lengths", "338", "--depths", "100", "--svg", "/nonexistent/map.svg")
        self.assertEqual(r.returncode, 1)
        self.assertIn("/nonexistent/map.svg: No such file", r.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
