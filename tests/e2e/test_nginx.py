#!/usr/bin/env python3
"""TLS by nginx with deploy/nginx/tandem.conf, as it is but for ports and certificate: a real nginx between
real clients and the router. See router_frame.py."""
import json
import os
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

import anthropic
import openai

import machine
from router_frame import PATIENCE, Setup, body_of, free_port, in_flight, joined, main, user

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONF = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "tandem.conf"
KEY = "ann-" + "a" * 20
if not NGINX:
    print("nginx is not installed")
    sys.exit(77)


class Front(Setup):
    def __init__(self):
        self.nginx = None
        keys = machine.folder("td-") / "keys"
        keys.write_text(f"ann {KEY}\n")
        keys.chmod(0o600)
        super().__init__(router__api_keys_file=keys)
        self.tls = free_port()
        self.cert = self.dir / "cert.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", self.dir / "key.pem",
                        "-out", self.cert], check=True, capture_output=True)
        self.start_nginx()
        self.https = f"https://localhost:{self.tls}"
        os.environ["SSL_CERT_FILE"] = str(self.cert)  # read when a client is made
        self.tls_context = ssl.create_default_context(cafile=str(self.cert))
        self.api = self.client(KEY)
        self.anthropic = anthropic.Anthropic(base_url=self.https, api_key=KEY, max_retries=0, timeout=PATIENCE)

    def client(self, key):
        return openai.OpenAI(base_url=self.https + "/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def ask(self, path, body=None):
        """(status, text) by https"""
        request = urllib.request.Request(self.https + path, body, {"X-Api-Key": KEY, "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE, context=self.tls_context) as r:
                return r.status, r.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def start_nginx(self):
        text = CONF.read_text()
        for old, new in ((r"listen 443 ssl", f"listen 127.0.0.1:{self.tls} ssl"), (r"\n *listen \[::\]:443[^\n]*", ""),
                         (r"server 127\.0\.0\.1:8000;", f"server 127.0.0.1:{self.port};"),
                         (r"/etc/ssl/tandem/fullchain\.pem", str(self.cert)), (r"/etc/ssl/tandem/key\.pem", str(self.dir / "key.pem"))):
            text, n = re.subn(old, new, text)
            assert n == 1, old
        paths = "".join(f"{k}_temp_path {self.dir}/{k};\n" for k in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (self.dir / "nginx.conf").write_text(
            ("user root;\n" if os.geteuid() == 0 else "") +  # its folders are ours
            f"daemon off; pid {self.dir}/pid; error_log {self.dir}/nginx.log; worker_processes 1;\n"
            f"events {{ worker_connections 256; }}\nhttp {{\naccess_log off;\n{paths}{text}\n}}\n")
        self.nginx = subprocess.Popen([NGINX, "-c", self.dir / "nginx.conf", "-e", self.dir / "nginx.log"])
        self.wait("nginx listens", self.listening)

    def listening(self):
        assert self.nginx.poll() is None, self.logs()
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.tls)) == 0

    def stop(self):
        if self.nginx:
            self.nginx.terminate()
            self.nginx.wait(PATIENCE)
        super().stop()


def test_clients(s):
    answer = s.api.chat.completions.create(model="needle", messages=user("over TLS"))
    assert answer.choices[0].message.content == "over TLS"
    text, finish, _ = joined(s.api.chat.completions.create(model="needle", messages=user("in pieces"), stream=True))
    assert (text, finish) == ("in pieces", "stop")
    message = s.anthropic.messages.create(model="needle", max_tokens=50, messages=user("by x-api-key"))
    assert message.content[0].text == "by x-api-key"
    try:
        s.client("not this one, no").models.list()
        raise AssertionError("it was let in")
    except openai.AuthenticationError:
        pass


def test_tokens_come_as_they_are_made(s):
    """Not when a buffer is full: the first token is read while the worker still waits to make the rest."""
    stream = s.api.chat.completions.create(model="needle", messages=user("@quiet please, and go on"), stream=True)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    assert len(in_flight(s)) == 1
    stream.close()
    s.wait("the router hears that the client left", lambda: in_flight(s) == [])


def test_what_is_not_passed_on(s):
    for path in ("/v1/cluster", "/v1/cluster/drain", "/v1/cluster/", "/metrics"):
        assert s.ask(path)[0] == 404, path
        assert s.get(path.rstrip("/"), "POST" if path.endswith("drain") else "GET")[0] != 404, path
    assert s.ask("/ready")[0] == 200


def test_large_bodies(s):
    """The router's own sentence, not nginx's page."""
    status, text = s.ask("/v1/chat/completions", body_of("x" * (2 << 20)))
    assert status == 413 and "error" in json.loads(text), (status, text)


if __name__ == "__main__":
    sys.exit(main(globals(), Front))
