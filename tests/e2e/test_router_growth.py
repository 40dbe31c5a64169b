#!/usr/bin/env python3
"""Thousands of exchanges with every endpoint, whole and broken off at any byte, hostile and slow: the router
answers each as it should, and afterwards has the descriptors and the memory it had. See router_frame.py."""
import json
import os
import pathlib
import random
import select
import socket
import struct
import sys
import threading
import time

from router_frame import MIXED, SEED, Setup, body_of, in_flight, main, raw_post, user

ROUND, THREADS = 1500, 4
# Growth that is no leak: the allocator's arenas, one for each thread that comes along.
GROWTH_KB = 3000
SANITIZED = b"__asan_init" in pathlib.Path(sys.argv[1]).read_bytes()  # it keeps what was freed, and takes ten times as long
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {
    "a": {"type": "array", "items": {"enum": [1, "盐", None]}}}}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}


def good(r):
    """(path, body) that is answered with 200."""
    text = r.choice([MIXED, "@fast " + "salt " * r.randrange(300), "x", "@fast 🙂" * r.randrange(1, 50)])
    chat = {"model": "needle", "messages": user(text), "max_tokens": r.choice([1, 5, 64, 500]), "stream": r.random() < 0.5}
    extra = [{}, {"n": 3}, {"response_format": SCHEMA}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"},
             {"logprobs": True, "top_logprobs": 5}, {"stop": ["al", "lt s"]}, {"logit_bias": {"7": 3}, "repetition_penalty": 1.3},
             {"reasoning_effort": "high"}, {"priority": 3, "return_timings": True, "stream": False}, {"guided_regex": "[a-z]+ü?"}]
    answer = {"model": "needle", "input": text, "stream": chat["stream"], "max_output_tokens": 64}
    return r.choice([
        lambda: ("/v1/chat/completions", chat | r.choice(extra)),
        lambda: ("/v1/completions", {"model": "needle", "prompt": r.choice([text, [text, "b"], [5, 6, 7], [[5], [6, 7]]]), "max_tokens": 20,
                                     "stream": chat["stream"], "echo": r.random() < 0.3}),
        lambda: ("/v1/messages", chat | r.choice([{}, {"system": "Be brief."}, {"tools": [ANTHROPIC_TOOL]}])),
        lambda: ("/v1/messages/count_tokens", {"model": "needle", "messages": user(text)}),
        lambda: ("/v1/responses", answer | r.choice([{}, {"store": False}, {"reasoning": {"effort": "high"}}])),
        lambda: ("/tokenize", {"prompt": text}),
        lambda: ("/detokenize", {"tokens": [r.randrange(1000) for _ in range(50)]}),
    ])()


HOSTILE = [
    b"", b"{", b"null", b"[]", b'{"model":"needle"}', b"{" * 5000, b'{"a":' * 3000, b'["\\ud800"]', b'{"model":"needle","messages":5}', b"\xff" * 99, b'{"\\u0000":1}',
    b'{"model":"needle","messages":[{"role":"user","content":"' + b"\xe7\x9b" + b'"}]}',
    b'{"model":"needle","messages":[{"role":"user","content":"x"}],"max_tokens":1e999}',
    b'{"model":"needle","messages":[{"role":"user","content":"x"}],"n":18446744073709551616}',
    b'{"model":"needle","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"$ref":"#"}}}}',
    b'{"model":"needle","messages":[{"role":"user","content":"x"}],"guided_regex":"(((((a*)*)*)*)*)*b"}',
    b'{"model":"needle","messages":[{"role":"tool","content":"x","tool_call_id":"y"}]}',
    b'{"model":"needle","prompt":[1e9,-1]}', b'{"model":"needle","input":[{"type":"item_reference","id":"x"}]}',
    b'{"model":"needle","messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 3000) + b',{"role":"assistant"}]}',
    b'{"model":"needle","input":"x","previous_response_id":"' + b"r" * 5000 + b'"}', b'{"tokens":[' + b"1," * 9000 + b"-1]}",
]
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize",
         "/v1/cluster/drain"]
GETS = ["/v1/models", "/v1/models/needle", "/v1/models/x", "/v1/cluster", "/metrics", "/health", "/ready", "/openapi.json", "/v1/responses/resp_0",
        "/v1/responses/resp_0/input_items?limit=5", "/x?y", "/%00"]
HEADS = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
         b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}", b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\n\r\n",
         b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
         b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500 + b"\r\n"]


def receive(c, most=1 << 30):
    """The status and the whole answer, or its first `most` bytes."""
    got = b""
    while len(got) < most:
        data = c.recv(65536)
        if not data:
            break
        got += data
    return int(got[9:12]) if got.startswith(b"HTTP/1.") else 0, got


def send_slowly(c, data, r):
    for _ in range(r.randrange(2, 6)):
        cut = r.randrange(len(data) + 1)
        c.sendall(data[:cut])
        data = data[cut:]
        time.sleep(r.random() * 0.01)
    c.sendall(data)


def reset(c):
    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def exchange(s, r):
    close = b"Connection: close\r\n"
    kind = r.randrange(7)
    with s.connect() as c:
        if kind == 0:  # nothing that is a request, or one without an end
            c.sendall(r.choice(HEADS))
            if r.random() < 0.5:
                reset(c)
            elif r.random() < 0.5:
                c.shutdown(socket.SHUT_WR)
                receive(c)
        elif kind == 1:
            c.sendall(f"GET {r.choice(GETS)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            status, got = receive(c)
            assert status in (200, 404), got[:300]
        elif kind == 2:
            path, body = r.choice(POSTS), r.choice(HOSTILE)
            c.sendall(raw_post(path.encode(), body, close))
            status, got = receive(c)
            assert status == 200 or 400 <= status < 500, (path, body[:200], got[:300])  # what is odd is not always wrong
        else:
            path, body = good(r)
            data = raw_post(path.encode(), json.dumps(body, ensure_ascii=r.random() < 0.5).encode(), close)
            if kind == 3:  # the request breaks off
                c.sendall(data[:r.randrange(len(data))])
            elif kind == 4:  # or the answer does, anywhere
                c.sendall(data)
                receive(c, r.choice([1, 200, 1000, 5000]))
                reset(c)
            elif kind == 5:  # nobody reads
                c.sendall(data)
                time.sleep(r.random() * 0.02)
            else:
                send_slowly(c, data, r)
                status, got = receive(c)
                assert status == 200, (path, body, got[:500])
                assert got.endswith((b"}", b"\r\n\r\n")), got[-100:]
                got.partition(b"\r\n\r\n")[2].decode()  # whatever was cut, no code point was


def run(s, count):
    failures = []

    def work(number):
        r = random.Random(SEED + number)
        for _ in range(count // THREADS):
            try:
                exchange(s, r)
            except (ConnectionResetError, BrokenPipeError):
                pass
            except Exception as e:
                failures.append(repr(e)[:2000])
                return

    threads = [threading.Thread(target=work, args=(i + count,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def state(s):
    """Descriptors, and memory of its own in kB."""
    pid = s.router.pid
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(status.partition("RssAnon:")[2].split()[0])


def settle(s):
    s.wait("nothing in flight", lambda: in_flight(s) == [])
    s.wait("no connections", lambda: "tandem_http_connections 1\n" in s.get("/metrics")[2])
    return state(s)


def test_growth(s):
    """A buffer that became as large as it gets is no leak: that grows in every round."""
    count = ROUND // 5 if SANITIZED else ROUND
    run(s, count)
    files, memory = settle(s)
    for _ in range(5):
        run(s, 2 * count)
        files_after, memory_after = settle(s)
        print(f"  {2 * count} exchanges more: {files} and {files_after} descriptors, {memory} and {memory_after} kB")
        assert abs(files_after - files) <= 2, f"{files} descriptors became {files_after}"  # those that ask are among them
        if SANITIZED or memory_after - memory < GROWTH_KB:
            return
        memory = memory_after
    raise AssertionError(f"{memory_after} kB, and more in every round")


if __name__ == "__main__":
    sys.exit(main(globals(), lambda: Setup(router__store_bytes=1 << 20, context=65536)))
