#!/usr/bin/env python3
"""What `tandem needle` says when a stream does not end as it should: the server's own sentence, which
counts more than what becomes of the connection behind it.

usage: test_client.py TANDEM TOKENIZER_DIR"""
import http.server
import subprocess
import sys
import threading
import unittest

TANDEM, TOKENIZER = sys.argv[1:3]
FIRST = b'data: {"choices": [{"index": 0, "delta": {"content": "OME"}, "finish_reason": null}]}\n\n'
ERROR = b'data: {"error": {"message": "decode@0 was lost", "type": "server_error", "code": "lost"}}\n\n'


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    events = ()

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = b'{"data": [{"id": "needle"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.events:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.close_connection = True  # without a last chunk, as the router ends a stream that failed


class TestClient(unittest.TestCase):
    def ask(self, *events):
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("S", (Server,), {"events": events})) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                return subprocess.run([TANDEM, "needle", "--url", f"http://127.0.0.1:{server.server_port}", "--lengths",
                                       "338", "--depths", "50", "--tokenizer", TOKENIZER],
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


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
