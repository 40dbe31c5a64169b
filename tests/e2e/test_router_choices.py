#!/usr/bin/env python3
"""Several choices and several prompts of one request, and sequences that make room for others. See router_frame.py."""
import sys

from router_frame import MIXED, body_of, chat, joined, main, openai, raw_post

def test_choices(s):
    """Every choice has its own text state and end, whole and streamed; the prompt counts once."""
    one = chat(s, MIXED)
    r = chat(s, MIXED, n=3)
    assert [c.index for c in r.choices] == [0, 1, 2]
    assert all((c.message.content, c.finish_reason) == (MIXED, "stop") for c in r.choices), r
    assert r.usage.prompt_tokens == one.usage.prompt_tokens
    assert r.usage.completion_tokens == 3 * one.usage.completion_tokens
    texts, roles, finish, usage = [""] * 3, [0] * 3, [None] * 3, []
    for chunk in chat(s, MIXED, n=3, stream=True, stream_options={"include_usage": True}):
        usage += [chunk.usage] if chunk.usage else []
        for c in chunk.choices:
            assert finish[c.index] is None
            roles[c.index] += c.delta.role == "assistant"
            texts[c.index] += c.delta.content or ""
            finish[c.index] = c.finish_reason
    assert (texts, roles, finish, usage) == ([MIXED] * 3, [1] * 3, ["stop"] * 3, [r.usage])
    cut = chat(s, MIXED, n=2, max_tokens=3).choices
    assert [c.finish_reason for c in cut] == ["length"] * 2
    stop = dict(text="one two STOP three " + "and more " * 50, stop="STOP")
    stopped = chat(s, n=2, **stop)
    assert [(c.message.content, c.finish_reason) for c in stopped.choices] == [("one two ", "stop")] * 2
    assert stopped.usage.completion_tokens <= 2 * chat(s, **stop).usage.completion_tokens + 8, stopped.usage
    thinks = chat(s, MIXED, n=2, reasoning_effort="high")
    assert thinks.usage.completion_tokens_details.reasoning_tokens == 2 * chat(
        s, MIXED, reasoning_effort="high").usage.completion_tokens_details.reasoning_tokens
    text = "@preempt " + "one two three four " * 3
    assert [c.message.content for c in chat(s, text, n=3).choices] == [text] * 3


def test_prompts(s):
    """Choice c of prompt i is number i * n + c; each is what its prompt alone gives, whole and streamed."""
    prompts = ["one", MIXED, "three " * 40, "one"]
    ask = lambda **more: s.api.completions.create(model="needle", **more)  # noqa: E731
    alone = [ask(prompt=p) for p in prompts]
    for n, more in ((1, {}), (2, {}), (2, {"echo": True})):
        r = ask(prompt=prompts, n=n, **more)
        want = [(p if more else "") + a.choices[0].text for a, p in zip(alone, prompts) for _ in range(n)]
        assert [c.index for c in r.choices] == list(range(4 * n)) and [c.text for c in r.choices] == want
        assert r.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
        assert r.usage.completion_tokens == n * sum(a.usage.completion_tokens for a in alone)
        texts, finish, usage = [""] * 4 * n, [None] * 4 * n, []
        for chunk in ask(prompt=prompts, n=n, stream=True, stream_options={"include_usage": True}, **more):
            usage += [chunk.usage] if chunk.usage else []
            for c in chunk.choices:
                assert finish[c.index] is None
                texts[c.index] += c.text
                finish[c.index] = c.finish_reason
        assert (texts, finish, usage) == (want, ["stop"] * 4 * n, [r.usage])
    ids = [[300, 301, 302], [310, 311]]
    r = ask(prompt=ids, logprobs=0)
    assert r.usage.prompt_tokens == 5 and [len(c.logprobs.tokens) for c in r.choices] == [3, 2]
    assert [c.finish_reason for c in ask(prompt=["a b c d", "x"], max_tokens=2).choices] == ["length", "stop"]
    stopped = ask(prompt=["one STOP " + "and more " * 50, "two STOP", "three"], stop="STOP")
    assert [c.text for c in stopped.choices] == ["one ", "two ", "three"]
    assert [c.text for c in ask(prompt=["word"] * 128).choices] == ["word"] * 128
    seeds = lambda: [line.split("seed=")[1] for line in s.seen().splitlines() if "seed=" in line]  # noqa: E731
    ask(prompt=["x"] * 3), ask(prompt=["x"] * 3, seed=5)
    assert len(set(seeds()[-6:-3])) == 3 and seeds()[-3:] == ["5"] * 3
    error, _ = s.refused(400, {"model": "needle", "prompt": ["a"] * 40, "n": 8}, "/v1/completions")
    assert error["param"] == "prompt" and "320" in error["message"]
    error, _ = s.refused(400, {"model": "needle", "prompt": ["a", [5] * 9000]}, "/v1/completions")
    assert error["code"] == "context_length_exceeded" and "9000" in error["message"]


def test_a_prompt_fails(s):
    """In a stream that is the end of all, and nothing is left behind."""
    try:
        for _ in s.api.completions.create(model="needle", prompt=["@fail one two three four", "@slow " + "word " * 500], stream=True):
            pass
        raise AssertionError("a broken stream looked whole")
    except openai.APIError as e:
        assert "asked to fail" in str(e)
    s.wait("everything to end", lambda: '"live":0,"queued":0,"tombstones":0,' in s.get("/v1/cluster")[2])


def test_a_choice_fails(s):
    """In a stream that is the end of all; whole, it alone is tried again."""
    for words in ("@fail one two three four", "@one " + "word " * 500):
        try:
            for _ in chat(s, words, n=3, stream=True):
                pass
            raise AssertionError("a broken stream looked whole")
        except openai.APIError as e:
            assert "asked to fail" in str(e)
    s.wait("everything to end", lambda: '"live":0,"queued":0,"tombstones":0,' in s.get("/v1/cluster")[2])
    status, _, text = s.get("/v1/chat/completions", "POST", body_of("@fail one two three four", n=3))
    assert status == 500 and "asked to fail" in text
    text = "@one two three four five"
    assert [c.message.content for c in chat(s, text, n=3).choices] == [text] * 3
    s.wait("everything to end", lambda: '"live":0,"queued":0,"tombstones":0,' in s.get("/v1/cluster")[2])


def test_client_leaves_choices(s):
    before = s.seen().count("cancel decode")
    with s.connect() as c:
        c.sendall(raw_post(b"/v1/chat/completions", body_of("@slow " + "word " * 500, n=3, stream=True)))
        data = b""
        while data.count(b"data: ") < 9:
            data += c.recv(65536)
    s.wait("the cancels", lambda: s.seen().count("cancel decode") == before + 3)


def test_preempted(s):
    """No room is nobody's fault: the answer goes on where it was, streamed or not."""
    text = "@preempt " + "one two three four " * 3
    assert chat(s, text).choices[0].message.content == text
    got, finish, usage = joined(chat(s, text, stream=True))
    assert (got, finish) == (text, "stop"), (got, finish)


if __name__ == "__main__":
    sys.exit(main(globals()))
