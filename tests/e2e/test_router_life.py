#!/usr/bin/env python3
"""Requests whose clients leave, workers that fail, die and come back, routers that stop, overload. See
router_frame.py."""
import collections
import concurrent.futures
import json
import random
import socket
import subprocess
import sys
import time

from router_frame import MODEL_DIR, PATIENCE, ROUTER, Setup, body_of, chat, in_flight, joined, main, openai, raw_post, read_all, user

def test_disconnect(s):
    before = s.seen().count("cancel decode")
    stream = chat(s, "@slow " + "many words " * 100, stream=True)
    for _, _ in zip(range(4), stream):
        pass
    assert len(in_flight(s)) == 1
    stream.close()
    s.wait("cancel of a stream", lambda: s.seen().count("cancel decode") > before)
    prefills = s.seen().count("prefill prompt")
    before_p, before_d = s.seen().count("cancel prefill"), s.seen().count("cancel decode")
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("@hang please")))
        s.wait("both workers have it", lambda: s.seen().count("prefill prompt") > prefills)
    s.wait("cancel of both legs", lambda: s.seen().count("cancel prefill") > before_p
           and s.seen().count("cancel decode") > before_d)
    s.wait("nothing is left", lambda: in_flight(s) == [])
    s.wait("no leg is left",
           lambda: json.loads(s.get("/v1/cluster")[2])["counts"]["tombstones"] == 0)


def test_disconnect_early(s):
    """The client leaves while its request is still being prepared."""
    body = body_of("word " * 100000)
    for _ in range(20):
        with s.connect() as c:
            c.sendall(raw_post(b"/v1/chat/completions", body))
    s.wait("nothing is left", lambda: in_flight(s) == [])
    assert chat(s, "still here").choices[0].message.content == "still here"


def test_failure_in_a_stream(s):
    try:
        joined(chat(s, "@fail one two three four", stream=True))
        raise AssertionError("a broken stream looked whole")
    except openai.APIError as e:
        assert "asked to fail" in str(e)
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("@fail one two three four", stream=True)))
        data = read_all(c)
    assert b'data: {"error":{' in data and b"[DONE]" not in data
    assert not data.endswith(b"0\r\n\r\n"), "the end must not look clean"
    status, _, text = s.get("/v1/chat/completions", "POST", body_of("@fail one two three four"))
    assert status == 500 and "asked to fail" in text


def own_router_stops():
    """SIGTERM in the middle of a stream: an error frame, not a torn connection."""
    s = Setup()
    try:
        words = "@slow " + "word " * 200
        with s.connect() as stream, s.connect() as whole:
            stream.sendall(raw_post(b"/v1/chat/completions", body_of(words, stream=True)))
            data = b""
            while data.count(b"data: ") < 4:
                data += stream.recv(65536)
            whole.sendall(raw_post(b"/v1/chat/completions", body_of(words)))
            s.wait("the second request", lambda: s.get("/health")[2].count('"requests_in_flight":2'))
            s.router.terminate()
            data += read_all(stream)
            answer = read_all(whole)
        assert s.router.wait(PATIENCE) == 0
        assert b'data: {"error":{' in data and b"the router is stopping" in data, data[-300:]
        assert b"[DONE]" not in data and not data.endswith(b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: " in answer, answer[:300]
    finally:
        s.stop()


def test_decode_dies(s):
    try:
        joined(chat(s, "@die one two three four", stream=True))
        raise AssertionError("a broken stream looked whole")
    except openai.APIError:
        pass
    s.wait_ready()
    assert chat(s, "back again").choices[0].message.content == "back again"


def own_few_descriptors():
    """Clients that only hold connections do not keep workers out."""
    s = Setup(workers=False, files=400)
    try:
        s.wait("loaded", lambda: "decode worker" in s.get("/ready")[2])
        assert "400 open files allow 80 connections" in s.logs()
        held = [s.connect() for _ in range(500)]
        s.start_workers()
        s.wait("the workers' links", lambda: s.logs().count(" is up: epoch ") == 2)
        for c in held:
            c.close()
        s.wait_ready()
        assert chat(s, "now").choices[0].message.content == "now"
    finally:
        s.stop()


def own_workers_twice():
    """Workers started a second time by mistake wait; those that serve go on, and are followed."""
    s = Setup()
    log = (s.dir / "router.log").read_text
    try:
        first, s.fake = s.fake, None
        s.start_workers()
        s.wait("both refusals", lambda: log().count("has this name and is connected") >= 2)
        for i in range(20):
            assert chat(s, f"answer {i}").choices[0].message.content == f"answer {i}"
        assert "is lost" not in log()
        first.terminate()
        assert first.wait(PATIENCE) == 0
        s.wait("the second ones", lambda: log().count(" is up: epoch ") == 4)
        s.wait_ready()
        assert chat(s, "after").choices[0].message.content == "after"
    finally:
        s.stop()


def own_no_workers():
    s = Setup(workers=False)
    s.wait("http", lambda: s.get("/health")[0] == 200)
    s.wait("loaded", lambda: "decode worker" in s.get("/ready")[2])
    status, headers, text = s.get("/ready")
    assert status == 503 and headers["Retry-After"] == "1" and "no decode worker" in text
    error, headers = s.refused(503, {"model": "needle", "messages": user("x")})
    assert headers["Retry-After"] and error["code"] == "not_ready" and error["type"] == "server_error"
    s.start_workers()
    s.wait_ready()
    assert chat(s, "now").choices[0].message.content == "now"
    s.stop_workers()
    s.wait("not ready", lambda: s.get("/ready")[0] == 503)
    s.start_workers()
    s.wait_ready()
    s.stop()


def own_overload():
    s = Setup(router__max_requests=2)
    streams = [chat(s, "@slow " + "word " * 100, stream=True) for _ in range(2)]
    error, headers = s.refused(429, {"model": "needle", "messages": user("x")})
    assert headers["Retry-After"] and error["type"] == "rate_limit_error"
    for stream in streams:
        stream.close()
    s.wait("room", lambda: in_flight(s) == [])
    assert chat(s, "room").choices[0].message.content == "room"
    s.stop()


def own_colocate_thinking():
    s = Setup(router__colocate="on", router__thinking="thinking")
    m = chat(s, "first think then answer").choices[0].message
    assert m.reasoning_content + m.content == "first think then answer"
    m = chat(s, "first think then answer", reasoning_effort="none").choices[0].message
    assert m.content == "first think then answer"
    assert "prefill prompt" not in s.seen()
    s.stop()


def own_stop_with_requests():
    """SIGTERM in the middle: the workers are told, the router ends in order."""
    s = Setup()
    stream = chat(s, "@slow " + "word " * 100, stream=True)
    next(iter(stream))
    s.router.terminate()
    assert s.router.wait(PATIENCE) == 0
    assert "cancel decode" in s.seen()
    s.stop()


def own_workers_killed():
    """Workers die at random times under load: every answer is whole or an error, none hangs, and
    the service comes back."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    r = random.Random(seed)
    s = Setup()
    outcomes = collections.Counter()

    def one(i):
        text = f"request {i} " + "and so on " * (i % 40)
        try:
            if i % 2:
                got, finish, _ = joined(chat(s, text, stream=True))
            else:
                choice = chat(s, text).choices[0]
                got, finish = choice.message.content, choice.finish_reason
        except openai.APIError as e:
            return type(e).__name__
        return "right" if (got, finish) == (text, "stop") else f"WRONG {finish} {got!r}"

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        for round in range(4):
            answers = [pool.submit(one, i) for i in range(60)]
            time.sleep(r.uniform(0.05, 0.5))
            s.fake.kill()
            s.fake.wait()
            s.start_workers()
            outcomes.update(a.result(timeout=PATIENCE) for a in answers)
            s.wait_ready()
    print(dict(outcomes))
    assert not any(o.startswith("WRONG") for o in outcomes), outcomes
    assert outcomes["right"] and len(outcomes) > 1, outcomes
    assert chat(s, "after all").choices[0].message.content == "after all"
    s.wait("nothing is left", lambda: in_flight(s) == [])
    s.stop()


def own_bad_start():
    s = Setup(workers=False, model__dir="/nonexistent")
    assert s.router.wait(PATIENCE) == 1 and "/nonexistent" in (s.dir / "router.log").read_text()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        r = subprocess.run([ROUTER, "--set", f"model.dir={MODEL_DIR}", "--set", f"router.listen=127.0.0.1:{port}"],
                           capture_output=True, text=True, timeout=PATIENCE)
        assert r.returncode == 1 and "already in use" in r.stderr, r.stderr
    r = subprocess.run([ROUTER, "--set", "nonsense=1"], capture_output=True, text=True)
    assert r.returncode == 2 and "nonsense" in r.stderr
    assert "router.listen" in subprocess.run([ROUTER, "--help"], capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(globals()))
