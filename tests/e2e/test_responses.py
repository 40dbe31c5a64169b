#!/usr/bin/env python3
"""The Responses API against the three real programs: forms of `text.format` and of tools are enforced, kept
conversations go on, streamed and whole. What the text side does alone is in test_router_responses.py.

usage: test_responses.py BUILD [TEST...]"""
import json
import unittest
from typing import Literal

import cluster as e2e

openai = e2e.need("openai")
pydantic = e2e.need("pydantic")


class City(pydantic.BaseModel):
    name: Literal["Bern", "Basel"]
    days: Literal[1, 2, 3]


TOOL = {"type": "function", "name": "look", "strict": True, "parameters": City.model_json_schema() | {"additionalProperties": False}}


class TestResponses(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = e2e.Cluster(max_context=4096, max_running=8)
        cls.cluster.__enter__()
        cls.client = cls.cluster.client()

    @classmethod
    def tearDownClass(cls):
        cls.cluster.wait_baseline()
        cls.cluster.__exit__(None, None, None)

    def test_parse(self):
        for seed in range(4):
            more = dict(model="needle", input="Where?", max_output_tokens=200, extra_body={"seed": seed})
            r = self.client.responses.parse(text_format=City, **more)
            self.assertEqual(r.status, "completed", r)
            self.assertIn(r.output_parsed.name, ("Bern", "Basel"))
            with self.client.responses.stream(text_format=City, **more) as stream:
                final = [e for e in stream][-1].response
            self.assertEqual(final.output_parsed, r.output_parsed)
            self.assertEqual(r.text.format.type, "json_schema")

    def test_required_call(self):
        for choice in ("required", {"type": "function", "name": "look"}):
            r = self.client.responses.create(model="needle", input="Where?", max_output_tokens=300, tools=[TOOL], tool_choice=choice,
                                             extra_body={"seed": 3})
            calls = [i for i in r.output if i.type == "function_call"]
            self.assertTrue(calls, r)
            City.model_validate(json.loads(calls[0].arguments))
            done = [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls]
            after = self.client.responses.create(model="needle", input=done, previous_response_id=r.id, tools=[TOOL], max_output_tokens=8)
            self.assertGreater(after.usage.input_tokens, r.usage.input_tokens + len(calls))

    def test_kept_is_the_same_prompt(self):
        """A conversation by id and the same one sent whole give the same answer, to the token."""
        first = self.client.responses.create(model="needle", input="The code is 7. Remember it.", max_output_tokens=12, temperature=0)
        kept = self.client.responses.create(model="needle", input="Which?", previous_response_id=first.id, max_output_tokens=12, temperature=0)
        sent = self.client.responses.create(model="needle", max_output_tokens=12, temperature=0, store=False, input=[
            {"role": "user", "content": "The code is 7. Remember it."}, *first.output, {"role": "user", "content": "Which?"}])
        self.assertEqual((kept.output_text, kept.usage), (sent.output_text, sent.usage))

    def test_refused_by_name(self):
        for more, param in (({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "minContains": 5, "not": {}}}}}, "text.format"),
                            ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice")):
            try:
                self.client.responses.create(model="needle", input="x", **more)
                self.fail(f"{more} was taken")
            except openai.BadRequestError as e:
                self.assertTrue(e.param.startswith(param), e)
                self.assertNotIn("response_format", str(e))


if __name__ == "__main__":
    e2e.main(__name__)
