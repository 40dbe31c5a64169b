#!/usr/bin/env python3
"""The edges of HTTP: limits, routes, pipelining, damage, slow clients, pages for people. See
router_frame.py."""
import collections
import concurrent.futures
import json
import random
import re
import socket
import subprocess
import sys
import time

from router_frame import MAX_BODY, PATIENCE, body_of, chat, in_flight, joined, main, raw_post, read_all

def test_body_limit(s):
    status, _, text = s.get("/v1/completions", "POST", b"x" * (MAX_BODY + 1))
    assert status == 413 and str(MAX_BODY) in text and str(MAX_BODY + 1) in text
    with s.connect() as c:
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(MAX_BODY // 65536 + 2):
                c.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = read_all(c)
    assert answer.startswith(b"HTTP/1.1 413 ") and str(MAX_BODY).encode() in answer


def statuses(s):
    found = dict(line.rsplit(" ", 1) for line in s.get("/metrics")[2].splitlines() if line.startswith("tandem_http_answers_total"))
    return collections.Counter({int(k.split('"')[1]): int(v) for k, v in found.items()})


def test_statuses_are_counted(s):
    """Whatever is answered, by its status, and who left before there was an answer: 499."""
    before = statuses(s)
    chat(s, "one"), joined(chat(s, "two", stream=True))
    s.get("/nothing"), s.get("/health", "POST", b"")
    s.get("/v1/completions", "POST", b"x" * (MAX_BODY + 1))
    for stream, waits in ((False, True), (True, False)):
        with s.connect() as c:
            c.sendall(raw_post(b"/v1/chat/completions", body_of("@hang on", stream=stream)))
            s.wait("it is in flight", lambda: len(in_flight(s)) == 1 and (waits or c.recv(9) == b"HTTP/1.1 "))
        s.wait("nothing is left", lambda: in_flight(s) == [])
    got = statuses(s) - before
    assert {k: got[k] for k in (404, 405, 413, 499)} == {404: 1, 405: 1, 413: 1, 499: 1}, got
    assert got[200] > 5


def test_routes(s):
    status, headers, text = s.get("/v1/chat/completions")
    assert status == 405 and headers["Allow"] == "POST" and json.loads(text)["error"]
    status, headers, _ = s.get("/health", "POST", b"{}")
    assert status == 405 and headers["Allow"] == "GET, HEAD"
    status, _, text = s.get("/v1/nothing")
    assert status == 404 and "/v1/nothing" in json.loads(text)["error"]["message"]
    assert s.get("/health?x=1")[0] == 200
    status, headers, text = s.get("/health", "HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 0 and text == ""


def test_request_id(s):
    assert s.get("/health", headers={"X-Request-Id": "mine-1"})[1]["X-Request-Id"] == "mine-1"
    assert s.get("/health", headers={"X-Request-Id": "b\"ad"})[1]["X-Request-Id"].startswith("req-")
    assert s.get("/nothing")[1]["X-Request-Id"].startswith("req-")


def test_pipelining(s):
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("first answer")) +
                  raw_post(b"/v1/chat/completions", body_of("second", stream=True)) +
                  b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" +
                  b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = read_all(c).decode()
    order = [data.index("first answer"), data.index("[DONE]"), data.index('"phase"'), data.index("no such endpoint")]
    assert order == sorted(order) and data.count("HTTP/1.1 ") == 4
    assert "Connection: close" in data


def test_chunked_body_and_expect(s):
    body = body_of("in pieces")
    with s.connect() as c:
        c.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                  b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert c.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        for i in range(0, len(body), 7):
            piece = body[i:i + 7]
            c.sendall(b"%x;ext=1\r\n" % len(piece) + piece + b"\r\n")
        c.sendall(b"0\r\nTrailer: x\r\n\r\n")
        assert b'"content":"in pieces"' in read_all(c)


def test_http10(s):
    with s.connect() as c:
        body = body_of("old", stream=True)
        c.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        data = read_all(c)
    assert b"chunked" not in data and data.endswith(b"data: [DONE]\n\n")


def test_malformed_http(s):
    for bad, status in ((b"NONSENSE\r\n\r\n", 501), (b"GET /health HTP/1.1\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\n\r\n", 400),
                        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 40000 + b"\r\n\r\n", 431),
                        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
                        (b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: tea\r\n\r\n", 417),
                        (b"NONSENSE / HTTP/1.1\r\nHost: x\r\n\r\n", 501), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
                        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
                        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400)):
        with s.connect() as c:
            c.sendall(bad)
            data = read_all(c)
        assert data.startswith(b"HTTP/1.1 %d " % status), (bad[:60], data[:200])
        assert json.loads(data.split(b"\r\n\r\n", 1)[1])["error"]["message"]


def test_headers_at_once(s):
    """A stream has its head and its first chunk before there is a token."""
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("@hang on", stream=True)))
        data = b""
        while b'"role":"assistant"' not in data:
            data += c.recv(65536)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n") and b"text/event-stream" in data
    s.wait("nothing is left", lambda: in_flight(s) == [])


def test_damaged_bodies(s):
    """Bodies with random damage: always an answer with a sense, and the router lives on."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    r = random.Random(seed)
    good = json.dumps({
        "model": "needle", "temperature": 0.5, "stop": ["zz", "yy"], "max_tokens": 8, "seed": 5, "logprobs": True,
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "wörld"}]}],
        "chat_template_kwargs": {"thinking": False}, "stream": False}, ensure_ascii=False).encode()
    values = ["null", "-1", "1e999", "99999999999999999999", "[]", "{}", '""', "true", '"\\u0000"', "[[[]]]"]
    statuses = collections.Counter()
    for i in range(600):
        body = bytearray(good)
        if i % 2:
            for _ in range(r.randint(1, 4)):
                body[r.randrange(len(body))] = r.randrange(256)
        else:  # still JSON: another value behind a random colon
            at = r.choice([m.end() for m in re.finditer(rb'": ?', good)])
            end = min(x for x in (good.find(c, at) for c in (b",", b"}", b"]")) if x >= 0)
            body[at:end] = r.choice(values).encode()
        status, _, text = s.get("/v1/chat/completions", "POST", bytes(body))
        statuses[status] += 1
        assert status in (200, 400, 404), (status, bytes(body), text)
        if status != 200:
            assert json.loads(text)["error"]["message"], text
    assert statuses[200] and statuses[400], statuses


def test_many_streams(s):
    def one(i):
        text = f"stream {i}: " + " ".join(str(i * k) for k in range(40))
        got, finish, _ = joined(chat(s, text, stream=True))
        return got == text and finish == "stop"
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        assert all(pool.map(one, range(100)))


def test_slow_client(s):
    with s.connect() as c:
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        c.sendall(raw_post(b"/v1/chat/completions",
                           body_of("@fast abc def", stream=True, max_tokens=8000, ignore_eos=True,
                                   logprobs=True, top_logprobs=5), b"Connection: close\r\n"))
        s.wait("the answer is complete", lambda: in_flight(s) == [])
        for i in range(5):
            assert chat(s, f"quick {i}").choices[0].message.content == f"quick {i}"
        data = read_all(c)
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert data.count(b'"finish_reason":"length"') == 1


def test_keep_alive_comments(s):
    with s.connect() as c:  # while there is no token yet
        data, begin = b"", time.monotonic()
        c.sendall(raw_post(b"/v1/responses", b'{"model": "needle", "input": "@hang on", "stream": true}'))
        while b": keep-alive\n\n" not in data:
            more = c.recv(65536)
            assert more, data
            data += more
        assert b"response.in_progress" in data and time.monotonic() - begin > 4
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("@quiet one two three", stream=True),
                           b"Connection: close\r\n"))
        data = read_all(c)
    assert b": keep-alive\n\n" in data and b"data: [DONE]" in data


def test_curl(s):
    """Chunks come as tokens do, not at the end: the first is here while the worker makes the others."""
    words = "@slow " + "one two three four five " * 60
    p = subprocess.Popen(["curl", "-sN", "-H", "Content-Type: application/json", "-d", "@-", s.url + "/v1/chat/completions"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    p.stdin.write(body_of(words, stream=True).decode())
    p.stdin.close()
    text, last = "", ""
    for line in p.stdout:
        last = line.strip() or last
        if line.startswith("data: {"):
            first = not text
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
            if first and text:
                assert len(in_flight(s)) == 1, "it came at once"
    assert p.wait(PATIENCE) == 0 and (text, last) == (words, "data: [DONE]")


def test_pages(s):
    chat(s, "for the counters")
    metrics = s.get("/metrics")[2]
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values['tandem_requests_total{outcome="stop"}']) >= 1
    assert values["tandem_ready"] == "1"
    assert values['tandem_worker_free_pages{worker="decode@0",role="decode"}'] == "65536"
    n = int(values["tandem_time_to_first_token_seconds_count"])
    assert n > 0 and int(values['tandem_time_to_first_token_seconds_bucket{le="+Inf"}']) == n
    cluster = json.loads(s.get("/v1/cluster")[2])
    assert cluster["router"]["settings"]["router.thinking"] == "chat"
    workers = {w["name"]: w for w in cluster["workers"]}
    assert workers["decode@0"]["settings"] == {"numerics": "none", "threads": "0"}
    assert workers["prefill@0"]["role"] == "prefill" and len(workers["prefill@0"]["epoch"]) == 16
    assert any(p["proven"] for p in cluster["pairs"]) and cluster["requests"] == []
    health = json.loads(s.get("/health")[2])
    assert health["ready"] and health["decode_workers"] == 1 and health["engine_steps"] > 0
    assert cluster["router"]["probe_tokens"] > 256


if __name__ == "__main__":
    sys.exit(main(globals()))
