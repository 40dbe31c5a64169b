#!/usr/bin/env python3
"""Where the time of an answer went: what answers say (usage.tandem, Server-Timing) and what the metrics say
are the same numbers. Beside it what else an answer tells of its workers. See router_frame.py."""
import json
import re
import sys

try:
    import anthropic
except ImportError:
    print("the PyPI package anthropic is not installed")
    sys.exit(77)

from router_frame import PATIENCE, Setup, body_of, chat, main, raw_post, read_all, user

PHASES = ("prepare", "queue", "prefill", "transfer", "decode")
ASK = {"extra_body": {"return_timings": True}}


def sums(s):
    values = dict(line.rsplit(" ", 1) for line in s.get("/metrics")[2].splitlines() if not line.startswith("#"))
    out = {p: float(values[f'tandem_request_phase_seconds_sum{{phase="{p}"}}']) for p in PHASES}
    counts = {int(values[f'tandem_request_phase_seconds_count{{phase="{p}"}}']) for p in PHASES}
    assert counts == {int(values["tandem_request_seconds_count"])}
    return {**out, "total": float(values["tandem_request_seconds_sum"]), "first": float(values["tandem_time_to_first_token_seconds_sum"])}


def check(t):
    assert list(t["phases"]) == list(PHASES) and all(v >= 0 for v in t["phases"].values())
    assert abs(sum(t["phases"].values()) - t["total"]) < 1e-7, t
    assert t["first_token"] <= t["total"] + 1e-7 and t["attempts"] == 1, t
    assert (t["prefill_worker"], t["decode_worker"]) == ("prefill@0", "decode@0"), t
    return t


def all_ways(s):
    """The ledger of one answer of every API, whole and streamed."""
    usage = {"stream_options": {"include_usage": True}}
    messages = anthropic.Anthropic(base_url=s.url, api_key="none", max_retries=0, timeout=PATIENCE).messages
    ask = {"model": "needle", "messages": user("one two"), **ASK}
    yield s.api.chat.completions.create(**ask).usage
    yield list(s.api.chat.completions.create(**ask, stream=True, **usage))[-1].usage
    yield s.api.chat.completions.create(**ask, n=3).usage
    yield s.api.completions.create(model="needle", prompt=["@slow one two three four", "two"], **ASK).usage
    yield list(s.api.completions.create(model="needle", prompt="one", stream=True, **usage, **ASK))[-1].usage
    yield s.api.responses.create(model="needle", input="one", **ASK).usage
    yield list(s.api.responses.create(model="needle", input="one", stream=True, **ASK))[-1].response.usage
    yield messages.create(max_tokens=50, **ask).usage
    yield [e for e in messages.create(max_tokens=50, stream=True, **ask) if e.type == "message_delta"][-1].usage


def test_sums(s):
    before, mine = sums(s), []
    for usage in all_ways(s):
        mine.append(check(usage.tandem))
    after = sums(s)
    for key in (*PHASES, "total", "first"):
        told = sum(t["phases"][key] if key in PHASES else t["total"] if key == "total" else t["first_token"] for t in mine)
        assert abs(after[key] - before[key] - told) < 1e-6, (key, after[key] - before[key], told)
    slow = mine[3]["phases"]
    assert slow["decode"] + slow["transfer"] > 0.1, f"tokens of 20 ms each: {mine[3]}"


def test_header(s):
    """A phase of no time at all is not in it."""
    body = {"model": "needle", "messages": user("@slow one two three four five six"), "return_timings": True}
    _, headers, text = s.get("/v1/chat/completions", "POST", body)
    header = headers["Server-Timing"]
    part = r'\w+;dur=\d+\.\d{3}(;desc="\w+@\d")?'
    assert re.fullmatch(f"{part}(, {part})*", header), header
    ms = {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}
    told = json.loads(text)["usage"]["tandem"]
    told = {**told["phases"], "total": told["total"]}
    assert set(ms) <= set(told) and {"prepare", "decode", "total"} <= set(ms), header
    for name, value in told.items():
        assert abs(ms.get(name, 0.0) - 1000 * value) < 1e-3, (name, header)
    assert re.search(r';dur=[\d.]+;desc="decode@0"', header) and ("prefill" not in ms or ';desc="prefill@0"' in header), header
    assert ms["decode"] > 80 and "tandem" not in json.loads(s.get("/v1/chat/completions", "POST", body_of("x"))[2])["usage"]
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("x", stream=True), b"Connection: close\r\n"))
        head = read_all(c).decode().split("\r\n\r\n")[0]
    assert re.search(r"\r\nServer-Timing: prepare;dur=\d+\.\d{3}(\r\n|$)", head), head


def test_asked_where_it_cannot_be(s):
    error, _ = s.refused(400, {"model": "needle", "messages": user("x"), "stream": True, "return_timings": True})
    assert error["param"] == "return_timings" and "include_usage" in error["message"]
    assert s.refused(400, {"model": "needle", "messages": user("x"), "return_timings": 1})[0]["param"] == "return_timings"


def test_fingerprint_and_details(s):
    whole = chat(s, "x")
    assert whole.system_fingerprint.startswith("fp_") and len(whole.system_fingerprint) == 19
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    chunks = list(chat(s, "x", stream=True))
    assert {c.system_fingerprint for c in chunks} == {whole.system_fingerprint}
    assert s.api.completions.create(model="needle", prompt="x").system_fingerprint == whole.system_fingerprint


def own_retries():
    """A second attempt is in the same phases again; a queue is time too."""
    s = Setup()
    try:
        r = chat(s, "@preempt " + "one two three four " * 3, **ASK)
        t = r.usage.tandem
        assert t["attempts"] > 1 and abs(sum(t["phases"].values()) - t["total"]) < 1e-7
        alone = sums(s)
        assert abs(alone["total"] - t["total"]) < 1e-6
    finally:
        s.stop()
    s = Setup(router__colocate="on")
    try:
        t = chat(s, "one two", **ASK).usage.tandem
        assert t["prefill_worker"] is None and t["decode_worker"] == "decode@0" and t["phases"]["transfer"] == 0
    finally:
        s.stop()


if __name__ == "__main__":
    sys.exit(main(globals()))
