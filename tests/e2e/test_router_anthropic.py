#!/usr/bin/env python3
"""Anthropic's Messages API as its own client sees it: PyPI's `anthropic` against recorded answers. See
router_frame.py."""
import json
import sys

from router_frame import ARGUMENTS, CALL, MODEL_DIR, OTHER, PATIENCE, WEATHER, D, Script, T, calls, main, user

try:
    import anthropic
except ImportError:
    print("the PyPI package anthropic is not installed")
    sys.exit(77)

TOOLS = [{"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER["function"]["parameters"]},
         {"name": "run", "input_schema": {"type": "object", "properties": {}}}]
THINK = {"type": "enabled", "budget_tokens": 1024}


class Client:
    def __init__(self):
        self.script = Script(MODEL_DIR)
        self.setup = self.script.setup
        self.stop, self.logs = self.setup.stop, self.setup.logs
        self.api = anthropic.Anthropic(base_url=self.setup.url, api_key="none", max_retries=0, timeout=PATIENCE)

    def body(self, text, **more):
        return {"model": "needle", "max_tokens": 4000, "messages": user(self.script.say(text)), **more}

    def whole(self, text, **more):
        return self.api.messages.create(**self.body(text, **more))

    def streamed(self, text, **more):
        with self.api.messages.stream(**self.body(text, **more)) as stream:
            events = list(stream)
            return stream.get_final_message(), events


def blocks(message):
    """Content without the ids, which differ between answers."""
    return [b.model_dump(exclude={"id"}) for b in message.content]


def test_text(s):
    m = s.whole("Hello wörld 🙂")
    assert [b.type for b in m.content] == ["text"] and m.content[0].text == "Hello wörld 🙂"
    assert (m.type, m.role, m.model, m.stop_reason, m.stop_sequence) == ("message", "assistant", "needle", "end_turn", None)
    assert m.id.startswith("msg_") and m.usage.output_tokens > 3
    final, events = s.streamed("Hello wörld 🙂")
    assert blocks(final) == blocks(m) and final.stop_reason == "end_turn" and final.usage.input_tokens > 0
    assert final.usage.output_tokens > 3
    raw = [e.type for e in events if e.type in ("message_start", "content_block_start", "content_block_stop", "message_stop")]
    assert raw == ["message_start", "content_block_start", "content_block_stop", "message_stop"], raw


def test_calls(s):
    text = "Let me look." + calls(CALL, OTHER)
    one, (other, events) = s.whole(text, tools=TOOLS), s.streamed(text, tools=TOOLS)
    assert [b.type for b in one.content] == ["text", "tool_use", "tool_use"] and one.stop_reason == "tool_use"
    assert one.content[1].input == ARGUMENTS and one.content[2].input == {} and one.content[1].name == "get_weather"
    assert blocks(one) == blocks(other) and other.stop_reason == "tool_use"
    assert len({b.id for m in (one, other) for b in m.content[1:]}) == 4
    assert "input_json" in {e.type for e in events}
    marks = [(e.type[14:], e.index) for e in events if e.type in ("content_block_start", "content_block_stop")]
    assert marks == [(kind, i) for i in range(3) for kind in ("start", "stop")], marks
    single = s.whole(text, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(single.content) == 2
    none = s.whole(text, tools=TOOLS, tool_choice={"type": "none"})
    assert [b.type for b in none.content] == ["text"] and none.stop_reason == "end_turn"
    cut, _ = s.streamed(calls(CALL), tools=TOOLS, max_tokens=len(s.script.v.tokens(calls(CALL), s.script.r)) // 3)
    assert cut.stop_reason == "max_tokens"


def test_long_integers(s):
    """More than 64 bits are still a number of JSON, and its digits are the model's."""
    made = calls(f'<{D}invoke name="run">\n<{D}parameter name="n" string="false">'
                       f'123456789012345678901</{D}parameter>\n</{D}invoke>\n')
    assert s.whole(made, tools=TOOLS).content[0].input == {"n": 123456789012345678901}


def test_thinking(s):
    text = f"Hm.\n{T}\n\nSo." + calls(OTHER)
    for more in ({"thinking": THINK}, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}):
        one, (other, _) = s.whole(text, tools=TOOLS, **more), s.streamed(text, tools=TOOLS, **more)
        assert [b.type for b in one.content] == ["thinking", "text", "tool_use"] and one.content[0].thinking == "Hm."
        assert blocks(one) == blocks(other)
    assert [b.type for b in s.whole("x").content] == ["text"], "thinking is off unless it is asked for"
    plain, most = (s.api.messages.count_tokens(model="needle", messages=user("x"), thinking={"type": "adaptive"},
                                               output_config={"effort": e}).input_tokens for e in ("high", "max"))
    assert most > plain + 50, "the prefix of the strongest effort is missing"


def test_stops(s):
    for m in (s.whole("alpha STOP beta", stop_sequences=["zzz", "STOP"]),
              s.streamed("alpha STOP beta", stop_sequences=["zzz", "STOP"])[0]):
        assert (m.content[0].text, m.stop_reason, m.stop_sequence) == ("alpha ", "stop_sequence", "STOP")
    m = s.whole("a b c d e f", max_tokens=2)
    assert m.stop_reason == "max_tokens" and m.usage.output_tokens == 2


def test_count(s):
    body = s.body("x", tools=TOOLS, system="Be brief.", thinking=THINK)
    counted = s.api.messages.count_tokens(**{k: v for k, v in body.items() if k != "max_tokens"})
    assert counted.input_tokens == s.api.messages.create(**body).usage.input_tokens
    # The same conversation by the other API is the same prompt.
    chat = s.script.api.chat.completions.create(
        model="needle", messages=[{"role": "system", "content": "Be brief."}, *body["messages"]], reasoning_effort="high",
        tools=[{"type": "function", "function": {"name": t["name"], **({"description": t["description"]} if "description" in t else {}),
                                                 "parameters": t["input_schema"]}} for t in TOOLS])
    assert chat.usage.prompt_tokens == counted.input_tokens


def test_agent_loop(s):
    messages = [{"role": "user", "content": "?"}]
    for turn in range(6):
        last = turn == 5
        script = s.script.say(f"Thought {turn}.{T}" + ("Done." if last else calls(CALL, OTHER)))
        if turn == 0:
            messages[0]["content"] = [{"type": "text", "text": script, "cache_control": {"type": "ephemeral"}}]
        else:
            used = [b for b in messages[-1]["content"] if b.type == "tool_use"]
            messages.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": used[1].id, "content": "second", "is_error": True},
                {"type": "tool_result", "tool_use_id": used[0].id, "content": [{"type": "text", "text": "first"}]},
                {"type": "text", "text": script}]})
        m = s.api.messages.create(model="needle", max_tokens=4000, messages=messages, tools=TOOLS, thinking=THINK)
        assert m.content[0].thinking == f"Thought {turn}." and m.stop_reason == ("end_turn" if last else "tool_use"), m
        messages.append({"role": "assistant", "content": m.content})
    assert messages[-1]["content"][1].text == "Done."


def test_errors(s):
    ok = {"model": "needle", "max_tokens": 5, "messages": user("x")}
    for more, name in [({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"temperature": 1.5}, "temperature"),
                       ({"messages": []}, "messages"), ({"mcp_servers": [1]}, "mcp_servers"), ({"shade": 1}, "shade"), ({"speed": "fast"}, "speed"),
                       ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
                       ({"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS}, "tool_choice"),
                       ({"tool_choice": {"type": "some"}, "tools": TOOLS}, "tool_choice.type"),
                       ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
                       ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
                       ({"tools": [{"name": "x"}]}, "tools[0].input_schema"), ({"thinking": {"type": "often"}}, "thinking.type"),
                       ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
                       ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
                       ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
                        "messages[0].content[0].tool_use_id"),
                       ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "prefill"}]}, "messages"),
                       ({"stop_sequences": ["x"] * 17}, "stop_sequences: expected"),
                       ({"stop_sequences": ["x", ""]}, "stop_sequences[1]: expected")]:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            if path.endswith("count_tokens") and name == "max_tokens" and more["max_tokens"] is None:
                continue
            status, _, text = s.setup.get(path, "POST", {**ok, **more})
            error = json.loads(text)
            assert status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error", (more, text)
            assert name in error["error"]["message"], (more, text)
    try:
        s.api.messages.create(**{**ok, "model": "other"})
        raise AssertionError("an unknown model was found")
    except anthropic.NotFoundError as e:
        assert e.body["error"]["type"] == "not_found_error"
    status, _, text = s.setup.get("/v1/messages", "POST", b"{")
    assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"


def test_failure_in_a_stream(s):
    try:
        with s.api.messages.stream(model="needle", max_tokens=100, messages=user("@fail " + "one two three four " * 9)) as stream:
            for _ in stream:
                pass
        raise AssertionError("a broken stream looked whole")
    except anthropic.APIError as e:
        assert "asked to fail" in str(e)
    status, _, text = s.setup.get("/v1/messages", "POST", {"model": "needle", "max_tokens": 100,
                                                           "messages": user("@fail " + "one two three four " * 9)})
    assert status == 500 and json.loads(text)["error"]["type"] == "api_error", text


if __name__ == "__main__":
    sys.exit(main(globals(), Client))
