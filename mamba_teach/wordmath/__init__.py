"""Arithmetic word problems: a task small enough to learn on a laptop, and real enough to measure.

A serving engine that is wrong rarely crashes; it answers a little worse. To see that, one needs a
model that knows something and questions with answers that can be checked. This sub-package is GSM8K
in miniature: it writes the problems (`problems`), lays them out as prompts (`prompts`) and makes
the tokenizer that reads them (`make_tokenizer`). Importing it imports nothing else; each module is
imported by its own name.
"""
