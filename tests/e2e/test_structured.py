#!/usr/bin/env python3
"""Answers with a form, by PyPI's openai client: JSON objects, schemas (pydantic's parse helper too),
patterns, forced and strict tool calls. The bundled model's answers are otherwise nonsense, so every
one that is complete must hold for what was asked, however it was computed: here or there, alone or
beside others, with several choices, preempted, after a worker's death.

usage: test_structured.py BUILD [unittest arguments]"""
import concurrent.futures
import json
import os
import pathlib
import random
import signal
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cluster as e2e  # noqa: E402

openai = e2e.need("openai")
OBJECT = {"response_format": {"type": "json_object"}}
PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
          "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a", "ü"]}},
                         "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]}},
          "$defs": {"place": {"type": "object", "additionalProperties": False, "required": ["street"],
                              "properties": {"street": {"type": "string"}}}}}
TOOLS = [{"type": "function", "function": {
             "name": "book", "strict": True, "description": "Books a room", "parameters": {
                 "type": "object", "additionalProperties": False, "required": ["room", "nights"],
                 "properties": {"room": {"enum": ["single", "double"]}, "nights": {"type": "integer"}}}}},
         {"type": "function", "function": {"name": "hang_up", "strict": True, "parameters": {
             "type": "object", "properties": {}, "additionalProperties": False}}}]
SEED, KILLS = random.randrange(1 << 32), 2
OURS = ("min_tokens", "guided_json", "guided_regex", "guided_choice", "regex", "structured_outputs")


def ids_of(c, text):
    status, j = c.post("/tokenize", {"model": "needle", "prompt": text, "add_special_tokens": False})
    assert status == 200, j
    return j["tokens"]


def closing(c):
    """Biases that make this model close what it opened: it has never seen JSON."""
    biases = {'"': 16, "}": 15, "]": 15, ",": 15, ":": 15, "<": 14, "</": 16}
    return {str(ids_of(c, t)[0]): b for t, b in biases.items()} | {"1": 10}


def endless(c):
    """And such that never do."""
    return {str(ids_of(c, t)[0]): b for t, b in (('"', 12), (",", 11), (":", 11), ("{", 8), ("}", -100), ("]", -100))}


def body(text="JSON", seed=1, tokens=250, **more):
    b = {"temperature": 1.0, "seed": seed, "max_tokens": tokens, **more}
    ours = {k: b.pop(k) for k in OURS if k in b}
    return dict(model="needle", messages=[{"role": "user", "content": text}], extra_body=ours, **b)


def plain(choice):
    l = choice.logprobs and [(e.token, e.logprob) for e in choice.logprobs.content]
    return choice.message.content, choice.finish_reason, l


def choice_seed(seed, choice):
    s = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    return s - 2**64 if s >= 2**63 else s


class Structured:
    settings = {}

    @classmethod
    def setUpClass(cls):
        cls.cluster = e2e.Cluster(max_context=4096, max_running=8, **cls.settings)
        cls.cluster.__enter__()
        cls.client = cls.cluster.client()
        cls.bias = closing(cls.cluster)

    @classmethod
    def tearDownClass(cls):
        cls.cluster.wait_baseline()
        cls.cluster.__exit__(None, None, None)

    def ask(self, **more):
        r = self.client.chat.completions.create(**body(logit_bias=self.bias, **more))
        return r

    def stream(self, **more):
        text, finish = "", None
        for chunk in self.client.chat.completions.create(stream=True, **body(logit_bias=self.bias, **more)):
            for c in chunk.choices:
                text += c.delta.content or ""
                finish = c.finish_reason or finish
        return text, finish

    def test_json_object(self):
        ended = 0
        for seed in range(1, 4):
            r = self.ask(seed=seed, logprobs=True, **OBJECT).choices[0]
            if r.finish_reason == "stop":
                self.assertIsInstance(json.loads(r.message.content), dict)
                ended += len(r.message.content) > 4
            # what the model thinks of it is told, not what the form made of it
            self.assertTrue(all(e.logprob <= 0 for e in r.logprobs.content))
            self.assertEqual("".join(e.token for e in r.logprobs.content), r.message.content)
            self.assertEqual(self.stream(seed=seed, **OBJECT), (r.message.content, r.finish_reason))
        self.assertGreater(ended, 0)

    def test_schema(self):
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}}
        ended = 0
        for seed in range(1, 4):
            r = self.ask(seed=seed, **form).choices[0]
            self.assertEqual(self.stream(seed=seed, **form), (r.message.content, r.finish_reason))
            if r.finish_reason == "stop":
                self.holds(json.loads(r.message.content), PERSON)
                ended += 1
        self.assertGreater(ended, 0)
        for more in ({"guided_json": PERSON}, {"guided_json": json.dumps(PERSON)}, {"structured_outputs": {"json": PERSON}}):
            r = self.ask(seed=1, **more).choices[0]
            if r.finish_reason == "stop":
                self.holds(json.loads(r.message.content), PERSON)

    def holds(self, value, schema):
        """The schema, by jsonschema where it is installed, and what matters of it without."""
        self.assertEqual({"name", "age"} - set(value), set())
        self.assertLessEqual(set(value), set(PERSON["properties"]))
        self.assertIsInstance(value["age"], int)
        try:
            import jsonschema
        except ImportError:
            return
        jsonschema.validate(value, schema)

    def test_pydantic(self):
        pydantic = e2e.need("pydantic")

        class Item(pydantic.BaseModel):
            label: str
            count: int

        class Order(pydantic.BaseModel):
            urgent: bool
            items: list[Item]

        parsed = 0
        for seed in range(1, 4):
            try:
                r = self.client.chat.completions.parse(response_format=Order, **body(seed=seed, logit_bias=self.bias))
            except openai.LengthFinishReasonError:
                continue
            self.assertIsInstance(r.choices[0].message.parsed, Order)
            parsed += 1
        self.assertGreater(parsed, 0)

    def test_patterns(self):
        for more in ({"guided_regex": r"[a-f]{3}-\d{2,4}"}, {"regex": r"[a-f]{3}-\d{2,4}"},
                     {"structured_outputs": {"regex": r"[a-f]{3}-\d{2,4}"}}):
            for seed in range(3):
                text = self.ask(seed=seed, **more).choices[0].message.content
                self.assertRegex(text, r"^[a-f]{3}-[0-9]{2,4}$")
        words = ["yes", "no (perhaps)", "a|b", "ja, überall"]
        for i in range(len(words)):
            r = self.ask(seed=i, guided_choice=words[i:]).choices[0]
            self.assertIn(r.message.content, words[i:])
            self.assertEqual(r.finish_reason, "stop")
        r = self.client.completions.create(model="needle", prompt="x", max_tokens=20, extra_body={"guided_choice": words})
        self.assertIn(r.choices[0].text, words)
        r = self.client.completions.create(model="needle", prompt=["x", "y", "z"], n=2, max_tokens=20,
                                           extra_body={"guided_regex": "[xy]z"})
        self.assertEqual([c.text[1:] for c in r.choices], ["z"] * 6)

    def calls(self, seed, **more):
        r = self.ask(seed=seed, tools=TOOLS, **more).choices[0]
        deltas = {}
        for chunk in self.client.chat.completions.create(stream=True, **body(seed=seed, logit_bias=self.bias, tools=TOOLS, **more)):
            for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                d = deltas.setdefault(call.index, ["", ""])
                d[0] += call.function.name or ""
                d[1] += call.function.arguments or ""
        got = [(c.function.name, c.function.arguments) for c in r.message.tool_calls or []]
        self.assertEqual([tuple(d) for d in deltas.values()], got)
        self.assertEqual(r.finish_reason == "tool_calls", r.finish_reason != "length" and bool(got), r)
        self.assertFalse(r.message.content)
        return r.finish_reason, [(name, json.loads(a)) for name, a in got] if r.finish_reason == "tool_calls" else []

    def test_forced_calls(self):
        called = set()
        for seed in range(1, 4):
            finish, got = self.calls(seed, tool_choice="required")
            for name, arguments in got:
                called.add(name)
                self.check_call(name, arguments)
            if finish == "tool_calls":
                self.assertGreater(len(got), 0)
        self.assertGreater(len(called), 0)
        for seed in range(1, 4):
            finish, got = self.calls(seed, tool_choice="required", parallel_tool_calls=False)
            self.assertLessEqual(len(got), 1)
            finish, got = self.calls(seed, tool_choice={"type": "function", "function": {"name": "book"}})
            self.assertTrue(all(name == "book" for name, _ in got))
            for name, arguments in got:
                self.check_call(name, arguments)

    def check_call(self, name, arguments):
        if name == "book":
            self.assertLessEqual(set(arguments), {"room", "nights"})
            self.assertIsInstance(arguments["nights"], int)
            self.assertIn(arguments["room"], ("single", "double"))
        else:
            self.assertEqual((name, arguments), ("hang_up", {}))

    def test_strict_tools(self):
        """What is not forced may come or not; what comes is right."""
        for seed in range(1, 3):
            r = self.ask(seed=seed, tools=TOOLS).choices[0]
            for c in (r.message.tool_calls or []) if r.finish_reason == "tool_calls" else []:
                self.check_call(c.function.name, json.loads(c.function.arguments))
        with self.assertRaises(openai.BadRequestError) as e:
            self.ask(tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                "type": "object", "properties": {}, "patternProperties": {"x": {}}, "if": {}}}}])
        self.assertEqual(e.exception.param, "tools")

    def test_anthropic(self):
        anthropic = e2e.need("anthropic")
        client = anthropic.Anthropic(base_url=self.cluster.url, api_key="none", max_retries=0, timeout=e2e.PATIENCE)
        tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
        used = 0
        for seed, choice in enumerate([{"type": "any"}, {"type": "tool", "name": "book"}, {"type": "tool", "name": "hang_up"}]):
            m = client.messages.create(model="needle", max_tokens=400, tools=tools, tool_choice=choice,
                                       extra_body={"temperature": 1}, messages=[{"role": "user", "content": f"go {seed}"}])
            self.assertTrue(all(b.type == "tool_use" for b in m.content), m)
            if m.stop_reason != "tool_use":
                continue
            for b in m.content:
                self.check_call(b.name, b.input)
                self.assertIn(b.name, (choice.get("name", b.name),))
            used += 1
        self.assertGreater(used, 0)
        m = client.messages.create(model="needle", max_tokens=300, messages=[{"role": "user", "content": "x"}],
                                   extra_body={"output_config": {"format": {"type": "json_schema", "schema": {"enum": [17, "x"]}}}})
        self.assertIn(json.loads(m.content[0].text), (17, "x"))

    def test_refusals(self):
        for more, param, word in (
                ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {"type": "string"}}}}}, "response_format", "if"),
                ({"guided_regex": "(?=a)b"}, "guided_regex", "guided_regex"), ({"guided_regex": "["}, "guided_regex", "guided_regex"),
                ({"guided_json": '{"type": '}, "guided_json", "guided_json")):
            with self.assertRaises(openai.BadRequestError) as e:
                self.ask(**more)
            self.assertEqual(e.exception.param, param)
            self.assertIn(word, str(e.exception))

    def test_choices_and_neighbours(self):
        alone = [plain(self.ask(seed=choice_seed(5, c), logprobs=True, **OBJECT).choices[0]) for c in range(3)]
        free = plain(self.ask(seed=9, logprobs=True, tokens=150).choices[0])
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            three = pool.submit(self.ask, seed=5, n=3, logprobs=True, **OBJECT)
            others = [pool.submit(self.ask, seed=9, logprobs=True, tokens=150) for _ in range(3)]
            self.assertEqual([plain(c) for c in three.result().choices], alone)
            for o in others:
                self.assertEqual(plain(o.result().choices[0]), free)

    def test_cut_and_stopped(self):
        r = self.ask(seed=2, tokens=3, min_tokens=3, **OBJECT).choices[0]
        whole = self.ask(seed=2, **OBJECT).choices[0].message.content
        self.assertTrue(r.finish_reason == "length" or json.loads(r.message.content) == {}, r)
        stop = whole[1:3]
        r = self.ask(seed=2, stop=[stop], **OBJECT).choices[0]
        self.assertEqual((r.message.content, r.finish_reason), (whole[:whole.index(stop)], "stop"))

    def test_thinking_first(self):
        think_end = {str(self.cluster_think_end()): 14}
        ended = 0
        for seed in range(1, 4):
            r = self.client.chat.completions.create(
                **body(seed=seed, tokens=250, logit_bias=self.bias | think_end, reasoning_effort="high", **OBJECT)).choices[0]
            if r.finish_reason == "stop":
                self.assertIsInstance(json.loads(r.message.content), dict)
                ended += 1
        self.assertGreater(ended, 1)
        for seed in range(1, 4):  # and so do forced calls
            r = self.client.chat.completions.create(
                **body(seed=seed, tokens=250, logit_bias=self.bias | think_end, reasoning_effort="high", tools=TOOLS,
                       tool_choice="required", parallel_tool_calls=False)).choices[0]
            self.assertIn(r.finish_reason, ("tool_calls", "length"))
            self.assertFalse(r.message.content)
            if r.finish_reason == "tool_calls":
                self.check_call(r.message.tool_calls[0].function.name, json.loads(r.message.tool_calls[0].function.arguments))

    def cluster_think_end(self):
        for id in range(4000):
            status, j = self.cluster.post("/detokenize", {"model": "needle", "tokens": [id]})
            if status == 200 and j["prompt"] == "</think>":
                return id
        raise AssertionError("no </think>")


class TestDisaggregated(Structured, unittest.TestCase):
    pass


@unittest.skipUnless(e2e.WHOLE, "one worker for both roles: tests/nightly")
class TestColocated(Structured, unittest.TestCase):
    settings = {"router__colocate": "on", "cluster__prefill": 0}


class TestMoved(unittest.TestCase):
    """Attempts that go on where another ended."""

    def all_of(self, c, bodies):
        client = c.client()
        ask = lambda b: plain(client.chat.completions.create(**b).choices[0])  # noqa: E731
        return ask, [ask(b) for b in bodies]

    def test_preempted(self):
        with e2e.Cluster(max_context=4096, pool_pages=8, reserve_tokens=16, max_running=8) as c:
            text = "word " * 60
            bodies = [body(text, seed, 300, logit_bias=endless(c), logprobs=True, **OBJECT) for seed in range(1, 7)]
            ask, alone = self.all_of(c, bodies)
            before = c.get("/v1/cluster")[1]["counts"]
            self.assertEqual(before["preempted"], 0)
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                got = list(pool.map(ask, bodies))
            self.assertEqual(got, alone)
            after = c.get("/v1/cluster")[1]["counts"]
            print("preempted", after["preempted"])
            self.assertGreater(after["preempted"], 0)
            self.assertEqual(after["failed"], 0)
            c.wait_baseline()

    def test_decode_dies(self):
        with e2e.Cluster(max_context=4096, max_running=4, cluster__decode=2) as c:
            bodies = [body("x", 3, 900, logit_bias=endless(c), logprobs=True, **OBJECT)]
            ask, alone = self.all_of(c, bodies)
            got = []
            t = threading.Thread(target=lambda: got.append(ask(bodies[0])))
            t.start()
            victim, until = None, time.monotonic() + 60
            while victim is None:
                assert time.monotonic() < until
                _, j = c.get("/v1/cluster")
                under_way = [r for r in j["requests"] if r["tokens"] >= 50]
                busy = [w["name"] for w in j["workers"] if w["role"] == "decode" and w["legs"]]
                victim = busy[0] if under_way and busy else None
                time.sleep(0.01)
            os.kill(c.pid(victim), signal.SIGKILL)
            t.join(120)
            self.assertEqual(got, alone)
            self.assertEqual(c.get("/v1/cluster")[1]["counts"]["retries"], 1)
            r = c.tool("restart", victim, "--config", c.config)
            self.assertEqual(r.returncode, 0, r.stderr)

    def forms(self, c):
        """One request of each kind of grammar, long enough to be hit."""
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}}
        more = dict(logit_bias=endless(c), logprobs=True)
        return [body("x", 3, 150, **OBJECT, **more), body("y", 4, 150, **form, **more), body("z", 5, 120, guided_regex="([a-z]{2,9} ){90}", logprobs=True),
                body("w", 6, 150, tools=TOOLS, tool_choice="required", **more)]

    @unittest.skipUnless(e2e.WHOLE, "many answers: tests/nightly")
    def test_cancelled_anywhere(self):
        """Clients that leave at any point of an enforced answer, beside one that stays."""
        rng = random.Random(SEED)
        with e2e.Cluster(max_context=4096, max_running=4) as c:
            bodies = self.forms(c)
            ask, alone = self.all_of(c, bodies)
            client = c.client()

            def leave(i):
                b = bodies[i % len(bodies)] | {"seed": i, "n": 1 + i % 3 // 2}
                left = rng.randrange(40)
                with client.chat.completions.create(stream=True, **b) as events:
                    for k, _ in enumerate(events):
                        if k == left:
                            break

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                gone = [pool.submit(leave, i) for i in range(12)]
                for i in range(4):
                    self.assertEqual(ask(bodies[i % 4]), alone[i % 4])
                for g in gone:
                    g.result()
            self.assertEqual([ask(b) for b in bodies], alone)
            self.assertEqual(c.get("/v1/cluster")[1]["counts"]["failed"], 0)
            c.wait_baseline(120)

    def test_killed_anywhere(self):
        """Either worker dies at any point of enforced answers: each comes out as if nothing had been, or says that it did not."""
        rng = random.Random(SEED)
        with e2e.Cluster(max_context=4096, max_running=4, cluster__prefill=2, cluster__decode=2) as c:
            bodies = self.forms(c)
            ask, alone = self.all_of(c, bodies)
            begin = time.monotonic()
            ask(bodies[0])
            usual = time.monotonic() - begin
            whole = 0

            def answer(b):
                try:
                    return ask(b)
                except openai.InternalServerError as e:  # 503: three attempts were lost
                    self.assertEqual(e.status_code, 503)
                    return None

            for _ in range(KILLS):
                victim = rng.choice(["prefill@0", "prefill@1", "decode@0", "decode@1"])
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    asked = [pool.submit(answer, b) for b in bodies]
                    time.sleep(rng.random() * 1.5 * usual)
                    os.kill(c.pid(victim), signal.SIGKILL)
                    got = [a.result() for a in asked]
                self.assertEqual([g for g, a in zip(got, alone) if g not in (None, a)], [], f"seed {SEED}, {victim}")
                whole += sum(g is not None for g in got)
                r = c.tool("restart", victim, "--config", c.config)
                self.assertEqual(r.returncode, 0, r.stderr)
            print(f"{whole} of {KILLS * len(bodies)} answers whole after {KILLS} kills,", c.get("/v1/cluster")[1]["counts"]["retries"], "retries")
            self.assertGreater(whole, KILLS * len(bodies) // 2)
            self.assertEqual([ask(b) for b in bodies], alone)
            c.wait_baseline(120)


if __name__ == "__main__":
    print("seed", SEED)
    e2e.main("__main__")
