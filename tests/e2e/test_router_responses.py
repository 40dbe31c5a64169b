#!/usr/bin/env python3
"""The Responses API as PyPI's `openai` sees it: create, stream, kept conversations, tools, and what is
refused. See router_frame.py."""
import json
import sys

from router_frame import (ARGUMENTS, CALL, MIXED, MODEL_DIR, OTHER, WEATHER, Script, Setup, T, calls, main, openai, raw_post,
                          read_all, user)

TOOLS = [{"type": "function", "strict": False, **{k: WEATHER["function"][k] for k in ("name", "description", "parameters")}},
         {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}}]


class Client:
    def __init__(self):
        self.script = Script(MODEL_DIR)
        self.setup, self.api = self.script.setup, self.script.api
        self.stop, self.logs = self.setup.stop, self.setup.logs
        self.said = {}

    def say(self, text):
        """The same tokens for the same text."""
        return self.said.setdefault(text, self.script.say(text))

    def ask(self, said, **more):
        return self.api.responses.create(model="needle", input=self.say(said), **more)

    def streamed(self, said, **more):
        """The last response and all events; the SDK's own helper checks how they fit together."""
        with self.api.responses.stream(model="needle", input=self.say(said), **more) as stream:
            events = list(stream)
        return events[-1].response, events

    def refused(self, status, body, path="/v1/responses"):
        return self.setup.refused(status, {"model": "needle", "input": "x", **body}, path)[0]


def output(response):
    """Without the ids, which differ between answers."""
    return [i.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True) for i in response.output]


def check_stream(events):
    """Numbers without a gap; every item and part is opened, filled and closed with what it is in the end."""
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert [e.response.status for e in events[:2]] == ["in_progress"] * 2 and events[0].response.output == []
    final = events[-1].response
    opened, text = [], {}
    for e in events[2:-1]:
        if e.type == "response.output_item.added":
            assert len(opened) == e.output_index
            opened.append([e.item.id])
            text[e.output_index] = ""
            continue
        assert e.output_index == len(opened) - 1, "one item at a time, in order"
        opened[-1].append(e.type.removeprefix("response."))
        if e.type.endswith(".delta"):
            assert e.delta
            text[e.output_index] += e.delta
        if e.type.endswith(("text.done", "arguments.done")):
            assert text[e.output_index] == getattr(e, "text", None) or text[e.output_index] == e.arguments
        if e.type == "response.output_item.done":
            assert e.item.model_dump(exclude_none=True) == final.output[e.output_index].model_dump(
                exclude_none=True, exclude={"parsed_arguments"} if e.item.type == "function_call" else
                {"content": {0: {"parsed"}}} if e.item.type == "message" else set())
        else:
            assert e.item_id == opened[-1][0]
    forms = []
    for one in opened:
        kinds = [k for i, k in enumerate(one[1:]) if not (k.endswith(".delta") and i and one[i] == k)]
        forms.append(kinds)
    return forms


MESSAGE = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
REASONING = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"]
SUMMARY = ["reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done",
           "reasoning_summary_part.done", "output_item.done"]
FUNCTION = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


# ---- answers ----

def test_text(s):
    r = s.ask(MIXED)
    assert r.output_text == MIXED and r.status == "completed" and r.object == "response" and r.id.startswith("resp_")
    other = s.ask(MIXED).id
    assert len(other) == len(r.id) == 37 and other[5:13] != r.id[5:13], "ids can be guessed"
    assert [i.type for i in r.output] == ["message"] and r.output[0].status == "completed" and r.output[0].role == "assistant"
    u = r.usage
    assert u.total_tokens == u.input_tokens + u.output_tokens and u.output_tokens > 5 and u.input_tokens > 5
    assert u.output_tokens_details.reasoning_tokens == 0 and u.input_tokens_details.cached_tokens == 0
    assert r.error is None and r.incomplete_details is None and r.created_at <= r.completed_at
    chat = s.api.chat.completions.create(model="needle", messages=user(s.say(MIXED)))
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (u.input_tokens, u.output_tokens)
    final, events = s.streamed(MIXED)
    assert check_stream(events) == [MESSAGE] and final.output_text == MIXED
    assert output(final) == output(r) and events[-1].type == "response.completed"
    assert final.usage.output_tokens > 5


def test_settings_come_back(s):
    r = s.ask("x", instructions="Be brief.", metadata={"a": "b"}, temperature=0.25, top_p=0.5, max_output_tokens=2000, tools=TOOLS,
              reasoning={"effort": "high"}, user="me", store=False, text={"format": {"type": "text"}}, parallel_tool_calls=False,
              extra_body={"seed": 7, "top_k": 3})
    assert (r.instructions, r.metadata, r.temperature, r.top_p, r.max_output_tokens) == ("Be brief.", {"a": "b"}, 0.25, 0.5, 2000)
    assert r.tools[0].name == "get_weather" and r.tool_choice == "auto" and r.parallel_tool_calls is False
    assert r.reasoning.effort == "high" and r.user == "me" and r.text.format.type == "text" and r.store is False
    assert "temperature=0.25 seed=7\n" in s.setup.seen()
    plain = s.ask("x")
    assert plain.metadata == {} and plain.tools == [] and plain.previous_response_id is None and plain.store is True


def test_reasoning(s):
    text = f"Hm.\n{T}\n\nSo."
    for more, kind, form in (({"effort": "high"}, "content", REASONING), ({"effort": "high", "summary": "auto"}, "summary", SUMMARY)):
        r = s.ask(text, reasoning=more)
        assert [i.type for i in r.output] == ["reasoning", "message"] and r.output_text == "So."
        assert [p.text for p in getattr(r.output[0], kind)] == ["Hm."] and r.usage.output_tokens_details.reasoning_tokens > 1
        assert not getattr(r.output[0], "summary" if kind == "content" else "content")
        final, events = s.streamed(text, reasoning=more)
        assert check_stream(events) == [form, MESSAGE] and output(final) == output(r)
    assert [i.type for i in s.ask("x", reasoning={"effort": "none"}).output] == ["message"]


def test_calls(s):
    text = "Let me look." + calls(CALL, OTHER)
    r = s.ask(text, tools=TOOLS)
    assert [i.type for i in r.output] == ["message", "function_call", "function_call"] and r.status == "completed"
    assert r.output[1].name == "get_weather" and json.loads(r.output[1].arguments) == ARGUMENTS
    final, events = s.streamed(text, tools=TOOLS)
    assert check_stream(events) == [MESSAGE, FUNCTION, FUNCTION] and output(final) == output(r)
    ids = [i.call_id for x in (r, final) for i in x.output if i.type == "function_call"] + [i.id for x in (r, final) for i in x.output]
    assert len(set(ids)) == 10
    only, events = s.streamed(calls(OTHER), tools=TOOLS)
    assert check_stream(events) == [FUNCTION] and only.output_text == ""
    assert [i.type for i in s.ask(text, tools=TOOLS, tool_choice="none").output] == ["message"]


def test_cut(s):
    r = s.ask("a b c d e f", max_output_tokens=3)
    assert r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens" and r.output[-1].status == "incomplete"
    assert r.usage.output_tokens == 3 and r.completed_at is None
    final, events = s.streamed("a b c d e f", max_output_tokens=3)
    assert events[-1].type == "response.incomplete" and output(final) == output(r) and check_stream(events)
    whole = f"Thinks.{T}Says." + calls(CALL)
    n = len(s.script.v.tokens(whole, s.script.r))
    for limit in range(1, n, max(1, n // 9)):
        r, (final, events) = (f(whole, max_output_tokens=limit, tools=TOOLS, reasoning={"effort": "low"}) for f in (s.ask, s.streamed))
        check_stream(events)
        assert output(final) == output(r) and final.status == r.status
        statuses = [i.status for i in final.output]
        assert statuses == ["completed"] * (len(statuses) - 1) + [final.status][:len(statuses)], statuses


def test_logprobs(s):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    text = f"Hm.{T}So wörld it is."
    r, (final, events) = (f(text, reasoning={"effort": "high"}, **more) for f in (s.ask, s.streamed))
    entries = r.output[1].content[0].logprobs
    assert b"".join(bytes(e.bytes) for e in entries).decode() == "So wörld it is." and len(entries[0].top_logprobs) == 2
    assert final.output[1].content[0].logprobs == entries and len(entries) > 3
    deltas = [p.token for e in events if e.type == "response.output_text.delta" for p in e.logprobs]
    assert deltas == [e.token for e in entries]
    assert s.ask(text).output[0].content[0].logprobs == []


# ---- conversations ----

def prompt_of(s, messages, **more):
    """Tokens of the chat prompt that says the same."""
    body = {"model": "needle", "messages": messages, **more}
    return json.loads(s.setup.get("/tokenize", "POST", body)[2])["count"]


def test_items_are_the_chat(s):
    """A conversation as items is the same prompt as messages."""
    items = [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
             {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
             {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [{"type": "output_text", "text": "One.", "annotations": []}]},
             {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}"},
             {"type": "function_call", "call_id": "b", "name": "run", "arguments": '{"x": 1}'},
             {"type": "function_call_output", "call_id": "b", "output": "second"},
             {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "first"}, {"type": "input_image", "image_url": "x"}]},
             {"role": "user", "content": "and?"}]
    call = lambda i, a: {"id": i, "type": "function", "function": {"name": "run", "arguments": a}}  # noqa: E731
    messages = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "go"},
                {"role": "assistant", "content": "One.", "reasoning_content": "hm", "tool_calls": [call("a", "{}"), call("b", '{"x": 1}')]},
                {"role": "tool", "tool_call_id": "b", "content": "second"},
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "first"}, {"type": "input_image"}]},
                {"role": "user", "content": "and?"}]
    r = s.api.responses.create(model="needle", instructions="Be kind.", input=items, tools=TOOLS, reasoning={"effort": "high"})
    assert r.output_text.endswith("and?") or r.output[0].type == "reasoning"
    chat_tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in TOOLS]
    assert r.usage.input_tokens == prompt_of(s, messages, tools=chat_tools, reasoning_effort="high")
    # turns that no message of the user's parts
    think = lambda text: {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": text}]}  # noqa: E731
    made = lambda i: {"type": "function_call", "call_id": i, "name": "run", "arguments": "{}"}  # noqa: E731
    done = lambda i: {"type": "function_call_output", "call_id": i, "output": "r" + i}  # noqa: E731
    said = lambda text: {"role": "assistant", "content": text}  # noqa: E731
    items = [{"role": "user", "content": "go"}, made("a"), done("a"), made("b"), done("b"), think("one"), said("One."), think("two"), said("Two."),
             said("Three."), {"role": "user", "content": "and?"}]
    turn = lambda content, reasoning="", calls=(): {  # noqa: E731
        "role": "assistant", "content": content, "reasoning_content": reasoning, **({"tool_calls": list(calls)} if calls else {})}
    result = lambda i: {"role": "tool", "tool_call_id": i, "content": "r" + i}  # noqa: E731
    messages = [items[0], turn("", calls=[call("a", "{}")]), result("a"), turn("", calls=[call("b", "{}")]), result("b"), turn("One.", "one"),
                turn("Two.", "two"), turn("Three."), items[-1]]
    r = s.api.responses.create(model="needle", input=items, tools=TOOLS, reasoning={"effort": "high"})
    assert r.usage.input_tokens == prompt_of(s, messages, tools=chat_tools, reasoning_effort="high")


def test_kept_conversation(s):
    """What is continued by id is the prompt of what was said, whole or streamed; instructions are not carried on."""
    first = s.ask("The first answer.", instructions="Only for the first.")
    second, _ = s.streamed("The second.", previous_response_id=first.id)
    third = s.ask("The third.", previous_response_id=second.id, instructions="New ones.")
    said = [{"role": "system", "content": "New ones."}]
    for r in (first, second):
        items = s.api.responses.input_items.list(r.id)
        said += [{"role": "user", "content": items.data[0].content[0].text}, {"role": "assistant", "content": r.output_text}]
    said.append({"role": "user", "content": s.api.responses.input_items.list(third.id).data[0].content[0].text})
    assert third.usage.input_tokens == prompt_of(s, said) and third.previous_response_id == second.id
    other = s.ask("Another second.", previous_response_id=first.id)  # branches
    assert other.output_text == "Another second."
    assert s.api.responses.retrieve(second.id).model_dump() == s.api.responses.retrieve(second.id).model_dump()
    assert s.api.responses.retrieve(third.id) == third and s.api.responses.retrieve(second.id).output_text == "The second."
    s.api.responses.delete(first.id)
    assert s.ask("Goes on.", previous_response_id=second.id).usage.input_tokens > second.usage.input_tokens
    for gone in (first.id, "resp_nothing"):
        for call in (lambda: s.api.responses.retrieve(gone), lambda: s.api.responses.delete(gone), lambda: s.api.responses.input_items.list(gone),
                     lambda: s.ask("x", previous_response_id=gone)):
            try:
                call()
                raise AssertionError("a response that is not kept was found")
            except openai.NotFoundError as e:
                assert "not kept" in str(e) or "is kept here" in str(e)
    private = s.ask("Forget me.", store=False)
    assert private.store is False and s.setup.get(f"/v1/responses/{private.id}")[0] == 404


def test_pipelined_continuation(s):
    """The answer is kept before its last byte is sent."""
    first = s.ask("Once.")
    for n in range(5):
        first = s.ask(f"And {n}.", previous_response_id=first.id)
    body = json.dumps({"model": "needle", "input": "more", "previous_response_id": first.id}).encode()
    with s.setup.connect() as c:
        c.sendall(raw_post(b"/v1/responses", body) + raw_post(b"/v1/responses", body, b"Connection: close\r\n"))
        assert read_all(c).count(b'"status":"completed","error"') == 2


def test_input_items(s):
    r = s.api.responses.create(model="needle", input=[{"role": "user", "content": f"item {i}"} for i in range(5)])
    page = lambda **q: [i.content[0].text for i in s.api.responses.input_items.list(r.id, **q).data]  # noqa: E731
    assert page() == [f"item {i}" for i in (4, 3, 2, 1, 0)] and page(order="asc", limit=2) == ["item 0", "item 1"]
    assert [i.content[0].text for i in s.api.responses.input_items.list(r.id, limit=2)] == [f"item {i}" for i in (4, 3, 2, 1, 0)], "pages"
    for query in ("limit=0", "limit=101", "limit=x", "limit=1x", "order=up"):
        assert s.setup.get(f"/v1/responses/{r.id}/input_items?{query}")[0] == 400, query
    assert s.setup.get(f"/v1/responses/{r.id}?stream=true")[0] == 400
    assert s.setup.get(f"/v1/responses/{r.id}/cancel", "POST")[0] == 404 and s.setup.get(f"/v1/responses/{r.id}/x")[0] == 404
    assert s.setup.get("/v1/responses/")[0] == 404 and s.setup.get("/v1/responses", "DELETE")[1]["Allow"] == "POST"
    assert s.setup.get(f"/v1/responses/{r.id}/input_items", "DELETE")[0] == 405


def agent(s, kept):
    """Ten turns of reasoning and calls; the results, or everything, is sent back. Gives the prompts' lengths."""
    items, previous, seen = [], None, []
    for turn in range(10):
        last = turn == 9
        script = s.say(f"Thought {turn}.{T}" + ("Done." if last else f"Step {turn}." + calls(CALL, OTHER)))
        new = [{"role": "user", "content": script}]
        if turn:
            asked = [i for i in r.output if i.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": asked[1].call_id, "output": "second"},
                   {"type": "function_call_output", "call_id": asked[0].call_id, "output": script}]
        items += new
        r = s.api.responses.create(model="needle", input=new if kept else items, previous_response_id=previous, store=kept, tools=TOOLS,
                                   reasoning={"effort": "high"})
        assert [i.type for i in r.output] == ["reasoning", "message"] + ["function_call"] * (0 if last else 2), r.output
        assert r.output[0].content[0].text == f"Thought {turn}." and r.output_text == ("Done." if last else f"Step {turn}.")
        items += r.output
        previous = r.id if kept else None
        seen.append(r.usage.input_tokens)
    return seen


def test_agent_loop(s):
    assert agent(s, True) == agent(s, False)


def own_limits():
    """The oldest make room, by count and by bytes; a conversation larger than the limit is not kept."""
    s = Setup(router__store_count=3)
    try:
        made = [s.api.responses.create(model="needle", input=f"n {i}") for i in range(5)]
        assert [s.get(f"/v1/responses/{r.id}")[0] for r in made] == [404, 404, 200, 200, 200]
        values = dict(line.rsplit(" ", 1) for line in s.get("/metrics")[2].splitlines() if not line.startswith("#"))
        assert (values["tandem_responses_kept"], values["tandem_responses_evicted_total"]) == ("3", "2")
        assert int(values["tandem_responses_bytes"]) > 3 * 500
        error, _ = s.refused(404, {"model": "needle", "input": "x", "previous_response_id": made[0].id}, "/v1/responses")
        assert error["code"] == "previous_response_not_found" and "made room" in error["message"]
    finally:
        s.stop()
    s = Setup(router__store_bytes=20000)
    try:
        made, previous = [], None
        for i in range(12):
            r = s.api.responses.create(model="needle", input=f"{i} " + "word " * 300, previous_response_id=previous)
            made.append(r)
            values = dict(line.rsplit(" ", 1) for line in s.get("/metrics")[2].splitlines() if not line.startswith("#"))
            assert int(values["tandem_responses_bytes"]) <= 20000
            kept = s.get(f"/v1/responses/{r.id}")[0] == 200
            assert kept or i > 2
            previous = r.id if kept else None
        assert "is not kept" in s.logs() and [s.get(f"/v1/responses/{r.id}")[0] for r in made].count(200) >= 1
    finally:
        s.stop()
    s = Setup(router__store_bytes=0)
    try:
        r = s.api.responses.create(model="needle", input="x")
        assert r.store is False and s.get(f"/v1/responses/{r.id}")[0] == 404
        error, _ = s.refused(400, {"model": "needle", "input": "x", "store": True}, "/v1/responses")
        assert error["param"] == "store" and "store_bytes" in error["message"]
    finally:
        s.stop()


# ---- failures, refusals ----

def test_failure_in_a_stream(s):
    text = "@fail " + "one two three four " * 9
    events = list(s.api.responses.create(model="needle", input=text, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error" and "asked to fail" in events[-1].response.error.message
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert s.refused(500, {"input": text})["type"] == "server_error"
    assert s.setup.get(f"/v1/responses/{events[-1].response.id}")[0] == 404


def test_refusals(s):
    message = lambda content, role="user": {"input": [{"role": role, "content": content}]}  # noqa: E731
    f = TOOLS[0]
    for more, param in [
            ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": []}, "input"), ({"input": [5]}, "input[0]"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"), ({"input": [{"type": 5}]}, "input[0].type"),
            ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"), ({"input": [{"content": "x"}]}, "input[0].role"),
            (message(5), "input[0].content"), (message([5]), "input[0].content[0]"),
            (message([{"type": "input_image", "image_url": "x"}]), "input[0].content[0].type"),
            (message([{"type": "input_text"}]), "input[0].content[0].text"), (message([{"type": ""}]), "input[0].content[0].type"),
            ({"input": [{"role": "user", "content": "x", "shade": 1}]}, "input[0].shade"),
            (message("x", "assistant"), "input"),
            ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
            ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
            ({"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "zzz"}, {"role": "user", "content": "x"}]}, "input[0].encrypted_content"),
            ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"name": "x"}]}, "tools[0].type"),
            ({"tools": [{**f, "name": 'a"b'}]}, "tools[0].name"), ({"tools": [{**f, "parameters": []}]}, "tools[0].parameters"),
            ({"tool_choice": {"type": "web_search"}}, "tool_choice"), ({"tool_choice": 5}, "tool_choice"),
            ({"background": True}, "background"), ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
            ({"truncation": "auto"}, "truncation"), ({"include": ["file_search_call.results"]}, "include"), ({"include": [5]}, "include"),
            ({"top_logprobs": 2}, "top_logprobs"), ({"metadata": {"a": 5}}, "metadata"), ({"store": "yes"}, "store"),
            ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": 3}, "temperature"), ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
            ({"reasoning": {"summary": "concise"}}, "reasoning.summary"), ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
            ({"text": {"format": {"type": "yaml"}}}, "text.format"), ({"text": {"verbosity": "high"}}, "text.verbosity"),
            ({"instructions": 5}, "instructions"), ({"previous_response_id": 5}, "previous_response_id"), ({"shade": 1}, "shade"),
            ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"), ({"n": 2}, "n"),
            ({"input": "word " * 80000}, "input")]:
        error = s.refused(400, more)
        assert error["param"] and error["param"].startswith(param), (more if len(str(more)) < 999 else "long", error)
        assert param == "input" or param.split(".")[-1].split("[")[0] in error["message"], error
        assert "messages" not in error["message"], error
    assert s.refused(404, {"model": "other"})["code"] == "model_not_found"
    assert s.refused(404, {"previous_response_id": "resp_\u0000"})["param"] == "previous_response_id"


if __name__ == "__main__":
    sys.exit(main(globals(), Client))
