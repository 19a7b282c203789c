"""Training data of the sample model: questions and answers of a small domain, made by rules from facts.

Everything is deterministic: one seed gives one text. `questions.py` says what is taught and what is held out.
"""
