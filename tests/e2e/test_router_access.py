#!/usr/bin/env python3
"""Who may ask: keys, limits per key, pages of browsers. See router_frame.py."""
import json
import pathlib
import signal
import sys
import tempfile

import anthropic
import openai

import machine
from router_frame import PATIENCE, Setup, body_of, in_flight, joined, main, user

ANN, BOB, NEW = "ann-" + "a" * 20, "bob-" + "b" * 20, "new-" + "n" * 20
PAGE = "https://chat.example.org"


def write_keys(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)


class Keyed(Setup):
    def __init__(self):
        self.keys = machine.folder("td-") / "keys"
        write_keys(self.keys, f"ann {ANN} requests=2\nbob {BOB} per_minute=3\n")
        super().__init__(router__api_keys_file=self.keys, router__cors_origins=f"{PAGE}, http://127.0.0.1:3000")
        self.ann, self.bob = self.client(ANN), self.client(BOB)

    def client(self, key):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def anthropic(self, key):
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=PATIENCE)

    def reload(self):
        self.router.send_signal(signal.SIGHUP)

    def metric(self, line):
        found = [x.rsplit(" ", 1)[1] for x in self.get("/metrics")[2].splitlines() if x.startswith(line)]
        return int(found[0]) if found else None


def refused(call, kind):
    try:
        call()
    except kind as e:
        return e
    raise AssertionError("it was let in")


def ask(api, text="hello", **more):
    return api.chat.completions.create(model="needle", messages=user(text), **more)


def test_keys(s):
    assert ask(s.ann).choices[0].message.content == "hello"
    assert s.ann.models.list().data[0].id == "needle"
    message = s.anthropic(ANN).messages.create(model="needle", max_tokens=50, messages=user("by x-api-key"))
    assert message.content[0].text == "by x-api-key"
    for key in ("nobody-knows-it", ANN[:-1], ANN + "a", ANN.upper(), "x" * 5000):
        e = refused(lambda key=key: ask(s.client(key)), openai.AuthenticationError)
        assert e.code == "invalid_api_key" and key not in str(e)
        e = refused(lambda key=key: s.anthropic(key).messages.create(model="needle", max_tokens=5, messages=user("x")),
                    anthropic.AuthenticationError)
        assert e.body["error"]["type"] == "authentication_error"


def test_every_endpoint_wants_one(s):
    """Also those without a handler's own check; what is open is a list, here once more."""
    paths = json.loads(s.get("/openapi.json")[2])["paths"]
    assert len(paths) > 15
    everybody, from_here = {"/health", "/ready", "/openapi.json"}, {"/metrics", "/v1/cluster", "/v1/cluster/drain", "/v1/cluster/resume"}
    proxied = {"X-Forwarded-For": "192.0.2.1"}
    for path, methods in paths.items():
        for method in methods:
            at = path.replace("{", "").replace("}", "")
            status, headers, text = s.get(at, method.upper(), b"{}" if method == "post" else None, proxied)
            wanted = path not in everybody
            assert (status == 401) == wanted, (path, status)
            assert not wanted or headers["WWW-Authenticate"] == "Bearer", path
            direct = s.get(at, method.upper(), b"{}" if method == "post" else None)[0]
            assert (direct == 401) == (wanted and path not in from_here), (path, direct)
    assert s.get("/metrics", headers={**proxied, "Authorization": f"bearer {ANN}"})[0] == 200
    assert s.get("/v1/nothing")[0] == 404


def test_running_at_a_time(s):
    streams = [ask(s.ann, "@hang " + str(i), stream=True) for i in range(2)]
    s.wait("both run", lambda: len(in_flight(s)) == 2)
    e = refused(lambda: ask(s.ann), openai.RateLimitError)
    assert "ann" in str(e) and e.response.headers["Retry-After"] == "1" and e.code == "rate_limit_exceeded"
    assert ask(s.bob, "others go on").choices[0].message.content == "others go on"
    for stream in streams:
        stream.close()
    s.wait("they are gone", lambda: in_flight(s) == [])
    assert ask(s.ann).choices[0].message.content == "hello"
    refused(lambda: ask(s.ann, temperature=9), openai.BadRequestError)  # what is refused gives its place back
    for _ in range(3):
        ask(s.ann)
    assert s.metric('tandem_key_requests_total{key="ann",result="refused"}') == 1


def own_per_minute():
    s = Keyed()
    try:
        for _ in range(3):
            ask(s.bob)
        e = refused(lambda: ask(s.bob), openai.RateLimitError)
        assert 15 <= int(e.response.headers["Retry-After"]) <= 20, dict(e.response.headers)
        ask(s.ann)
        assert s.metric('tandem_key_requests_total{key="bob",result="taken"}') == 3
        log = (s.dir / "router.log").read_text()
        assert "key=bob" in log and BOB not in log and ANN not in log
    finally:
        s.stop()


def own_reload():
    """Keys come and go while a stream runs."""
    s = Keyed()
    try:
        stream = ask(s.ann, "@slow " + "word " * 40, stream=True)
        first = next(iter(stream))
        assert first.choices
        write_keys(s.keys, f"new {NEW}\n", 0o644)
        s.reload()
        s.wait("it is refused", lambda: "the keys from before hold" in (s.dir / "router.log").read_text())
        write_keys(s.keys, f"new {NEW} oops\n")
        s.reload()
        s.wait("it is refused", lambda: (s.dir / "router.log").read_text().count("the keys from before hold") == 2)
        ask(s.ann)
        write_keys(s.keys, f"new {NEW}\n")
        s.reload()
        s.wait("it is read", lambda: s.get("/v1/models", headers={"X-Api-Key": NEW})[0] == 200)
        assert s.get("/v1/models", headers={"X-Api-Key": ANN})[0] == 401
        text, finish, _ = joined(stream)
        assert finish == "stop"
    finally:
        s.stop()


def own_bad_files():
    with tempfile.TemporaryDirectory() as d:
        path = pathlib.Path(d) / "keys"
        for make, says in ((lambda: None, "No such file"), (lambda: write_keys(path, f"ann {ANN}\n", 0o640 | 0o004), "0600"),
                           (lambda: write_keys(path, "ann short\n"), "a key of 16 to 256")):
            make()
            try:
                s = Setup(workers=False, router__api_keys_file=path)
                s.router.wait(PATIENCE)
                assert s.router.returncode == 2, s.router.returncode
                assert says in s.logs(), s.logs()
            finally:
                s.router.kill()
    s = Setup(workers=False, router__cors_origins="https://a.example/path")
    assert s.router.wait(PATIENCE) == 2 and "router.cors_origins" in s.logs()


ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}


def test_pages(s):
    status, h, _ = s.get("/v1/chat/completions", "OPTIONS", headers={"Origin": PAGE, **ASK})
    assert status == 200 and h["Access-Control-Allow-Origin"] == PAGE and h["Vary"] == "Origin"
    assert h["Access-Control-Allow-Methods"] == "POST" and h["Access-Control-Allow-Headers"] == ASK["Access-Control-Request-Headers"]
    for origin in ("https://evil.example", PAGE + ".evil", "null", PAGE[:-1], ""):
        status, h, _ = s.get("/v1/chat/completions", "OPTIONS", headers={"Origin": origin, **ASK})
        assert status == 405 and "Access-Control-Allow-Origin" not in h, origin
    body = body_of("from a page")
    for key, wanted in ((ANN, 200), ("wrong" * 5, 401)):
        status, h, text = s.get("/v1/chat/completions", "POST", body, {"Origin": PAGE, "Authorization": f"Bearer {key}"})
        assert status == wanted and h["Access-Control-Allow-Origin"] == PAGE and "X-Request-Id" in h["Access-Control-Expose-Headers"]
    status, h, _ = s.get("/v1/models", headers={"Origin": "https://evil.example", "Authorization": f"Bearer {ANN}"})
    assert "Access-Control-Allow-Origin" not in h
    # A page on this host is not the host: it may not watch or change the cluster.
    assert s.get("/v1/cluster", headers={"Origin": "http://127.0.0.1:3000"})[0] == 401
    drain = json.dumps({"worker": "decode@0"}).encode()
    status, _, _ = s.get("/v1/cluster/drain", "POST", drain, {"Origin": "http://127.0.0.1:3000", "Authorization": f"Bearer {ANN}",
                                                              "Content-Type": "application/json"})
    assert status == 403


def own_no_keys_no_pages():
    """As shipped: no key is asked for, no page is told anything; * is everybody."""
    s = Setup(workers=False)
    try:
        status, h, _ = s.get("/v1/models", headers={"Origin": PAGE})
        assert status == 200 and "Access-Control-Allow-Origin" not in h and "Vary" not in h
        assert s.get("/v1/models", "OPTIONS", headers={"Origin": PAGE, **ASK})[0] == 405
        s.router.send_signal(signal.SIGHUP)
        s.wait("it says so", lambda: "names none" in s.logs())
    finally:
        s.stop()
    s = Setup(workers=False, router__cors_origins="*")
    try:
        assert s.get("/v1/models", headers={"Origin": PAGE})[1]["Access-Control-Allow-Origin"] == "*"
    finally:
        s.stop()


def own_kept_responses():
    """What a key's request left behind belongs to that key; others find what they find for any other id."""
    class Kept(Keyed):
        def __init__(self):
            self.keys = machine.folder("td-") / "keys"
            write_keys(self.keys, f"ann {ANN}\nbob {BOB}\n")
            Setup.__init__(self, router__api_keys_file=self.keys, router__max_body=4096)
            self.ann, self.bob = self.client(ANN), self.client(BOB)

    s = Kept()
    try:
        kept = s.ann.responses.create(model="needle", input="Remember the keel.")
        assert s.ann.responses.retrieve(kept.id).id == kept.id
        calls = (lambda api, i: api.responses.retrieve(i), lambda api, i: api.responses.input_items.list(i),
                 lambda api, i: api.responses.delete(i),
                 lambda api, i: api.responses.create(model="needle", input="x", previous_response_id=i))
        for call in calls:
            other, unknown = (refused(lambda i=i, call=call: call(s.bob, i), openai.NotFoundError) for i in (kept.id, "resp_0"))
            assert str(other).replace(kept.id, "resp_0") == str(unknown), other
        write_keys(s.keys, f"ann {NEW}\nbob {BOB}\n")  # ann changes her key, and is still ann
        s.reload()
        ann = s.client(NEW)
        s.wait("the new key", lambda: s.get("/v1/models", headers={"Authorization": f"Bearer {NEW}"})[0] == 200)
        assert len(ann.responses.input_items.list(kept.id).data) == 1
        longer = ann.responses.create(model="needle", input="y" * 900, previous_response_id=kept.id)
        too_long = refused(lambda: ann.responses.create(model="needle", input="z", previous_response_id=longer.id),
                           openai.BadRequestError)
        assert too_long.code == "context_length_exceeded" and "4096" in str(too_long), too_long
        ann.responses.delete(kept.id)
        refused(lambda: ann.responses.retrieve(kept.id), openai.NotFoundError)
    except Exception:
        print(s.logs())
        raise
    finally:
        s.stop()


if __name__ == "__main__":
    sys.exit(main(globals(), Keyed))
